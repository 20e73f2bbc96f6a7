"""What a scheduler notes of turns that are traced, for the replica to tell: it has the spans, the engine has the times.

A turn is traced whose identity says part of what it is (`ProgramIdentity.traceparent`).
"""

from typing import TYPE_CHECKING, Any

from replicas.outbox import Outbox
from replicas.program_table import TurnStory

if TYPE_CHECKING:
    from replicas.turns import Turn

MAX_NOTES = 8192
"""Kept for a replica that has not asked yet."""


class Traced:
    """The notes of one scheduler, and which holds follow a turn that is traced."""

    def __init__(self) -> None:
        self.notes: Outbox[dict[str, Any]] = Outbox(MAX_NOTES)
        self._holds: dict[str, str] = {}

    def turn_ended(self, turn: "Turn", story: TurnStory, now_s: float) -> None:
        """A turn is over, and what becomes of its program's KV is decided."""
        traceparent = turn.identity.traceparent
        if traceparent is None:
            return
        self.notes.put(
            {
                "what": "turn",
                "traceparent": traceparent,
                "arrived_s": turn.arrived_s,
                "admitted_s": turn.admitted_s,
                "first_token_s": turn.first_token_s,
                "ended_s": now_s,
                "prompt_tokens": story.prompt_tokens,
                "cached_tokens": story.cached_tokens,
                "output_tokens": story.output_tokens,
                "preemptions": story.preemptions,
                "tools": list(story.tools),
                "outcome": story.outcome,
                "decision": story.decision,
            }
        )

    def hold_began(self, key: str, turn: "Turn") -> None:
        """The program is held after this turn."""
        if turn.identity.traceparent is not None:
            self._holds[key] = turn.identity.traceparent

    def hold_ended(self, key: str, since_s: float, until_s: float, how: str) -> None:
        """It is no longer."""
        traceparent = self._holds.pop(key, None)
        if traceparent is not None:
            times = {"since_s": since_s, "until_s": until_s}
            self.notes.put({"what": "hold", "traceparent": traceparent, "how": how, **times})
