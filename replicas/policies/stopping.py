"""Optimal stopping: a paused program's KV is held for as long as waiting for its tool is worth the memory.

Both sides are GPU seconds. Value: computing the context again, or fetching it from the host tier. Price, per second:
the share of the memory that it takes, times how scarce memory is, since all memory together is worth all that the
replica can do. At full pressure the break-even time without a host tier is therefore that in which the memory could be
filled anew, ``CostModel.refill_s``, whatever the context's length. How long the tool may still take is what was
observed of it, given that it has lasted so long.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cluster.durations import Durations
from cluster.program import tool_key
from cluster.statistics import DurationTable
from replicas.policies.triage import paces
from replicas.policy import Claimant, Hold, HoldView, LoadView, PauseDecision, PauseView, RankKey, Release, Swap, Why

LONGEST_S = 3600.0
"""A hold that costs nothing ends after this time; the replica's own limit is usually less."""

LOOKAHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Times at which a hold may be ended, in break-even times from now."""

TOLD_SLACK = 1.25
"""A client's word on a pause is trusted up to so many times its length."""


def pressure(load: LoadView) -> float:
    """How scarce memory is, in [0, 1]: the share of the waiting turns' KV, taken as long as the running ones', that
    would find no room now. 0 where nobody waits that can still be in time.
    """
    demand = load.waiting_in_time * max(1.0, load.running_tokens / max(1, load.running))
    return max(0.0, demand - load.free_tokens) / demand if load.waiting_in_time else 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """What is known of the tool that a program waits for."""

    statistics: Durations | None
    """None: nothing was observed of any."""
    told_s: float | None
    """The client's word on this very pause."""
    expected_s: float

    @classmethod
    def of(cls, view: PauseView | HoldView, min_observations: int) -> "Tool":
        """Its own durations with such arguments once they were seen ``min_observations`` times, else those of the
        tool, else of all tools.
        """
        told_s = max(0.0, view.forecast.pause_s) if view.forecast.pause_told else None
        tools = view.tools if isinstance(view, PauseView) else view.program.tools
        statistics = _statistics(view.durations, tool_key(tools), min_observations)
        return cls(statistics, told_s, max(1e-3, view.forecast.pause_s))

    def survival(self, elapsed_s: float) -> Callable[[float], float]:
        """P(lasts t seconds longer | lasted ``elapsed_s``), of t.

        Past all that was observed, or where nothing was, the tool is taken to last as long again as it did or as
        expected, in the mean.
        """
        told_s = None if self.told_s is None else self.told_s * TOLD_SLACK - elapsed_s
        if told_s is not None and told_s >= 0:
            return lambda more_s: 1.0 if more_s < told_s else 0.0
        statistics = self.statistics
        lasted = statistics.survival(elapsed_s) if statistics else 0.0
        if statistics is None or lasted <= 0:
            scale_s = max(elapsed_s, self.expected_s)
            return lambda more_s: scale_s / (scale_s + more_s)
        return lambda more_s: statistics.survival(elapsed_s + more_s) / lasted


def gains(survival: Callable[[float], float], break_even_s: float) -> Iterator[tuple[float, float]]:
    """Of each time t of LOOKAHEAD (t, P(back within t) - E[min(t, back)] / break-even): what a hold until t gains."""
    cost, before, before_s = 0.0, 1.0, 0.0
    for times in LOOKAHEAD:
        at_s = times * break_even_s
        survives = survival(at_s)
        cost += (before + survives) / 2 * (at_s - before_s) / break_even_s
        before, before_s = survives, at_s
        yield at_s, 1.0 - survives - cost


def best_stop_s(survival: Callable[[float], float], break_even_s: float) -> float | None:
    """When to end a hold, in seconds from now; None: at once, as no later time gains more than it costs."""
    at_s, gain = max(gains(survival, break_even_s), key=lambda stop: stop[1])
    return at_s if gain > 0 else None


