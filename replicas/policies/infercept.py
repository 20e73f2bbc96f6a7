"""InferCept: at a pause, the decision that wastes the least memory; turns ordered by the arrival of their program.

Source: InferCept sections 4.1 (swap limit), 4.2 (chunked recomputation), 4.3 (decisions) and 4.4 (duration estimate).
"""

from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from replicas.cost_model import CostModel
from replicas.policies.baselines import FullBudget
from replicas.policies.infercept_baselines import Fixed, FixedHandling
from replicas.policies.waste import (
    Judge,
    LeastWaste,
    Paused,
    Wastes,
    chunked_discard,
    iteration_s,
    lost_share,
    preserve,
)
from replicas.policy import BudgetPolicy, KvPlace, LoadView, Policy, RankKey, TurnView


class InferceptParameters(BaseModel):
    """Parameters of the policy `infercept`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    estimate: Literal["hinted", "dynamic", "forecast"] = "hinted"
    """T_pause: `dynamic` is the time since the call started, renewed at each review, which section 4.4 uses where a
    duration is not known; `hinted` is the client's hint where there is one, and else dynamic; `forecast` is the hint or
    what was learnt."""
    review_steps: int = Field(4, ge=1)
    """Number of steps between two reviews of each hold. The paper reviews at each step (1)."""
    swap_out_share: float = Field(0.5, ge=0, le=1)
    """Part of each iteration's swap limit that swap-out may use. Swap-in gets the rest."""
    saturation_budget: bool = True
    """Whether no step schedules more tokens than the saturation point S. false: vLLM's own limit applies."""
    saturation_tokens: int | None = Field(None, ge=1)
    """The saturation point S in tokens, by an offline profile. null: that of the cost model."""
    cache_aware: bool = True
    """Whether only what the prefix cache will have lost by the resume counts as recomputation. false: all of the
    context counts, as in the paper."""
    evicts_ends: bool = True
    """Whether a turn that lacks memory gets only the end of a preserved context, as much as it lacks (section 4.3: the
    remaining context is preserved or discarded). false: the whole context is discarded."""
    handling: Literal["least_waste"] | FixedHandling = "least_waste"
    """How a pause is handled. All values but `least_waste` are the systems that the paper compares with: see
    `replicas.policies.infercept_baselines`."""
    short_s: float = Field(5.0, ge=0)
    """Longest expected pause in seconds in which `handling: heuristic` preserves. Between the paper's automated calls
    (0.7 s at most) and its interactive ones (17 s or more)."""

    def build(self) -> Policy:
        """Return the order of first arrival, and at each pause the least waste or the fixed handling."""
        judge: Judge = MinWaste(self.estimate, self.swap_out_share, self.cache_aware, self.saturation_tokens)
        if self.handling != "least_waste":
            judge = Fixed(self.handling, self.short_s, judge)
        budget: BudgetPolicy = SaturationBudget(self.saturation_tokens) if self.saturation_budget else FullBudget()
        pauses = LeastWaste(judge, self.review_steps)
        return Policy("infercept", OriginalArrival(), pauses, budget, skips_swapped=True, evicts_ends=self.evicts_ends)


QUEUES = {KvPlace.HELD: 0.0, KvPlace.SWAPPED: 1.0, KvPlace.NONE: 2.0}
"""The order of InferCept's queues, by the place of a turn's context."""


class OriginalArrival:
    """Section 4.3: orders programs whose context was preserved first, which are in no waiting queue, then swapped ones,
    as their memory comes over the link, and then the others, each by arrival.
    """

    @property
    def refresh_steps(self) -> None:
        """None: arrivals do not change."""
        return None

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (0 preserved, 1 swapped, 2 new, discarded or evicted; arrival of the program in seconds)."""
        return (QUEUES[turn.kv], turn.program.arrived_s)


@dataclass(frozen=True, slots=True)
class MinWaste:
    """The wastes of eq. 2 and 4, and a swap that costs nothing within the swap limit (sections 4.1 to 4.3).

    The paper sorts all paused programs by waste in each iteration, and swaps them, in parts, until the iteration's
    limit is used up. Here each program is judged alone. It may be swapped once the sum of the limits since its pause
    covers its context. Until then it stays in memory, which is the waste of its swap. Programs that pause together each
    count the whole limit.
    """

    estimate: Literal["hinted", "dynamic", "forecast"]
    swap_out_share: float
    cache_aware: bool
    saturation_tokens: int | None = None

    def __call__(self, paused: Paused) -> Wastes:
        """Return the wastes in token-seconds. A call lasts at least until the next iteration."""
        load, context = paused.load, paused.context_tokens
        step_s, cost = iteration_s(load), load.facts.cost
        known = self.estimate == "forecast" or (self.estimate == "hinted" and paused.hinted)
        pause_s = max(paused.elapsed_s, paused.forecast_s if known else step_s)
        added_s = chunks_added_s(cost, context, load.running, self.saturation_tokens or cost.saturation_tokens)
        waste = chunked_discard(cost.prefill_s(context), added_s, context, paused.other_tokens)
        swap_in_s = inf
        if paused.can_swap and self.swap_out_share:
            swap_in_s = max(0.0, cost.swap_s(context) / self.swap_out_share - paused.elapsed_s - step_s)
        return Wastes(
            preserve=preserve(pause_s, context),
            discard=waste * (lost_share(load) if self.cache_aware else 1.0),
            swap=inf if swap_in_s == inf else preserve(swap_in_s, context),
            swap_in_s=swap_in_s,
        )


def chunks_added_s(cost: CostModel, context_tokens: int, running: int, saturation_tokens: int) -> float:
    """Return n · T_fwd(C / n) of eq. 4: the seconds by which a recomputation in chunks makes iterations longer.

    Each chunk of S - |running| tokens joins an iteration that decodes the running turns anyway, so that only what the
    chunk adds counts. The sum is T_fwd(C) at most (section 4.2).
    """
    chunk = max(1, saturation_tokens - running)
    count = ceil(context_tokens / chunk)
    alone_s = cost.prefill_s(context_tokens, chunk_tokens=chunk)
    fixed_s = cost.overhead_s + max(cost.weights_s, chunk * cost.token_s)
    joined_s = max(cost.weights_s, (running + chunk) * cost.token_s) - max(cost.weights_s, running * cost.token_s)
    return min(cost.prefill_s(context_tokens), max(0.0, alone_s + count * (joined_s - fixed_s)))


@dataclass(frozen=True, slots=True)
class SaturationBudget:
    """Section 4.2: prompts and recomputation fill a step up to the saturation point, in chunks of S - |running|."""

    saturation_tokens: int | None = None
    """S. None: that of the cost model."""

    def tokens(self, load: LoadView) -> int:
        """Return S, or the number of running turns if it is larger, at most vLLM's own limit."""
        return max(
            1,
            min(load.facts.max_tokens, max(self.saturation_tokens or load.facts.cost.saturation_tokens, load.running)),
        )
