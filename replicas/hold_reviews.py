"""Decisions about holds: what a client asks for comes first, and the pause policy decides again while a pause lasts."""

from collections.abc import Callable
from typing import Generic, TypeVar

from cluster.core.kv_price import Place
from cluster.core.lifecycle.events import Event, HoldEnded, PauseReason, ReleaseReason, Swapped
from replicas.hold_table import HeldBlocks, HoldOrigin, HoldTable
from replicas.policy import Hold, HoldView, PauseDecision, PausePolicy, PauseView, Policy, Swap

Block = TypeVar("Block")


def decide(policy: Policy, pause: PauseView) -> PauseDecision:
    """Return the decision about a pause: hold for as long as the client asks (``retention_s``), else the policy's."""
    asked_s = pause.hints.retention_s
    if asked_s is None or not policy.meets_requests:
        return policy.pause.decide(pause)
    return Hold(pause.now_s + max(0.0, asked_s), reason=PauseReason.RETENTION)


class HoldReviews(Generic[Block]):
    """The reviews of one scheduler.

    Args:
        holds: the scheduler's holds.
        view: makes the view of a hold.
        swaps_out: whether a program's blocks may be freed, because the tier has a copy.
        apply: applies an event to a program.
        max_pin_s: longest time of a hold in seconds.
    """

    def __init__(
        self,
        holds: HoldTable[Block],
        view: Callable[[HeldBlocks[Block]], HoldView],
        swaps_out: Callable[[str, None, Place], bool],
        apply: Callable[[str, Event], object],
        max_pin_s: float,
    ) -> None:
        self._holds = holds
        self._view = view
        self._swaps_out = swaps_out
        self._apply = apply
        self._max_pin_s = max_pin_s

    def step(self, policy: PausePolicy, now_s: float) -> None:
        """Review a share of the holds. It is called once in each step."""
        if policy.review_steps is None:
            return
        for held in self._holds.due(policy.review_steps):
            if held.origin is not HoldOrigin.POLICY:  # a requested hold lasts as long as was requested
                continue
            decision = policy.review(self._view(held))
            if isinstance(decision, Swap) and self._swaps_out(held.key, None, decision.place):
                self._apply(held.key, Swapped(now_s, decision.reason))
            elif not isinstance(decision, Hold):
                self._apply(held.key, HoldEnded(now_s, ReleaseReason.REVIEWED, decision.reason))
            else:
                until_s = min(decision.until_s, held.since_s + self._max_pin_s)
                if until_s != held.until_s:
                    self._holds.extend(held.key, until_s)