@dataclass(frozen=True, slots=True)
class Stopping:
    """Hold while it pays at the present price; the hopeless and what is least worth its memory go first."""

    worth: float
    min_observations: int
    review_steps: int | None

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for as long as the client asks (``retention_s``), else while it pays."""
        if pause.hints.retention_s is not None:
            return Hold(pause.now_s + max(0.0, pause.hints.retention_s), reason=Why.RETENTION)
        return self._choose(pause, 0.0)

    def review(self, hold: HoldView) -> PauseDecision:
        """With the load of now, and what the tool has taken already."""
        return Hold(hold.until_s, reason=Why.BACK) if hold.owner_waits else self._choose(hold, elapsed_s(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """(0 hopeless or 1 alive, 0 paused or 1 back, value for each token and second)."""
        return (0.0 if is_hopeless(hold) else 1.0, 1.0 if hold.owner_waits else 0.0, self._value_rate(hold))

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """To a running turn always; to a waiting one if holding would not pay at full pressure, or if the program is
        back itself and hopeless: then it ranks low and may wait for long. Whatever any waiting turn may break protects
        nothing.
        """
        if claimant is not Claimant.WAITING:
            return True
        if hold.owner_waits:
            return is_hopeless(hold)
        if hold.asked:
            return False
        survival = Tool.of(hold, self.min_observations).survival(elapsed_s(hold))
        return not any(gain > 0 for _, gain in gains(survival, self._break_even_s(hold, 1.0)))

    def _choose(self, view: PauseView | HoldView, elapsed: float) -> PauseDecision:
        scarce = pressure(view.load)
        if scarce <= 0:
            return Hold(view.load.now_s + LONGEST_S, reason=Why.FREE)
        survival = Tool.of(view, self.min_observations).survival(elapsed)
        stop_s = best_stop_s(survival, self._break_even_s(view, scarce))
        if stop_s is not None:
            return Hold(view.load.now_s + min(stop_s, LONGEST_S), reason=Why.PAYS)
        return Swap(Why.DOES_NOT_PAY) if _swaps(view) else Release(Why.DOES_NOT_PAY)

    def _break_even_s(self, view: PauseView | HoldView, scarce: float) -> float:
        """Seconds after which a hold has cost what it can save."""
        facts = view.load.facts
        context = max(1, view.context_tokens)
        lost_s = facts.cost.swap_s(context) if _swaps(view) else facts.cost.prefill_s(context)
        return self.worth * lost_s * facts.capacity_tokens / (context * scarce)

    def _value_rate(self, hold: HoldView) -> float:
        window_s = self._break_even_s(hold, 1.0)
        if hold.owner_waits:
            return window_s
        return window_s * (1.0 - Tool.of(hold, self.min_observations).survival(elapsed_s(hold))(window_s))


def elapsed_s(hold: HoldView) -> float:
    """Seconds that the tool has taken, from the executor's word if there is one."""
    started_s = hold.program.tool_started_s
    return max(0.0, hold.load.now_s - (hold.since_s if started_s is None else max(started_s, hold.since_s)))


def is_hopeless(hold: HoldView) -> bool:
    """The program was late, is late with the turn that waits, or is too slow for its tokens."""
    slo, waited_s = hold.load.facts.slo, hold.load.now_s - hold.program.last_event_s if hold.owner_waits else 0.0
    if slo.ttft_s is not None and (not hold.program.on_time or waited_s > slo.ttft_s):
        return True
    return not paces(hold.program, hold.forecast, hold.load, waited_s, 0.0)


def _swaps(view: PauseView | HoldView) -> bool:
    """The context fits the host tier, and comes back from there sooner than it is computed."""
    facts, context = view.load.facts, view.context_tokens
    return 0 < context <= facts.host_tokens and facts.cost.swap_s(context) < facts.cost.prefill_s(context)


def _statistics(durations: DurationTable, tool: str, min_observations: int) -> Durations | None:
    levels = list(durations.levels(tool))
    return next((level for level in levels if level.count >= min_observations), levels[-1] if levels else None)
