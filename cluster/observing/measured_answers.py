"""A turn's answer on its way to a client: what its pieces, or its refusal, make of the turn."""

from http import HTTPStatus
from typing import Protocol, Self

from cluster.answer_usage import tells_error, usage_of
from cluster.errors import HttpError, Overloaded, Quarantined
from cluster.goodput import Outcome
from cluster.http_errors import SSE_DONE, ErrorMap
from cluster.observing.turns import MeasuredTurn

_TIMEOUTS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT)


def outcome_of(error: HttpError) -> Outcome | None:
    """What a refusal makes of a turn; None: the client got it wrong, and it is none."""
    if isinstance(error, Overloaded):
        return Outcome.REJECTED
    if error.status in _TIMEOUTS:
        return Outcome.TIMED_OUT
    if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Quarantined):
        return None
    return Outcome.FAILED


class CountedAnswers(Protocol):
    """The pieces of an answer, and how many tokens have come with them."""

    @property
    def output_tokens(self) -> int:
        """Of a stream, so far."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes | HttpError: ...

    def cancel(self) -> None:
        """Stop the work on it; harmless after the end."""
        ...


class MeasuredAnswers:
    """A turn's answer on its way to a client.

    Args:
        answers: the answer.
        turn: whose.
        error_map: what an exception means; total.
    """

    def __init__(self, answers: CountedAnswers, turn: MeasuredTurn, error_map: ErrorMap) -> None:
        self._answers = answers
        self._turn = turn
        self._error_map = error_map

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes | HttpError:
        try:
            piece = await anext(self._answers)
        except StopAsyncIteration:
            self._turn.over(Outcome.FAILED)
            raise
        except Exception as error:
            self._turn.over(outcome_of(self._error_map(error)))
            raise
        if isinstance(piece, HttpError):
            self._turn.over(outcome_of(piece))
        elif piece.startswith(b"{"):
            self._turn.received(usage_of(piece).completion or 0)
            self._turn.over(Outcome.OK)
        else:
            self._turn.received(self._answers.output_tokens)
            if piece.endswith(SSE_DONE):
                self._turn.over(Outcome.FAILED if tells_error(piece) else Outcome.OK)
        return piece

    def cancel(self) -> None:
        """The answer is over, or nobody wants it any more."""
        self._answers.cancel()
        self._turn.gone()
