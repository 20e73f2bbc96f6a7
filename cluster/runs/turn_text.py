"""Joins the pieces of a turn, and decides which of its calls are complete while it goes on."""

from collections.abc import Iterator, Sequence

from cluster.core.errors import HttpError
from cluster.core.tools import is_object, split_complete
from cluster.core.turn import ID_BYTES, CallDelta, PromptMode, TurnBegan, TurnDelta, TurnDone, TurnPiece
from cluster.runs.events import Call, Generated, TurnResult


class TurnText:
    """Joins a turn's pieces.

    Args:
        number: the number of the turn.
        summary: whether its content is a summary.
    """

    def __init__(self, number: int, summary: bool = False) -> None:
        self._number = number
        self._summary = summary
        self._began: TurnBegan | None = None
        self._done: TurnDone | None = None
        self._ids = bytearray()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, list[CallDelta]] = {}
        self._open: dict[int, int] = {}
        """Calls that `new_calls` has not yielded, each with the number of tokens when its last piece came."""

    def take(self, piece: TurnPiece) -> Generated | None:
        """Process a piece. Return the entry of the log that it makes, or None."""
        match piece:
            case TurnBegan():
                self._began = piece
            case TurnDone():
                self._done = piece
            case TurnDelta():
                return self._take(piece)
        return None

    def _take(self, piece: TurnDelta) -> Generated | None:
        self._ids += piece.token_ids
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        for part in piece.calls:
            self._calls.setdefault(part.index, []).append(part)
            self._open[part.index] = self.tokens
        if not (piece.content or piece.reasoning or piece.calls):
            return None
        return Generated(self._number, piece.content, piece.reasoning, piece.calls, piece.logprobs)

    @property
    def tokens(self) -> int:
        """Number of tokens received so far."""
        return len(self._ids) // ID_BYTES

    @property
    def alone_s(self) -> float | None:
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        return None if self._done is None else self._done.alone_s

    def new_calls(self) -> Iterator[Call]:
        """Yield the calls that are complete since the last time, while the turn goes on.

        A call is complete when its arguments are one JSON object and the turn has gone on after it. An object that
        ends a turn may have been closed by the parser, see `split_complete`.
        """
        for index, tokens in list(self._open.items()):
            if tokens == self.tokens or self._done is not None:
                continue
            call = _joined(self._number, index, self._calls[index])
            if is_object(call.arguments):
                del self._open[index]
                yield call

    def result(self, began_s: float, ended_s: float) -> TurnResult:
        """Return the complete turn.

        Raises:
            HttpError: the replica ended before the turn did.
        """
        if self._began is None or self._done is None:
            raise HttpError("the replica ended before the turn was complete", status=502)
        done = self._done
        calls = [_joined(self._number, index, pieces) for index, pieces in sorted(self._calls.items())]
        complete, unfinished = split_complete(calls, done.finish_reason)
        return TurnResult(
            self._number,
            self._began.rendering is PromptMode.CONTINUED,
            self._began.rendering,
            self._began.added_ids,
            bytes(self._ids),
            done.finish_reason,
            done.prompt_tokens,
            done.cached_tokens,
            done.output_tokens,
            began_s,
            ended_s,
            "".join(self._content),
            "".join(self._reasoning),
            complete,
            unfinished,
            self._began.answer_chars,
            self._summary,
            done.stop_sequence,
        )


def _joined(turn: int, index: int, pieces: Sequence[CallDelta]) -> Call:
    call_id = next((piece.id for piece in pieces if piece.id), f"call_{turn}_{index}")
    name = "".join(piece.name for piece in pieces if piece.name)
    return Call(turn, index, call_id, name, "".join(piece.arguments for piece in pieces))
