"""AugServe: turns ordered by their predicted cost, corrected at each resume, and a budget by free memory.

Source: AugServe sections 4.3 (two-stage value, eq. 4-26) and 4.4 (dynamic budget, eq. 27-32), algorithm 1. As with the
wastes, M is left out: values are in token-seconds.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replicas.policies.baselines import FullBudget
from replicas.policies.infercept import OriginalArrival
from replicas.policies.waste import (
    Handling,
    LeastWaste,
    Predicted,
    iteration_s,
    lost_share,
    predicted,
    swap_limit_tokens,
)
from replicas.policy import BudgetPolicy, KvPlace, LoadView, OrderPolicy, Policy, RankKey, TurnView


class AugserveParameters(BaseModel):
    """Parameters of the policy `augserve`. The first three flags are the paper's ablations (section 5.4)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    two_stage: bool = True
    """Whether turns are ordered by the scheduling value. false: first come, first served by program, as in
    InferCept."""
    anti_starvation: bool = True
    """Whether the value of a turn decreases by alpha for each second in which its program was not scheduled."""
    dynamic_budget: bool = True
    """Whether the free memory limits the tokens of a step. false: vLLM's own limit applies."""
    alpha_tokens: float = Field(10.0, ge=0)
    """Alpha: token-seconds of value that one second of waiting outweighs. The paper does not give its value."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Part of the memory of paused programs that counts as available."""
    target_tokens: int | None = Field(None, ge=1)
    """Profiled reference of the tokens of a step. null: vLLM's own limit."""
    beta_low: float = Field(0.25, gt=0, le=1)
    """No budget is below this part of the target. The paper does not print it; the best limits of its table 1 are a
    quarter to three quarters of the largest."""
    beta_high: float = Field(1.0, gt=0)
    """No budget is above this part of the target."""
    ranks_running: bool = True
    """Whether the running queue is sorted, too (algorithm 1). false: its prompts are computed, and its turns are
    preempted, in the order of admission."""
    swap_waits: Literal["step", "running"] = "step"
    """What waits for a transfer. `step`: N_max, the tokens of a step (eq. 6). `running`: the tokens of the running
    turns, as in InferCept."""
    evicts_ends: bool = True
    """Whether a turn that lacks memory gets only the end of a preserved context. false: the whole context is
    discarded."""
    cache_aware: bool = True
    """Whether only what the prefix cache will have lost by the resume counts as recomputation. false: all of the
    context counts, as in the paper."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.beta_low > self.beta_high:
            raise ValueError(f"beta_low {self.beta_low} is above beta_high {self.beta_high}")
        return self

    def build(self) -> Policy:
        """Return the policy without the parts that the flags switch off. N_max is then that of the budget."""
        alpha = self.alpha_tokens if self.anti_starvation else 0.0
        budget: BudgetPolicy = FreeMemoryBudget(self) if self.dynamic_budget else FullBudget()
        waits = budget if self.swap_waits == "step" else None
        order: OrderPolicy = TwoStage(alpha, self.cache_aware, budget, waits) if self.two_stage else OriginalArrival()
        return Policy(
            "augserve",
            order,
            LeastWaste(Predicted(self.cache_aware, waits)),
            budget,
            ranks_running=self.ranks_running and self.two_stage,
            skips_swapped=True,
            evicts_ends=self.evicts_ends,
        )


def prefill_cost(prompt: float, step_tokens: float, step_s: float) -> float:
    """Return ½ · L_pre² / N_max · T_fwd (eq. 9).

    Swap-out (12), swap-in (16) and recomputation (17) have the same form.
    """
    return prompt * prompt / 2 / step_tokens * step_s


def decode_cost(start: float, output: float, step_s: float) -> float:
    """Return T_fwd · (L · L_out + ½ L_out²) (eq. 10; eq. 19 with L = L_tot + L_ret)."""
    return step_s * (start * output + output * output / 2)


def api_cost(context: float, pause_s: float) -> float:
    """Return (L_pre + L_out) · T_api (eq. 11, 24)."""
    return context * pause_s


def returned_cost(total: float, returned: float, step_tokens: float, step_s: float) -> float:
    """Return T_fwd / N_max · (L_tot · L_ret + ½ L_ret²) (eq. 18)."""
    return step_s / step_tokens * (total * returned + returned * returned / 2)


@dataclass(frozen=True, slots=True)
class TwoStage:
    """Orders by queue (running, swapped, the others: algorithm 1), then by least scheduling value (eq. 9-26).

    The paper's V_sched = V_final + alpha · (now - last scheduled) would let waiting turns rise in value and so fall
    behind; the sign here is the opposite. ``now`` is the same for all turns, so - alpha · (now - last) ranks like +
    alpha · last. This does not change while a turn waits, so each stage is computed once, at the arrival or the resume.
    """

    alpha_tokens: float
    cache_aware: bool
    budget: BudgetPolicy = field(default_factory=FullBudget)
    """N_max: the tokens of a step (section 4.4)."""
    waits: BudgetPolicy | None = None
    """N_max of eq. 6. None: the tokens of the running turns are used in its place."""

    @property
    def refresh_steps(self) -> None:
        """None: values are computed only at arrival and at resume."""
        return None

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (0 running or preserved, 1 swapped, 2 new or discarded; V_final + alpha · last scheduled)."""
        if turn.preempted or turn.kv is KvPlace.HELD:
            queue = 0.0
        else:
            queue = 1.0 if turn.kv is KvPlace.SWAPPED else 2.0
        return (queue, self.value(turn) + self.alpha_tokens * _last_scheduled_s(turn))

    def value(self, turn: TurnView) -> float:
        """Return V1 before the program's first call (eq. 13-15), V_final after it (eq. 20-25), in token-seconds."""
        load, tokens = turn.load, turn.tokens
        output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
        step_s, step_tokens = iteration_s(load), self.budget.tokens(load)
        total = min(turn.program.context_tokens, tokens)
        if total == 0:
            spent = prefill_cost(tokens, step_tokens, step_s)
        else:
            spent = returned_cost(total, tokens - total, step_tokens, step_s)
            if turn.kv is KvPlace.SWAPPED:
                spent += prefill_cost(total, swap_limit_tokens(load), step_s)
            elif turn.kv is KvPlace.NONE:
                lost = lost_share(load) if self.cache_aware else 1.0
                spent += lost * prefill_cost(total, step_tokens, step_s)
        call = self._call(load, tokens + round(output), max(0.0, turn.forecast.pause_s), step_s)
        return spent + decode_cost(tokens, output, step_s) + call

    def _call(self, load: LoadView, context: int, pause_s: float, step_s: float) -> float:
        """Return what the next call adds under its predicted handling (eq. 13-15, 23-25). It is 0 for a last turn."""
        batch = self.waits.tokens(load) if self.waits is not None else None
        match predicted(load, context, load.running_tokens, pause_s, self.cache_aware, batch).least:
            case Handling.PRESERVE:
                return api_cost(context, pause_s)
            case Handling.SWAP:
                return prefill_cost(context, swap_limit_tokens(load), step_s)
            case Handling.DISCARD:
                return 0.0


def _last_scheduled_s(turn: TurnView) -> float:
    """Return the time at which the program was last scheduled. A preempted turn has run since it arrived."""
    served_s = turn.program.last_served_s
    return turn.arrived_s if served_s is None or turn.preempted else min(served_s, turn.arrived_s)


@dataclass(frozen=True, slots=True)
class FreeMemoryBudget:
    """Section 4.4: as many tokens as fit into memory, within bounds around a profiled target.

    Active requests may preempt the memory of paused ones, so it counts as available. By eq. 27, active requests are the
    running ones, and holds yield to these. Holds do not yield to waiting turns: that reading is worse for AugServe.
    """

    parameters: AugserveParameters

    def tokens(self, load: LoadView) -> int:
        """Return free tokens + gamma · paused tokens (eq. 27-32), within [beta_low, beta_high] · target."""
        parameters, most = self.parameters, load.facts.max_tokens
        target = parameters.target_tokens or most
        available = int(load.free_tokens + parameters.gamma * load.held_tokens)
        bounded = min(max(available, round(parameters.beta_low * target)), round(parameters.beta_high * target))
        return max(1, min(bounded, most))
