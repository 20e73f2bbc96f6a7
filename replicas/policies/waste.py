"""The waste of a pause: KV memory that computes nothing, times its duration.

InferCept, LAMPS, MARS and AugServe decide by it. M, the bytes of one token's KV, is a factor of every term and the same
for all programs of a replica. It is left out: waste is in token-seconds here. Times ``CostModel.kv_bytes_per_token`` it
is in byte-seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Self

from cluster.core.lifecycle.events import PauseReason
from replicas.policy import (
    BudgetPolicy,
    Claimant,
    Hold,
    HoldView,
    LoadView,
    PauseDecision,
    PauseView,
    RankKey,
    Release,
    Swap,
)


def preserve(pause_s: float, context_tokens: float) -> float:
    """Return T_pause · C: the context is idle (InferCept eq. 2, AugServe eq. 4)."""
    return pause_s * context_tokens


def discard(recompute_s: float, context_tokens: float, other_tokens: float) -> float:
    """Return T_fwd(C) · C + T_fwd(C) · C_other: it is computed again, and others wait (InferCept eq. 1, AugServe eq.
    5).
    """
    return recompute_s * context_tokens + recompute_s * other_tokens


def chunked_discard(recompute_s: float, chunks_s: float, context_tokens: float, other_tokens: float) -> float:
    """Return T_fwd(C) · C / 2 + n · T_fwd(C / n) · C_other (InferCept eq. 4). ``chunks_s`` is n · T_fwd(C / n), where
    T_fwd(C / n) is what a chunk adds to an iteration.
    """
    return recompute_s * context_tokens / 2 + chunks_s * other_tokens


def swap(swap_s: float, batch_tokens: float) -> float:
    """Return 2 · T_swap(C) · C_batch: the batch waits while the context is moved out and in (InferCept eq. 3)."""
    return 2 * swap_s * batch_tokens


def iteration_s(load: LoadView) -> float:
    """Return T_fwd, the seconds of a decode iteration of the running turns, or of one turn if none runs."""
    return load.iteration_s


def swap_limit_tokens(load: LoadView) -> float:
    """Return N with T_swap(N) = T_fwd, at least 1: the tokens whose transfer an iteration hides (InferCept section
    4.1).
    """
    cost = load.facts.cost
    return max(1.0, (iteration_s(load) - cost.swap_overhead_s) / cost.swap_token_s)


def lost_share(load: LoadView) -> float:
    """Return the share of a released context that the prefix cache will have lost by the resume, in [0, 1].

    None of the papers' engines had a prefix cache: without one the share is 1. With one, a discard costs only the
    evicted part. Waiting turns use all free memory, so the share is 1 where turns wait. Otherwise the share of the
    memory that is in use estimates the share of the freed blocks that is reused in time.
    """
    if load.waiting or not load.facts.prefix_cache:
        return 1.0
    return min(1.0, max(0.0, 1.0 - load.free_tokens / max(1, load.facts.capacity_tokens)))


class Handling(Enum):
    """What happens to a context during a call."""

    PRESERVE = "preserve"
    DISCARD = "discard"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Wastes:
    """Token-seconds of each way to handle one pause. Infinite means that the way is not available."""

    preserve: float
    discard: float
    swap: float
    swap_in_s: float = 0.0
    """Seconds until a swap may begin, for which the context is held. ``swap`` is what the hold costs."""

    @property
    def giving_back(self) -> float:
        """Token-seconds of the cheaper way to free the memory."""
        return min(self.discard, self.swap)

    @property
    def least(self) -> Handling:
        """The way with the least waste. At equal waste it is preserve, then discard (AugServe eq. 7-8)."""
        if self.preserve <= self.giving_back:
            return Handling.PRESERVE
        return Handling.SWAP if self.swap < self.discard else Handling.DISCARD


def predicted(
    load: LoadView,
    context_tokens: int,
    other_tokens: float,
    pause_s: float,
    cache_aware: bool = True,
    batch_tokens: float | None = None,
) -> Wastes:
    """Return the wastes of a pause that is only expected (LAMPS section 4.2, MARS step 1, AugServe eq. 4-6).

    Args:
        load: the replica's load now.
        context_tokens: C, at the call.
        other_tokens: C_other.
        pause_s: T_pause, in seconds.
        cache_aware: whether only what the prefix cache will have lost counts. False is the papers' formula.
        batch_tokens: what waits for a transfer. None: C_batch, which is C and C_other. AugServe's eq. 6 has N_max, the
            tokens of a step.
    """
    cost = load.facts.cost
    lost = lost_share(load) if cache_aware else 1.0
    swapped = inf
    if 0 < context_tokens <= load.facts.host_tokens:
        waiting = context_tokens + other_tokens if batch_tokens is None else batch_tokens
        swapped = swap(cost.swap_s(context_tokens), waiting)
    return Wastes(
        preserve=preserve(pause_s, context_tokens),
        discard=lost * discard(cost.prefill_s(context_tokens), context_tokens, other_tokens),
        swap=swapped,
    )


@dataclass(frozen=True, slots=True)
class Paused:
    """A paused program, at its pause or later while it is held."""

    load: LoadView
    context_tokens: int
    """C, in tokens."""
    other_tokens: int
    """C_other: tokens of KV of the running turns, without this one."""
    since_s: float
    forecast_s: float
    """Expected seconds of the whole pause."""
    hinted: bool
    """Whether ``forecast_s`` is the client's hint."""
    host_room: bool = True
    """Whether the host tier has the context or has room for it."""

    @classmethod
    def of(cls, view: PauseView | HoldView) -> Self:
        """Make it from a view. At its pause a program's blocks still count as running; during a hold they do not."""
        load, context = view.load, view.context_tokens
        forecast_s, hinted = max(0.0, view.forecast.pause_s), view.forecast.pause_hinted
        if isinstance(view, PauseView):
            other = max(0, load.running_tokens - context)
            return cls(load, context, other, view.now_s, forecast_s, hinted, view.host_room)
        return cls(load, context, load.running_tokens, view.since_s, forecast_s, hinted, view.host_room)

    @property
    def can_swap(self) -> bool:
        """Whether the context can be swapped at all (InferCept section 4.1: at most the free CPU memory)."""
        return self.host_room and 0 < self.context_tokens <= self.load.facts.host_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds that the pause has lasted."""
        return max(0.0, self.load.now_s - self.since_s)


Judge = Callable[[Paused], Wastes]
"""How a system estimates the wastes of a pause."""


@dataclass(frozen=True, slots=True)
class LeastWaste:
    """Chooses preserve, discard or swap, whichever wastes least by ``judge`` (InferCept section 4.3).

    A preserved context is held until the pause has cost as much as freeing the memory would. After that, the forecast
    was wrong or the pause was not worth it. A context whose swap has to wait is held until a review finds that it fits.
    Without steps there are no reviews, so that the hold lasts for the expected pause.
    """

    judge: Judge
    review_steps: int | None = None

    def decide(self, pause: PauseView) -> PauseDecision:
        """Return the decision with the least waste, as known at the pause."""
        return self._choose(Paused.of(pause))

    def review(self, hold: HoldView) -> PauseDecision:
        """Return the decision with the least waste, as known now. A program that is back keeps its hold."""
        return Hold(hold.until_s, reason=PauseReason.BACK) if hold.owner_waits else self._choose(Paused.of(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank (0 paused or 1 back, waste of freeing minus waste of holding).

        The least is evicted first.
        """
        wastes = self.judge(Paused.of(hold))
        return (1.0 if hold.owner_waits else 0.0, wastes.giving_back - wastes.preserve)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """Return whether the hold may be evicted for ``claimant``.

        It always yields to a running turn. It yields to a waiting turn if none runs, or if the program is back and its
        hold has ended. A hold that any waiting turn may evict protects nothing. If no waiting turn may evict any, the
        memory fills with programs that are back but do not rank first.
        """
        return claimant is not Claimant.WAITING or (hold.owner_waits and hold.load.now_s >= hold.until_s)

    def _choose(self, paused: Paused) -> PauseDecision:
        wastes = self.judge(paused)
        match wastes.least:
            case Handling.DISCARD:
                return Release(PauseReason.LEAST_WASTE)
            case Handling.SWAP if not wastes.swap_in_s:
                return Swap(PauseReason.LEAST_WASTE)
            case Handling.SWAP:
                reviewed_s = 2 * (self.review_steps or 1) * iteration_s(paused.load)
                swapped_s = paused.load.now_s + wastes.swap_in_s + reviewed_s
                ends_s = paused.since_s + wastes.preserve / max(1, paused.context_tokens)
                return Hold(max(ends_s, swapped_s), reason=PauseReason.LEAST_WASTE)
        freeing = wastes.discard if wastes.swap_in_s else wastes.giving_back
        return Hold(paused.since_s + freeing / max(1, paused.context_tokens), reason=PauseReason.LEAST_WASTE)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The judge of LAMPS, MARS and AugServe: T_pause is the forecast, or the elapsed time if that is longer.

    They label a request before it runs. A policy keeps no state, so here the label is computed again at the pause, from
    the same forecast and with the context and load at that time.
    """

    cache_aware: bool = True
    step: BudgetPolicy | None = None
    """N_max of AugServe's eq. 6. None: the running turns wait for a transfer, as in InferCept."""

    def __call__(self, paused: Paused) -> Wastes:
        """Return the wastes of eq. 1-3, in token-seconds."""
        pause_s = max(paused.forecast_s, paused.elapsed_s)
        batch = self.step.tokens(paused.load) if self.step is not None else None
        context, other = paused.context_tokens, paused.other_tokens
        wastes = predicted(paused.load, context, other, pause_s, self.cache_aware, batch)
        return wastes if paused.can_swap else replace(wastes, swap=inf)
