"""The pure parts: the window, the lines of the input, and the pieces of files."""

import io
import json

import pytest

from cluster.batches.content import PIECE_BYTES, joined, packed, pieces_of, unpacked
from cluster.batches.input_lines import MAX_ERRORS, MAX_LINES, InputLine, Validation, numbered
from cluster.batches.window import BatchWindow
from cluster.core.errors import BadRequest


def test_the_window_grows_by_one_for_each_window_of_answers() -> None:
    window = BatchWindow(8)
    assert window.size == 4
    for _ in range(5):
        window.served()
    assert window.size == 5
    for _ in range(100):
        window.served()
    assert window.size == 8


def test_the_window_halves_once_for_lines_that_were_started_together() -> None:
    window = BatchWindow(64)
    for _ in range(2000):
        window.served()
    assert window.size == 63 or window.size == 64
    for _ in range(20):
        window.refused(started_s=10.0, now_s=11.0, retry_after_s=2.0)
    assert window.size in (31, 32)
    assert not window.may_start(0, 12.9) and window.may_start(0, 13.0)
    assert window.opens_s(12.0) == 1.0
    window.refused(started_s=13.0, now_s=13.5, retry_after_s=0.0)
    assert window.size in (15, 16)
    for start_s in range(20, 60):
        window.refused(float(start_s), float(start_s), 0.0)
    assert window.size == 1


def test_pieces_end_with_a_line_and_make_the_file_again() -> None:
    content = b"".join(b"%d %s\n" % (number, b"x" * (number % 3000)) for number in range(3000)) + b"no end"
    pieces = list(pieces_of(io.BytesIO(content).read, 1 << 20))
    assert b"".join(pieces) == content and len(pieces) > 3
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert all(len(piece) <= 2 * PIECE_BYTES for piece in pieces)
    assert b"".join(joined(piece + b"\n" for piece in pieces)) == b"".join(piece + b"\n" for piece in pieces)
    assert unpacked(packed(pieces[0])) == pieces[0]
    with pytest.raises(ValueError, match="damaged"):
        unpacked(b"nothing")


def test_a_line_is_bounded_before_it_is_complete() -> None:
    for content in (b"x" * 900_000, b"a\n" + b"x" * 700_000 + b"\nb\n"):
        with pytest.raises(BadRequest, match="longer than 600000 bytes"):
            list(pieces_of(io.BytesIO(content).read, 600_000))


def test_lines_are_numbered_as_an_editor_does() -> None:
    found = list(numbered([b"a\n\n b \r\n", b"\nc\n"]))
    assert [(line.number, line.text) for line in found] == [(1, b"a"), (3, b"b"), (5, b"c")]


def line(number: int, **fields: object) -> InputLine:
    whole = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {}} | fields
    return InputLine(number, json.dumps(whole).encode())


def test_errors_and_lines_are_bounded() -> None:
    validation = Validation("/v1/completions")
    for number in range(100):
        validation.check(line(number, method="PUT"))
    assert len(validation.result()) == MAX_ERRORS
    validation = Validation("/v1/completions")
    for number in range(MAX_LINES + 1):
        validation.check(InputLine(number, b"{}") if number < MAX_LINES else line(number))
    assert [one.code for one in validation.result()] == ["too_many_tasks"]
    assert [one.code for one in Validation("/v1/completions").result()] == ["empty_file"]


@pytest.mark.parametrize("custom_id", ["", "x" * 513, 5, None])
def test_custom_ids_are_texts(custom_id: object) -> None:
    validation = Validation("/v1/completions")
    validation.check(line(1, custom_id=custom_id))
    assert [one.param for one in validation.result()] == ["custom_id"]
