"""A body is read within bounds and parsed strictly."""

import asyncio
import json

import pytest

from cluster.core.errors import BadRequest
from cluster.http import body as http_body
from cluster.http.body import parse_object, read_body

JSON = {"content-type": "application/json"}


def receiver(*chunks: bytes):
    messages = [{"type": "http.request", "body": c, "more_body": i + 1 < len(chunks)} for i, c in enumerate(chunks)]

    async def receive():
        return messages.pop(0)

    receive.left = messages
    return receive


async def test_a_body_in_pieces_is_joined() -> None:
    assert await read_body(receiver(b'{"a"', b": 1}"), JSON, 100) == b'{"a": 1}'


async def test_too_long_is_refused_before_it_is_all_read() -> None:
    receive = receiver(b"x" * 60, b"x" * 60, b"x" * 60)
    with pytest.raises(BadRequest) as caught:
        await read_body(receive, JSON, 100)
    assert caught.value.status == 413
    assert len(receive.left) == 1


async def test_a_declared_length_that_is_too_long_is_refused_unread() -> None:
    receive = receiver(b"{}")
    with pytest.raises(BadRequest) as caught:
        await read_body(receive, {**JSON, "content-length": "101"}, 100)
    assert caught.value.status == 413
    assert len(receive.left) == 1


async def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(http_body, "BODY_WITHIN_S", 0.01)
    with pytest.raises(BadRequest, match="within") as caught:
        await read_body(never, JSON, 100)
    assert caught.value.status == 408


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_other_content_types_are_415(kind) -> None:
    with pytest.raises(BadRequest) as caught:
        await read_body(receiver(b"{}"), {"content-type": kind}, 100)
    assert caught.value.status == 415


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"])
async def test_json_content_types_pass(kind) -> None:
    assert await read_body(receiver(b"{}"), {"content-type": kind}, 100) == b"{}"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"a": "\xff"}', "invalid_utf8"),
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_unicode"),
        (b'{"a": ' + b"[" * 9 + b"]" * 9 + b"}", "json_too_deep"),
        (b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "json_too_deep"),
        (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, "json_too_deep"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "json_too_many_parts"),
        (b'{"a": [' + b"{}," * 100_000 + b"1]}", "json_too_many_parts"),
        (b"{" + b'"k":1,' * 100_001 + b'"k":1}', "json_too_many_parts"),
        (b'{"a": [' + b"1," * 1_000_001 + b"1]}", "json_too_many_parts"),
    ],
)
def test_what_is_not_a_strict_json_object_is_refused(raw, code) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_object(raw, 8)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_depth_is_that_of_the_deepest_container() -> None:
    at_the_limit = {"a": [[[[[[[1]]]]]]], "wide": [{} for _ in range(100)]}
    assert parse_object(json.dumps(at_the_limit).encode(), 8) == at_the_limit


def test_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', 8) == {"a": "\U0001f600"}


def test_a_repeated_key_among_many_is_found_in_linear_time() -> None:
    comparisons = 0

    class Key(str):
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    keys = [Key(f"k{number}") for number in range(1000)] + [Key("k999")]
    with pytest.raises(ValueError, match="'k999' stands twice"):
        http_body._unique([(key, 1) for key in keys])
    assert comparisons < 3 * len(keys)


@pytest.mark.parametrize("text", ["a:b,c{d[" * 150_000, '\\":,{[' * 120_000, "\\\\" * 300_000 + '"{' * 2])
def test_signs_within_texts_are_no_parts(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "more": [text, "x"]}
    assert parse_object(json.dumps(body).encode(), 8) == body
