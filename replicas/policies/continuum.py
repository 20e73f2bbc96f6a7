"""Continuum: pins a program's KV across a tool call for a time to live, and serves programs in order of their arrival.

Source: Continuum sections 4.2 (estimation), 4.3 (time to live), 4.4 (priority), 4.5 (simplified version) and 5.3
(victims). `continuum2` is its later time to live, which maximises expected gain minus cost. A pin of tau seconds costs
tau. If the tool returns in time, it saves the wait for admission and the reload of the context.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.core.lifecycle.events import PauseReason
from cluster.core.program import tool_key
from cluster.durations.statistics import Durations
from replicas.policies.baselines import FullBudget
from replicas.policy import (
    Claimant,
    Hold,
    HoldView,
    LoadView,
    PauseDecision,
    PauseView,
    Policy,
    RankKey,
    Release,
    TurnView,
)


class ContinuumParameters(BaseModel):
    """Parameters of the policy `continuum`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    delta: float = Field(0.1, gt=0, lt=1)
    """The bound on a tool's duration holds with probability 1 - delta (empirical Bernstein)."""
    min_observations: int = Field(5, ge=2)
    """K: minimum number of observations of a tool before its own statistics are used. Below it, those of all tools
    are used."""
    default_ttl_s: float = Field(2.0, gt=0)
    """Time to live in seconds while there are fewer than K observations of all tools together."""
    beta: float = Field(1.0, gt=0)
    """Factor of the time to live, beside that of `turns_factor`."""
    turns_factor: Literal["progress", "average"] = "progress"
    """How turns change the time to live. `progress`: (turns of this program so far) / (mean turns of a program).
    `average`: the mean turns of a program. The paper's formula is lost in our copy of its text, which fits both."""
    max_ttl_s: float | None = Field(None, gt=0)
    """A program whose time to live would be longer is not pinned at all: a pin that ends before its pause costs twice.
    null, as in the paper: there is no such bound."""
    pins_yield: Literal["stuck", "waiting"] = "stuck"
    """When a pin is evicted for a turn that waits. `stuck`: while nothing runs, which is the deadlock that section 5.3
    prevents. `waiting`: whenever that turn lacks memory, as its text says word by word. Pins then protect no program
    from new ones while memory is short."""
    simplified: bool = False
    """Whether section 4.5's simplified version is used: a program is pinned for fixed_ttl_s if its tool's mean
    duration is below threshold_s, and not at all otherwise."""
    threshold_s: float = Field(2.0, gt=0)
    """Simplified version: mean duration in seconds above which a tool's programs are not pinned."""
    fixed_ttl_s: float = Field(2.0, gt=0)
    """Simplified version: the time to live of every pin in seconds."""

    @model_validator(mode="after")
    def _default_is_used(self) -> Self:
        if self.max_ttl_s is not None and self.default_ttl_s > self.max_ttl_s:
            raise ValueError(f"default_ttl_s {self.default_ttl_s} is longer than max_ttl_s {self.max_ttl_s}")
        return self

    def build(self) -> Policy:
        """Return the order of program arrival, with holds for a time to live (section 4.3; simplified: 4.5)."""
        pause = SimplifiedTimeToLive(self) if self.simplified else TimeToLive(self)
        return Policy("continuum", ProgramArrivalOrder(), pause, FullBudget())


class ProgramArrivalOrder:
    """Section 4.4: orders preempted turns, then pinned programs, then programs by arrival."""

    refresh_steps = None

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (0 if preempted, 0 if pinned, arrival of the program in seconds)."""
        return (0.0 if turn.preempted else 1.0, 0.0 if turn.pinned else 1.0, turn.program.arrived_s)


class Pins:
    """The common part of all versions: a pin's end is set once, and victims are chosen by section 5.3."""

    __slots__ = ()

    @property
    def yields_to_waiting(self) -> bool:
        """Whether pins yield to a waiting turn while others run."""
        return False

    @property
    def review_steps(self) -> None:
        """None: a pin's end is set once and never reviewed."""
        return None

    def review(self, hold: HoldView) -> PauseDecision:
        """Keep the pin as it is."""
        return Hold(hold.until_s)

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank of a pin for eviction. The program that arrived last is evicted first."""
        return (-hold.program.arrived_s,)

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """Return whether the pin may be evicted for ``claimant``.

        It always yields to a running turn, because a preemption would cost more, and to a waiting one when nothing
        runs.
        """
        return claimant is not Claimant.WAITING or self.yields_to_waiting


@dataclass(frozen=True, slots=True)
class PaperPins(Pins):
    """The pins of the paper: when they yield is a parameter."""

    parameters: ContinuumParameters

    @property
    def yields_to_waiting(self) -> bool:
        """Whether pins yield to a waiting turn while others run."""
        return self.parameters.pins_yield == "waiting"


class TimeToLive(PaperPins):
    """Section 4.3: time to live = bound of the tool's duration · beta · factor for turns."""

    __slots__ = ()

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for the time to live. Release if there is a longest one and it is longer."""
        ttl_s = self.ttl_s(pause)
        if self.parameters.max_ttl_s is not None and ttl_s > self.parameters.max_ttl_s:
            return Release(PauseReason.LONG_PAUSE)
        return Hold(pause.now_s + ttl_s, reason=PauseReason.TTL)

    def ttl_s(self, pause: PauseView) -> float:
        """Return the time to live in seconds."""
        factor = 1.0
        if pause.average_turns:
            progress = self.parameters.turns_factor == "progress"
            factor = pause.program.turns / pause.average_turns if progress else pause.average_turns
        return self._bound_s(pause) * self.parameters.beta * factor

    def _bound_s(self, pause: PauseView) -> float:
        """Return the bound of the tool's duration if it was seen K times, else of all tools, else the default."""
        for statistics in pause.durations.levels(tool_key(pause.tools)):
            if statistics.count >= self.parameters.min_observations:
                return statistics.bernstein_bound_s(self.parameters.delta)
        return self.parameters.default_ttl_s


