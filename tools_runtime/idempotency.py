"""Results kept by idempotency key, so that a repeated call takes effect once."""

from collections import OrderedDict
from dataclasses import dataclass

from cluster.errors import ToolRefused
from cluster.tools import Outcome, ToolCall, ToolResult

Key = tuple[str, str, str]
"""Program, tool, idempotency key."""

MAX_RESULTS = 4096
MAX_BYTES = 32 << 20


def key_of(call: ToolCall) -> Key | None:
    """Under which the call's result is kept; None without an idempotency key."""
    return None if call.idempotency_key is None else (call.program, call.name, call.idempotency_key)


@dataclass(frozen=True, slots=True)
class _Kept:
    call: ToolCall
    result: ToolResult
    size: int


class KeptResults:
    """The most recently used results, bounded in number and in characters.

    Args:
        max_results: results that are kept.
        max_bytes: characters of their texts, all together.
    """

    def __init__(self, max_results: int = MAX_RESULTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key, call: ToolCall) -> ToolResult | None:
        """The result kept under ``key``.

        Raises:
            ToolRefused: it is that of a call with other arguments.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        require_same(kept.call, call)
        return kept.result

    def keep(self, key: Key, call: ToolCall, result: ToolResult, *, idempotent: bool) -> None:
        """Keep ``result``, unless running the tool again is what a repeated call should do.

        That is so where nothing was run, and where an idempotent tool gave no answer.
        """
        answered = result.outcome in (Outcome.OK, Outcome.ERROR)
        if result.attempts > 0 and (answered or not idempotent):
            self.settle(key, call, result)

    def settle(self, key: Key, call: ToolCall, result: ToolResult) -> None:
        """Keep ``result`` whatever it is: no call with this key runs the tool any more."""
        kept = _Kept(call, result, len(result.text))
        if kept.size > self._max_bytes:
            return
        self._forget(key)
        self._kept[key] = kept
        self._bytes += kept.size
        while len(self._kept) > self._max_results or self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        self._bytes -= kept.size if kept else 0


def require_same(first: ToolCall, repeated: ToolCall) -> None:
    """A key stands for one call.

    Raises:
        ToolRefused: the arguments differ.
    """
    if first.arguments != repeated.arguments:
        raise ToolRefused(f"the idempotency key {repeated.idempotency_key!r} was used with other arguments")
