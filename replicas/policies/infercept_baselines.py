"""The systems that InferCept's evaluation compares it with: each always handles a pause in the same way.

Source: InferCept section 3.2 (discard, preserve, swap) and figure 3 (swapping within the limit, then the heuristic).
`InferceptParameters.handling` selects one. Order and budget are those of `infercept`.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from replicas.policies.waste import Judge, Paused, Wastes

FixedHandling = Literal["discard", "preserve", "swap", "limited_swap", "heuristic"]

NEVER = 1e12
"""Token-seconds of a way that is never chosen. It is finite, because the end of a hold is computed from it."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Wastes by which one way always wins.

    `discard`, `preserve` and `swap` do what their name says. A context that does not fit into the host tier is
    discarded. `limited_swap` swaps as InferCept does, and discards what the limit leaves. `heuristic` does so with long
    pauses only, such as those for a user's reply, and preserves in short ones.
    """

    handling: FixedHandling
    short_s: float
    """Longest expected pause in seconds in which `heuristic` preserves."""
    least: Judge
    """InferCept's own wastes."""

    def __call__(self, paused: Paused) -> Wastes:
        """Return the wastes in token-seconds."""
        match self.handling:
            case "discard":
                return Wastes(preserve=NEVER, discard=0.0, swap=inf)
            case "preserve":
                return Wastes(preserve=0.0, discard=NEVER, swap=inf)
            case "swap":
                return Wastes(preserve=NEVER, discard=1.0, swap=0.0 if paused.can_swap else inf)
            case "heuristic" if paused.forecast_s <= self.short_s:
                return Wastes(preserve=0.0, discard=NEVER, swap=inf)
        return replace(self.least(paused), preserve=NEVER)
