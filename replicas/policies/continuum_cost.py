"""Continuum's later time to live: pin for as long as it is expected to gain more than it costs.

A pin of tau seconds saves, if the tool returns in time, the wait to get back in and the reload of the context; it
costs tau. Source: Continuum's later versions; order and victims are those of ``continuum``.
"""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from cluster.durations import Durations
from cluster.program import tool_key
from replicas.policies.continuum import Pins, ProgramArrivalOrder
from replicas.policies.vllm import FullBudget
from replicas.policy import Hold, LoadView, PauseDecision, PauseView, Policy, Release, Why

QUANTILES = 32
"""Observed durations are tried at so many ranks."""


class ContinuumCostParameters(BaseModel):
    """Parameters of the policy `continuum2`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    min_observations: int = Field(5, ge=1)
    """K: a tool's own durations count from so many observations on; before, all tools' together."""
    default_ttl_s: float = Field(2.0, gt=0)
    """Time to live while there are fewer than K observations of anything."""
    eta: float = Field(1.0, ge=0, le=1)
    """How much of the queueing delay a pin saves: minus the correlation of the turns that programs have been served
    with the turns that they have left. 1: all programs have the same number of turns; 0: what a program was served
    tells nothing of what it has left."""

    def build(self) -> Policy:
        """The policy."""
        return Policy("continuum2", ProgramArrivalOrder(), CostBenefit(self), FullBudget())


@dataclass(frozen=True, slots=True)
class CostBenefit(Pins):
    """tau* = argmax P(tool <= tau) · (T_queue · eta + reload(C)) - tau, over the durations that were observed."""

    parameters: ContinuumCostParameters

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for as long as the client asks (``retention_s``), else for tau*; release where no pin pays."""
        if pause.hints.retention_s is not None:
            return Hold(pause.now_s + pause.hints.retention_s, reason=Why.RETENTION)
        statistics = self._statistics(pause)
        if statistics is None:
            return Hold(pause.now_s + self.parameters.default_ttl_s, reason=Why.DEFAULT_TTL)
        gain_s = pause.load.lost_queue_s * self.parameters.eta + reload_s(pause.load, pause.context_tokens)
        ttl_s = best_ttl_s(statistics, gain_s)
        return Hold(pause.now_s + ttl_s, reason=Why.TTL) if ttl_s > 0 else Release(Why.NO_PIN_PAYS)

    def _statistics(self, pause: PauseView) -> Durations | None:
        """The tool's own once it was seen K times, else all tools', else None."""
        levels = pause.durations.levels(tool_key(pause.tools))
        return next((level for level in levels if level.count >= self.parameters.min_observations), None)


def best_ttl_s(statistics: Durations, gain_s: float) -> float:
    """The tau of the largest P(tool <= tau) · ``gain_s`` - tau; 0 where none is positive."""
    best_s, best = 0.0, 0.0
    for rank in range(1, QUANTILES + 1):
        share = rank / QUANTILES
        ttl_s = statistics.quantile(share)
        if ttl_s >= gain_s:  # nor can any longer one gain more than it costs
            break
        if share * gain_s - ttl_s > best:
            best_s, best = ttl_s, share * gain_s - ttl_s
    return best_s


def reload_s(load: LoadView, context_tokens: int) -> float:
    """Seconds to have the context back: from the host tier, if it would fit there, else by computing it again."""
    cost = load.facts.cost
    if context_tokens <= load.facts.host_tokens:
        return min(cost.swap_s(context_tokens), cost.prefill_s(context_tokens))
    return cost.prefill_s(context_tokens)
