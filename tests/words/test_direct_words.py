"""The direct data plane's words: what is seen of a cut request, the router's notes, what cannot be configured."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config.schema import CaesuraConfig
from cluster.core.errors import Overloaded, TooManyRequests
from cluster.core.identity import seen_turn, visible_fields
from cluster.direct.environment import direct_environment, free_ports
from cluster.direct.note import RefusalNote, RouterNote

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5), st.data(), st.sampled_from([None, 1]))
def test_of_a_cut_body_only_whole_fields_are_seen(
    body: dict[str, object], data: st.DataObject, indent: int | None
) -> None:
    raw = json.dumps(body, indent=indent).encode()
    assert visible_fields(raw) == body
    cut = data.draw(st.integers(0, len(raw)))
    seen = visible_fields(raw[:cut])
    assert all(key in body and body[key] == value for key, value in seen.items())


@given(st.binary(max_size=64))
def test_no_bytes_are_an_error(raw: bytes) -> None:
    assert isinstance(visible_fields(raw), dict)


@pytest.mark.parametrize("cut", [b"12", b"12.", b"12.5e", b"12.5e+", b"12.5e+3"])
def test_a_number_in_which_the_body_is_cut_is_not_seen(cut: bytes) -> None:
    assert visible_fields(b'{"a": 1, "session_id": ' + cut) == {"a": 1}


def test_a_deep_body_is_no_error() -> None:
    assert visible_fields(b'{"a": ' + b"[" * 100_000) == {}


def test_the_body_wins_over_the_header_as_everywhere() -> None:
    identity, body = seen_turn({"x-session-id": "b"}, b'{"program_id": "a", "prompt": "Once"}')
    assert (identity.program_id, body["prompt"]) == ("a", "Once")


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"program_id": {}}', b'{"program_id": "' + b"x" * 300 + b'"}'])
def test_what_the_body_says_wrongly_leaves_the_header(raw: bytes) -> None:
    assert seen_turn({"x-session-id": "b"}, raw)[0].program_id == "b"


def test_a_header_that_cannot_be_used_is_nobody_s() -> None:
    assert seen_turn({"x-session-id": "x" * 300}, b"{}")[0].program_id is None


REFUSAL = RefusalNote.of(TooManyRequests('say "no"', code="tenant_share", retry_after_s=7))


@pytest.mark.parametrize("note", [RouterNote(), RouterNote("default/ü", 3, "turn-1"), RouterNote(refusal=REFUSAL)])
def test_a_note_survives_its_header(note: RouterNote) -> None:
    value = note.encode()
    assert RouterNote.decode(value) == note
    # HAProxy's script takes it out of JSON by a pattern that knows no escapes and no braces.
    assert not set(value) & set('"\\{} ')


@pytest.mark.parametrize("value", ["", "?", "bm9uc2Vuc2U=", "W10=", "eyJ4IjogMX0=", "eyJyZWZ1c2FsIjogMX0=", "\xff"])
def test_what_is_no_note_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="not a note"):
        RouterNote.decode(value)


def test_a_refusal_is_told_as_it_was_meant() -> None:
    told = REFUSAL.as_error()
    assert isinstance(told, Overloaded)
    assert (told.status, told.message, told.code, told.retry_after_s) == (429, 'say "no"', "tenant_share", 7)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"models": {"other": {}}}, "models"),
        ({"model_routing": {"coding": [{"model": "tiny"}]}}, "model_routing"),
        ({"tools": {"request_kinds": ["mcp"]}}, "tools"),
        ({"tools": {"defined": {"find": {"kind": "http", "url": "https://example.org", "parameters": {}}}}}, "tools"),
    ],
)
def test_what_this_data_plane_cannot_serve_cannot_be_configured(sections: dict[str, object], key: str) -> None:
    CaesuraConfig.model_validate(sections)
    with pytest.raises(ValidationError) as refused:
        CaesuraConfig.model_validate({"http": {"data_plane": "direct"}, **sections})
    (error,) = refused.value.errors()
    assert error["loc"] == (key,)
    assert "http.data_plane" in error["msg"]


def test_haproxy_has_room_for_the_largest_request_and_time_for_the_longest_wait() -> None:
    config = CaesuraConfig.model_validate(
        {"http": {"max_body_bytes": 1 << 20, "max_header_bytes": 1024}, "router": {"parameters": {"max_wait_s": 40.5}}}
    )
    environment = direct_environment(config, "/run/x")
    assert int(environment["RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE"]) > (1 << 20) + 1024
    assert int(environment["RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S"]) > 41
    ports = [value for name, value in environment.items() if name.endswith("_PORT")]
    assert len(set(ports)) == len(ports) == 4


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50
