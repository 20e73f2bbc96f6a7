"""The responses of a WebSocket that are not stored, for their continuation on the same connection."""

import msgspec

from cluster.runs.state import RunState

MAX_KEPT = 4
"""Largest number of responses that a connection keeps. Each has its whole conversation."""


class ConnectionResponses:
    """The newest responses of one connection that are not stored.

    The log of such a response is deleted when it has ended. Its last state is kept here until the connection is closed.

    Args:
        max_bytes: size that the kept states may have together. The newest is kept whatever its size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """The sizes of the last states in bytes, by the id of the response."""
        self._states: dict[str, RunState | None] = {}
        """The last states by the id of the response. None: it has not ended here, and its log may still exist."""

    def __contains__(self, response_id: object) -> bool:
        return response_id in self._states

    def began(self, response_id: str) -> None:
        """Add a response that was started."""
        self._states.setdefault(response_id, None)
        while len(self._states) > MAX_KEPT:
            self._forget(next(iter(self._states)))

    def ended(self, state: RunState) -> None:
        """Keep the state of a response that is not worked on any more. It changes nothing for one that is stored."""
        if state.spec.id not in self._states or state.ended is None:
            return
        self._states[state.spec.id] = state
        self._sizes[state.spec.id] = len(msgspec.json.encode((state.spec, state.messages)))
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self._max_bytes:
            self._forget(next(iter(self._sizes)))

    def last_state(self, response_id: str) -> RunState | None:
        """Return the last state of a response that has ended; None: it is not kept here."""
        return self._states.get(response_id)

    def _forget(self, response_id: str) -> None:
        del self._states[response_id]
        self._sizes.pop(response_id, None)
