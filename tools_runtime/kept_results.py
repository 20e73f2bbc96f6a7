"""The results of calls with an idempotency key, which a repeated call gets."""

from collections import OrderedDict
from dataclasses import dataclass

from cluster.core.errors import ToolRefused
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolResult

Key = tuple[str, ToolId, str]
"""Program, tool and idempotency key."""

CONSENT = "\0consent"
"""Takes the place of the program in the key of a call that runs under a consent. No program has this name."""

MAX_RESULTS = 4096
MAX_BYTES = 32 << 20


def key_of(call: ToolCall) -> Key | None:
    """Return the key under which the call's result is kept, or None without an idempotency key."""
    if call.consent is not None:
        return (CONSENT, call.target, call.consent)
    return None if call.idempotency_key is None else (call.program, call.target, call.idempotency_key)


@dataclass(frozen=True, slots=True)
class _Kept:
    call: ToolCall
    result: ToolResult
    size: int


class KeptResults:
    """The most recently used results, bounded in number and in characters."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key, call: ToolCall) -> ToolResult | None:
        """Return the result that is kept under ``key``, or None.

        Raises:
            ToolRefused: the result is of a call with other arguments.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        require_same(kept.call, call)
        return kept.result

    def keep(self, key: Key, call: ToolCall, result: ToolResult, *, idempotent: bool) -> None:
        """Keep ``result``, unless a repeated call should run the tool again.

        It should where nothing was run, and where an idempotent tool gave no answer.
        """
        answered = result.outcome in (Outcome.OK, Outcome.ERROR)
        if result.attempts > 0 and (answered or not idempotent):
            self.settle(key, call, result)

    def settle(self, key: Key, call: ToolCall, result: ToolResult) -> None:
        """Keep ``result`` whatever it is. No call with this key runs the tool any more."""
        kept = _Kept(call, result, result.chars)
        if kept.size > MAX_BYTES:
            return
        self._forget(key)
        self._kept[key] = kept
        self._bytes += kept.size
        while len(self._kept) > MAX_RESULTS or self._bytes > MAX_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        self._bytes -= kept.size if kept else 0


def require_same(first: ToolCall, repeated: ToolCall) -> None:
    """Check that a key is used for one call only.

    Raises:
        ToolRefused: the arguments differ.
    """
    if first.arguments != repeated.arguments:
        raise ToolRefused(f"the idempotency key {repeated.idempotency_key!r} was used with other arguments")
