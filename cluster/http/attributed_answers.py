"""The answer of a turn whose program the ingress found, and the header that reports the program."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Self, TypeVar

from starlette.responses import Response

from cluster.api.completion_parts import completion_parts
from cluster.api.openai import SSE_DONE
from cluster.api.sse import Answers, EventStream
from cluster.core.errors import HttpError
from cluster.core.lineage import Attributed, LineageIndex

Piece = TypeVar("Piece")

PROGRAM_HEADER = "x-caesura-program"
"""The response's header with the id of the turn's program. A client that sends it as `x-session-id` names the program
itself.
"""


async def attributed_pieces(
    pieces: AsyncIterator[Piece], index: LineageIndex, turn: Attributed
) -> AsyncIterator[Piece]:
    """Yield the pieces of a turn or the events of a run, and record in the index that it has ended.

    Closing it closes ``pieces``.
    """
    served = False
    try:
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                served = served or not isinstance(piece, HttpError)
                yield piece
    finally:
        index.ended(turn, served=served)


def reported_program(turn: Attributed) -> str | None:
    """Return the value of `PROGRAM_HEADER` for a turn; None: its program has no id, or one that no header can have."""
    program_id = turn.identity.program_id
    return program_id if program_id is not None and program_id.isascii() else None


def program_headers(program_id: str) -> dict[str, str]:
    """Return the header that reports a program. An id that no header can have gives none."""
    return {PROGRAM_HEADER: program_id} if program_id.isascii() else {}


class AttributedAnswers:
    """Passes a turn's answer on, and records in the index that the turn has ended.

    Args:
        answers: the answer.
        index: has attributed the turn.
        turn: the turn that it answers.
    """

    def __init__(self, answers: Answers, index: LineageIndex, turn: Attributed) -> None:
        self._answers = answers
        self._index = index
        self._turn = turn
        self._served = False
        self._by_prompt = turn.by_prompt

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        try:
            piece = await anext(self._answers)
        except BaseException:
            self._end()
            raise
        if isinstance(piece, HttpError):
            self._end()
            return piece
        self._served = True
        if self._by_prompt is not None and self._by_prompt.wants_answer:
            for part in completion_parts(piece):
                self._by_prompt.received(part.text or "", part.token_ids or ())
        if piece.startswith(b"{") or piece.endswith(SSE_DONE):
            self._end()
        return piece

    def cancel(self) -> None:
        """Stop the work on the answer. After its end, it has no effect."""
        self._answers.cancel()
        self._end()

    def name_program(self, response: Response) -> None:
        """Set the response's header to the id of the turn's program, if it has one."""
        program_id = reported_program(self._turn)
        if program_id is None:
            return
        if isinstance(response, EventStream):
            response.added_headers.append((PROGRAM_HEADER.encode(), program_id.encode()))
        else:
            response.headers[PROGRAM_HEADER] = program_id

    def _end(self) -> None:
        self._index.ended(self._turn, served=self._served)
