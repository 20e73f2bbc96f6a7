"""KV that did nothing, integrated over time: one definition, for replicas that run and for those that are simulated.

The two terms of InferCept's eq. 1 that a replica can see: what is held beside the batch, and the batch that waits while
something is computed that was there before. Unit: one token's KV for one second.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Waste:
    """Up to the last call."""

    held: float = 0.0
    """Of paused programs, and of turns that wait, on hold."""
    recomputed: float = 0.0
    """KV of each step's batch, in the proportion of recomputed to scheduled tokens: the program's own KV and that of
    the others that run beside it while it is computed again."""
    _settled_s: float = field(default=0.0, repr=False, compare=False)

    def settle(self, now_s: float, held_tokens: int) -> None:
        """So many tokens were held since the last call: to be called before that changes."""
        self.held += held_tokens * (now_s - self._settled_s)
        self._settled_s = now_s

    def recompute(self, again: int, total: int, context: int, seconds: float) -> None:
        """A step of ``total`` tokens, of which ``again`` were computed before, beside ``context`` tokens of KV."""
        self.recomputed += again / total * seconds * context


def computed_again(length: int, tokens: int, known_tokens: int) -> int:
    """Of a step's ``tokens`` of one turn, those computed at some time before.

    Args:
        length: of what is computed of the turn once the step is done.
        tokens: of the step.
        known_tokens: leading tokens whose KV was computed at some time.
    """
    return max(0, min(length, known_tokens) - (length - tokens))