class SimplifiedTimeToLive(PaperPins):
    """Section 4.5: one time to live, for tools whose mean duration is short."""

    __slots__ = ()

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for ``fixed_ttl_s`` if the mean is below ``threshold_s``.

        All tools count for one that was never seen.
        """
        statistics = next(pause.durations.levels(tool_key(pause.tools)), None)
        if statistics is None or statistics.mean_s < self.parameters.threshold_s:
            return Hold(pause.now_s + self.parameters.fixed_ttl_s, reason=PauseReason.SHORT_TOOL)
        return Release(PauseReason.LONG_TOOL)


QUANTILES = 32
"""Number of ranks at which observed durations are tried."""


class ContinuumCostParameters(BaseModel):
    """Parameters of the policy `continuum2`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    min_observations: int = Field(5, ge=1)
    """K: minimum number of observations of a tool before its own durations are used. Below it, those of all tools
    are used."""
    default_ttl_s: float = Field(2.0, gt=0)
    """Time to live in seconds while there are fewer than K observations of all tools together."""
    eta: float | None = Field(None, ge=0, le=1)
    """How much of the queueing delay a pin saves: minus the correlation of the turns that programs have been served
    with the turns that they have left. 1: all programs have the same number of turns; 0: what a program was served
    does not correlate with what it has left. null: it is learnt from the programs that have ended, and 1 until then."""

    def build(self) -> Policy:
        """Return the order of program arrival, with holds by expected gain minus cost (later version)."""
        return Policy("continuum2", ProgramArrivalOrder(), CostBenefit(self), FullBudget())


@dataclass(frozen=True, slots=True)
class CostBenefit(Pins):
    """tau* = argmax P(tool <= tau) · (T_queue · eta + reload(C)) - tau, over the observed durations."""

    parameters: ContinuumCostParameters

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for tau*. Release if no pin pays."""
        statistics = self._statistics(pause)
        if statistics is None:
            return Hold(pause.now_s + self.parameters.default_ttl_s, reason=PauseReason.DEFAULT_TTL)
        gain_s = pause.load.lost_queue_s * self.eta(pause) + reload_s(pause.load, pause.context_tokens)
        ttl_s = best_ttl_s(statistics, gain_s)
        return Hold(pause.now_s + ttl_s, reason=PauseReason.TTL) if ttl_s > 0 else Release(PauseReason.NO_PIN_PAYS)

    def eta(self, pause: PauseView) -> float:
        """Return the part of the queueing delay that a pin saves, in [0, 1]."""
        if self.parameters.eta is not None:
            return self.parameters.eta
        return 1.0 if pause.turns_correlation is None else max(0.0, -pause.turns_correlation)

    def _statistics(self, pause: PauseView) -> Durations | None:
        """Return the tool's statistics if it was seen K times, else those of all tools, else None."""
        levels = pause.durations.levels(tool_key(pause.tools))
        return next((level for level in levels if level.count >= self.parameters.min_observations), None)


def best_ttl_s(statistics: Durations, gain_s: float) -> float:
    """Return the tau of the largest P(tool <= tau) · ``gain_s`` - tau, in seconds. It is 0 if none is positive."""
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
    """Return the seconds to restore the context: from the host tier if it fits there, else by computing it again."""
    cost = load.facts.cost
    if context_tokens <= load.facts.host_tokens:
        return min(cost.swap_s(context_tokens), cost.prefill_s(context_tokens))
    return cost.prefill_s(context_tokens)
