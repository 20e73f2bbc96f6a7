"""Sheddable turns yield the memory that they run in, as the policy `caesura` decides it.

A sheddable turn (`Hints.sheddable`) runs where no other turn needs its memory. It is preempted for a turn that would
otherwise miss a bound, or that has no bound and lacks memory. A preempted turn loses its KV, and computes it again or
loads it from the host tier. That takes GPU seconds, so it has to be less than the seconds which the other turn would
wait for memory.

Two rules keep preempted turns from starving. A turn that was preempted before is not preempted again until it has run
for as long as another preemption costs, so that at least half of its time is progress. A sheddable turn that has waited
for twice the longest wait, all its waits together, comes before all others (`is_due`), and is never preempted again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from replicas.policy import LoadView, RunningView, ShortageView, TurnView

DUE = 1 / 2
"""Share of the longest wait after which a turn comes before all others."""
SHEDDABLE_DUE = 2.0
"""The same for sheddable turns. Nobody waits for them, and what delays them may last: they wait four times as long.

It is not endless, since a cluster that is full for days would give up their requests instead.
"""


def is_due(turn: TurnView, max_wait_s: float) -> bool:
    """Return whether a turn has waited for so long, for its first token or after preemptions, that it is next."""
    waited_s = turn.waited_s
    if turn.first_token_s is None:
        waited_s = max(waited_s, turn.load.now_s - turn.arrived_s)
    return waited_s > (SHEDDABLE_DUE if turn.hints.sheddable else DUE) * max_wait_s


@dataclass(frozen=True, slots=True)
class Yielding:
    """Preempts sheddable turns where that saves more seconds than it costs.

    Attributes:
        max_wait_s: the longest wait, in seconds.
        slack_s: returns for how many seconds a turn may wait and still meet its bounds. Negative: it is late. inf: it
            has no bound.
    """

    max_wait_s: float
    slack_s: Callable[[TurnView], float]

    def victims(self, shortage: ShortageView) -> tuple[str, ...]:
        """Return the sheddable turns to preempt, those that lose the least for the memory that they free."""
        turn, load = shortage.turn, shortage.turn.load
        if turn.hints.sheddable:
            return ()
        wait_s = expected_wait_s(shortage)
        slack_s = self.slack_s(turn)
        if not is_due(turn, self.max_wait_s) and (slack_s < 0 or wait_s <= slack_s < inf):
            return ()
        candidates = [
            (loss_s(one, load), one) for one in shortage.running if one.sheddable and not self.is_protected(one, load)
        ]
        chosen = _cheapest(candidates, shortage.lacking_tokens)
        return tuple(one.request_id for _, one in chosen) if sum(loss for loss, _ in chosen) < wait_s else ()

    def is_protected(self, running: RunningView, load: LoadView) -> bool:
        """Return whether the turn has waited for long, or has not yet run for as long as its preemption would cost."""
        if running.waited_s > SHEDDABLE_DUE * self.max_wait_s:
            return True
        return running.again_s is not None and running.again_s < loss_s(running, load)


def loss_s(running: RunningView, load: LoadView) -> float:
    """Return the seconds to bring back the KV of a turn that is preempted: copies are loaded, the rest is computed."""
    cost = load.facts.cost
    copied = min(running.copied_tokens, running.computed_tokens)
    computed_s = cost.prefill_s(running.computed_tokens, 0, load.facts.max_tokens)
    rest_s = cost.prefill_s(running.computed_tokens - copied, copied, load.facts.max_tokens)
    return min(computed_s, cost.swap_s(copied) + rest_s)


def expected_wait_s(shortage: ShortageView) -> float:
    """Return the seconds until the turn has what it lacks if nobody is preempted: until enough running turns end.

    The memory into which running turns grow meanwhile does not count, so that the wait is rather too short.
    """
    load, lacking = shortage.turn.load, shortage.lacking_tokens
    cost, wait_s = load.facts.cost, 0.0
    ends = sorted(
        (one.missing_tokens * cost.token_s + one.left_tokens * load.iteration_s, one.freed_tokens)
        for one in shortage.running
    )
    for end_s, freed in ends:
        wait_s, lacking = end_s, lacking - freed
        if lacking <= 0:
            break
    return wait_s


def _cheapest(candidates: list[tuple[float, RunningView]], lacking: int) -> list[tuple[float, RunningView]]:
    """Return a set of turns that frees what is lacking, with a small loss. It is empty if all of them do not."""
    chosen: list[tuple[float, RunningView]] = []
    freed = 0
    for loss, one in sorted(candidates, key=lambda pair: (pair[0] / max(1, pair[1].freed_tokens), pair[1].request_id)):
        if chosen and freed >= lacking:
            break
        chosen.append((loss, one))
        freed += one.freed_tokens
    if freed < lacking:
        return []
    for pair in sorted(chosen, key=lambda pair: -pair[0]):  # the last ones may make earlier ones needless
        if len(chosen) > 1 and freed - pair[1].freed_tokens >= lacking:
            chosen.remove(pair)
            freed -= pair[1].freed_tokens
    return chosen
