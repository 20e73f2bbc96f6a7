"""What a pause wastes: KV memory that computes nothing, times how long.

InferCept, LAMPS, MARS and AugServe decide by it.

M, the bytes of one token's KV, is a factor of every term and the same for all programs of a replica. It is left out:
waste is in token-seconds here, and in byte-seconds times ``CostModel.kv_bytes_per_token``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Self

from cluster.core.lifecycle.events import PauseReason
from replicas.policy import (
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
    """T_pause · C: the context lies idle (InferCept eq. 2, AugServe eq. 4)."""
    return pause_s * context_tokens


def discard(recompute_s: float, context_tokens: float, other_tokens: float) -> float:
    """T_fwd(C) · C + T_fwd(C) · C_other: computed again while others wait (InferCept eq. 1, AugServe eq. 5)."""
    return recompute_s * context_tokens + recompute_s * other_tokens


def chunked_discard(recompute_s: float, chunks_s: float, context_tokens: float, other_tokens: float) -> float:
    """T_fwd(C) · C / 2 + n · T_fwd(C / n) · C_other (InferCept eq. 4); ``chunks_s`` is n · T_fwd(C / n)."""
    return recompute_s * context_tokens / 2 + chunks_s * other_tokens


def swap(swap_s: float, batch_tokens: float) -> float:
    """2 · T_swap(C) · C_batch: the batch waits while the context goes and comes (InferCept eq. 3)."""
    return 2 * swap_s * batch_tokens


def iteration_s(load: LoadView) -> float:
    """T_fwd: seconds of a decode iteration of the running turns, or of one where none runs."""
    return load.iteration_s


def swap_limit_tokens(load: LoadView) -> float:
    """N with T_swap(N) = T_fwd, at least 1: what an iteration hides the transfer of (InferCept section 4.1)."""
    cost = load.facts.cost
    return max(1.0, (iteration_s(load) - cost.swap_overhead_s) / cost.swap_token_s)


def lost_share(load: LoadView) -> float:
    """The share of a released context that the prefix cache will have lost by the resume, in [0, 1].

    None of the papers' engines had a prefix cache; with one, a discard costs only what was evicted. Where turns wait,
    they take whatever is free: all. Else the share of the memory that is in use stands for the share of the freed
    blocks that somebody takes in time.
    """
    if load.waiting:
        return 1.0
    return min(1.0, max(0.0, 1.0 - load.free_tokens / max(1, load.facts.capacity_tokens)))


class Handling(Enum):
    """What becomes of a context during a call."""

    PRESERVE = "preserve"
    DISCARD = "discard"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Wastes:
    """Token-seconds of each way to handle one pause; infinite where there is no such way."""

    preserve: float
    discard: float
    swap: float

    @property
    def giving_back(self) -> float:
        """The cheaper way to give the memory back."""
        return min(self.discard, self.swap)

    @property
    def least(self) -> Handling:
        """The way with the least waste; of equals preserve, then discard (AugServe eq. 7-8)."""
        if self.preserve <= self.giving_back:
            return Handling.PRESERVE
        return Handling.SWAP if self.swap < self.discard else Handling.DISCARD


def predicted(
    load: LoadView, context_tokens: int, other_tokens: float, pause_s: float, cache_aware: bool = True
) -> Wastes:
    """The wastes of a pause that is only expected (LAMPS section 4.2, MARS step 1, AugServe eq. 4-6).

    A swap is free if the iteration under way hides it. AugServe's eq. 6 has N_max where InferCept has C_batch; the
    running turns are what waits, so C_batch it is for all.

    Args:
        load: the replica now.
        context_tokens: C, at the call.
        other_tokens: C_other.
        pause_s: T_pause.
        cache_aware: count what the prefix cache will have lost; False is the papers' own.
    """
    cost = load.facts.cost
    lost = lost_share(load) if cache_aware else 1.0
    swapped = inf
    if 0 < context_tokens <= load.facts.host_tokens:
        swap_s = cost.swap_s(context_tokens)
        swapped = 0.0 if swap_s <= iteration_s(load) else swap(swap_s, context_tokens + other_tokens)
    return Wastes(
        preserve=preserve(pause_s, context_tokens),
        discard=lost * discard(cost.prefill_s(context_tokens), context_tokens, other_tokens),
        swap=swapped,
    )


@dataclass(frozen=True, slots=True)
class Paused:
    """A paused program: at its pause, or later while it is held."""

    load: LoadView
    context_tokens: int
    """C."""
    other_tokens: int
    """C_other: KV of the running turns without this one."""
    held_tokens: int
    """KV of all paused programs, this one's included."""
    since_s: float
    forecast_s: float
    """Expected seconds of the whole pause."""

    @classmethod
    def of(cls, view: PauseView | HoldView) -> Self:
        """At its pause a program's blocks still count as running; once held, they do not."""
        load, context, forecast_s = view.load, view.context_tokens, max(0.0, view.forecast.pause_s)
        if isinstance(view, PauseView):
            other = max(0, load.running_tokens - context)
            return cls(load, context, other, load.held_tokens + context, view.now_s, forecast_s)
        return cls(load, context, load.running_tokens, max(load.held_tokens, context), view.since_s, forecast_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds that the pause has lasted."""
        return max(0.0, self.load.now_s - self.since_s)


Judge = Callable[[Paused], Wastes]
"""How a system estimates the wastes of a pause."""


@dataclass(frozen=True, slots=True)
class LeastWaste:
    """Preserve, discard or swap, whichever wastes least by ``judge`` (InferCept section 4.3).

    What is preserved is held until the pause has cost as much as giving the memory back would: from then on the
    forecast was wrong, or the pause not worth it.
    """

    judge: Judge
    review_steps: int | None = None

    def decide(self, pause: PauseView) -> PauseDecision:
        """The least waste as it looks at the pause."""
        return self._choose(Paused.of(pause))

    def review(self, hold: HoldView) -> PauseDecision:
        """The least waste as it looks now; a program that is back keeps what it has."""
        return Hold(hold.until_s, reason=PauseReason.BACK) if hold.owner_waits else self._choose(Paused.of(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """Programs that are not back yet first, by how much more holding wastes than giving back, the most first."""
        wastes = self.judge(Paused.of(hold))
        return (1.0 if hold.owner_waits else 0.0, wastes.giving_back - wastes.preserve)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """To a running turn always; to a waiting one if none runs, or if the program is back, ranked low and overdue.

        A hold that any waiting turn may break protects nothing; one that none may break fills the memory with
        programs that are back but do not rank first.
        """
        return claimant is not Claimant.WAITING or (hold.owner_waits and hold.load.now_s >= hold.until_s)

    def _choose(self, paused: Paused) -> PauseDecision:
        wastes = self.judge(paused)
        match wastes.least:
            case Handling.PRESERVE:
                return Hold(
                    paused.since_s + wastes.giving_back / max(1, paused.context_tokens), reason=PauseReason.LEAST_WASTE
                )
            case Handling.SWAP:
                return Swap(PauseReason.LEAST_WASTE)
            case Handling.DISCARD:
                return Release(PauseReason.LEAST_WASTE)


@dataclass(frozen=True, slots=True)
class Predicted:
    """The judge of LAMPS, MARS and AugServe: T_pause is the forecast, or what has passed if that is more.

    They label a request before it runs. A policy keeps no state, so the label is taken again at the pause from the
    same forecast, with the context and the load as they are by then.
    """

    cache_aware: bool = True

    def __call__(self, paused: Paused) -> Wastes:
        """The wastes of eq. 1-3."""
        pause_s = max(paused.forecast_s, paused.elapsed_s)
        return predicted(paused.load, paused.context_tokens, paused.other_tokens, pause_s, self.cache_aware)
