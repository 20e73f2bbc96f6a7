"""The responses of a WebSocket that are not stored, for their continuation on the same connection."""

from cluster.runs.state import RunState

MAX_KEPT = 4
"""Largest number of responses that a connection keeps. Each has its whole conversation."""


class ConnectionResponses:
    """The newest responses of one connection that are not stored.

    The log of such a response is deleted when it has ended. Its last state is kept here until the connection is closed.
    """

    def __init__(self) -> None:
        self._states: dict[str, RunState | None] = {}
        """The last states by the id of the response. None: it has not ended here, and its log may still exist."""

    def __contains__(self, response_id: object) -> bool:
        return response_id in self._states

    def began(self, response_id: str) -> None:
        """Add a response that was started."""
        self._states.setdefault(response_id, None)
        while len(self._states) > MAX_KEPT:
            del self._states[next(iter(self._states))]

    def ended(self, state: RunState) -> None:
        """Keep the state of a response that is not worked on any more. It changes nothing for one that is stored."""
        if state.spec.id in self._states and state.ended is not None:
            self._states[state.spec.id] = state

    def last_state(self, response_id: str) -> RunState | None:
        """Return the last state of a response that has ended; None: it is not kept here."""
        return self._states.get(response_id)
