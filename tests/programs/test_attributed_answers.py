"""The end of a turn whose program was found, and the header that reports the program."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

import pytest
from starlette.responses import Response

from cluster.api.openai import SSE_DONE
from cluster.api.sse import EventStream
from cluster.core.errors import HttpError, Overloaded
from cluster.core.lineage import Attribution, LineageIndex
from cluster.core.program import ProgramIdentity
from cluster.http.attributed_answers import PROGRAM_HEADER, AttributedAnswers

FIRST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


class Pieces:
    """An answer of these pieces."""

    def __init__(self, pieces: Sequence[bytes | HttpError | Exception]) -> None:
        self._pieces = iter(pieces)
        self.cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        piece = next(self._pieces, None)
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, HttpError) or not isinstance(piece, Exception):
            return piece
        raise piece

    def cancel(self) -> None:
        self.cancelled = True


def answered(index: LineageIndex, *pieces: bytes | HttpError | Exception) -> AttributedAnswers:
    return AttributedAnswers(Pieces(pieces), index, index.attribute(ProgramIdentity(), FIRST))


def in_flight(index: LineageIndex) -> int:
    return sum(program.active for program in index._programs.values())


async def _all(answers: AttributedAnswers) -> None:
    async for _ in answers:
        pass


@pytest.mark.parametrize(
    ("pieces", "known"),
    [
        ((b'{"id": 1}',), 1),
        ((b"data: {}\n\n", SSE_DONE), 1),
        ((b"data: {}\n\n", OSError("the replica died")), 1),
        ((Overloaded("full", retry_after_s=1),), 0),
        ((OSError("no replica"),), 0),
        ((), 0),
    ],
)
def test_a_turn_ends_with_its_answer_and_one_that_was_not_served_begins_nothing(
    pieces: tuple[Any, ...], known: int
) -> None:
    index = LineageIndex()
    answers = answered(index, *pieces)
    assert in_flight(index) == 1
    with suppress(OSError):
        asyncio.run(_all(answers))
    assert (in_flight(index), len(index)) == (0, known)


def test_a_client_that_disconnects_ends_the_turn() -> None:
    index = LineageIndex()
    answers = answered(index, b"data: {}\n\n", SSE_DONE)
    asyncio.run(anext(answers))  # type: ignore[arg-type]
    assert in_flight(index) == 1
    answers.cancel()
    answers.cancel()
    assert (in_flight(index), len(index)) == (0, 1)


@pytest.mark.parametrize(
    "pieces",
    [
        (b'{"choices": [{"index": 0, "text": " there was"}]}',),
        (
            b'data: {"choices": [{"index": 0, "text": " there"}]}\n\n',
            b'data: {"choices": [{"text": " was"}]}\n\n',
            SSE_DONE,
        ),
    ],
    ids=["whole", "stream"],
)
def test_a_completion_is_continued_by_a_prompt_with_its_answer(pieces: tuple[bytes, ...]) -> None:
    index, body = LineageIndex(), {"model": "m", "prompt": "Once"}
    turn = index.attribute(ProgramIdentity(), body)
    asyncio.run(_all(AttributedAnswers(Pieces(pieces), index, turn)))
    other = index.attribute(ProgramIdentity(), {**body, "prompt": "Once there is a bird"})
    assert other.how is Attribution.BEGUN
    later = index.attribute(ProgramIdentity(), {**body, "prompt": "Once there was a bird"})
    assert (later.how, later.identity) == (Attribution.CONTINUED, turn.identity)


def test_the_program_is_reported_by_a_header_of_plain_answers_and_streams() -> None:
    index = LineageIndex()
    turn = index.attribute(ProgramIdentity(), FIRST)
    answers = AttributedAnswers(Pieces(()), index, turn)
    plain, stream = Response(b"{}"), EventStream(None)
    answers.name_program(plain)
    answers.name_program(stream)
    assert turn.how is Attribution.BEGUN
    assert plain.headers[PROGRAM_HEADER] == turn.identity.program_id
    assert stream.added_headers == [(PROGRAM_HEADER.encode(), str(turn.identity.program_id).encode())]


def test_a_request_of_no_program_or_with_an_id_that_no_header_can_have_gets_no_header() -> None:
    index = LineageIndex()
    for identity in (ProgramIdentity(), ProgramIdentity("é")):
        response = Response(b"{}")
        AttributedAnswers(Pieces(()), index, index.attribute(identity, {})).name_program(response)
        assert PROGRAM_HEADER not in response.headers
