"""Caesura's own policy: turns by value per work, holds by optimal stopping, and steps that prompts need to be in time.

Order is Smith's rule (W. E. Smith, 1956): the least work per value comes first, which minimises the mean of the
completion times weighted by value. The work is that of the whole program, what is left of it, in GPU seconds. The value
of every turn is 1. It is more if the turn can still be in time, and much more if, beside that, all turns of its program
were in time. So a program that was late once keeps the value of its later turns, and a program that costs most for one
met SLO comes last. There is no admission: a turn that fits into memory begins.

Optimal stopping holds a paused program's KV while waiting for its tool is worth the memory. Both sides are GPU seconds.
The value of a hold is the price of the cheapest other place (`cluster.core.kv_price`): to compute the context again,
or to load it from the host tier or from disk. The price of a second of the hold is its share of the memory times how
scarce memory is (`pressure`), because all memory together is worth all work of the replica. At full pressure and
without a host tier, the break-even time is ``CostModel.refill_s``, the time to fill the memory again, whatever the
context's length. How long the tool may still take follows from its observed durations, given that it has lasted so
long. Where a hold does not pay, the decision is the cheapest other place.

A step has as many tokens as cost nothing beside the weights that it reads anyway (InferCept, section 4.2: S). It has
more where the prompts that run or could run would otherwise not have their first token in time.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.kv_price import Place, Price, held_for_s
from cluster.core.lifecycle.events import PauseReason
from cluster.core.lifecycle.machine import ProgramState
from cluster.core.program import tool_key
from cluster.durations.statistics import Durations
from cluster.durations.table import DurationTable
from replicas.policies import trees
from replicas.policies.yielding import Yielding, is_due
from replicas.policy import (
    Claimant,
    Forecast,
    Hold,
    HoldView,
    KvPlace,
    LoadView,
    PauseDecision,
    PauseView,
    Policy,
    RankKey,
    Release,
    Swap,
    TurnView,
)

# The constants below were chosen, not measured one by one. `benchmarks.policy_sensitivity` halves and
# doubles them.

HOLD_WORTH = 1.0
"""Value of a lost context, as a multiple of the cost to compute it again."""
PROMPT_SHARE = 0.5
"""Share of the TTFT bound within which the prompts should be computed that run, or that wait and fit into memory. Steps
become larger if that is necessary. Less favours the first token, and more the time per token after it."""
PROMPT_SLOWDOWN = 3.0
"""Largest multiple of its time alone that a prompt may take because its steps are small. Where kernels are short and
the time between them is long, as on a CPU, the saturation point is too small: a step costs the same with or without a
few prompt tokens, and a prompt of thousands of tokens would take hundreds of steps."""
LONGEST_S = 3600.0
"""Seconds after which a hold that costs nothing ends. The replica's own limit is usually shorter."""

LOOKAHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Times at which a hold may be ended, from now, as multiples of the break-even time."""

HINT_SLACK = 1.25
"""Multiple of the client's hint on a pause up to which the hint is trusted."""


class CaesuraParameters(BaseModel):
    """Parameters of the policy `caesura`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    turn_value: float = Field(2.0, ge=0)
    """Value of a turn that can be in time, beside 1 for any turn."""
    program_value: float = Field(16.0, ge=0)
    """Value of such a turn beside that, if all turns of its program were in time. More favours the programs that can
    meet the SLO, less the completion times of the others."""
    max_wait_s: float = Field(120.0, gt=0)
    """Bound on the seconds that a turn is expected to wait for its first token. New programs with which turns would
    wait longer are refused with 503 at once. A turn that has waited for a half of it, also after preemptions, comes
    before all others. Batch work (a priority above 0) does so after twice of it, and its bound is 2.5 times as long."""
    refresh_steps: int = Field(8, ge=1)
    """Number of steps between two rankings of all waiting turns. A turn's rank changes while it waits, because its
    SLO comes nearer."""
    review_steps: int = Field(8, ge=1)
    """Number of steps between two reviews of each hold."""
    min_observations: int = Field(3, ge=1)
    """Minimum number of observations of a tool before its own durations are used. Below it, the durations of all
    tools are used."""
    reserve_share: float = Field(0.0, ge=0, lt=1)
    """Part of the KV memory that admissions leave free for the growth of running turns."""
    min_prefill_tokens: int = Field(64, ge=1)
    """Minimum number of prompt tokens that a step may compute, however slow the steps are."""

    def build(self) -> Policy:
        """Return the order by value per work, with holds that stop when they cost more than they save."""
        order = ValuePerWork(self.turn_value, self.program_value, self.max_wait_s, self.refresh_steps)
        pause = Stopping(self.min_observations, self.review_steps)
        budget = PacedBudget(self.min_prefill_tokens)
        return Policy(
            "caesura",
            order,
            pause,
            budget,
            self.reserve_share,
            is_late,
            self.max_wait_s,
            preemption=Yielding(self.max_wait_s, slack_s),
            evicts_ends=True,
            single_flight=True,
            guards_memory=True,
        )


# --- order ------------------------------------------------------------------------------------------------------------


def token_s(load: LoadView) -> float:
    """Return the seconds of a decode iteration with one more turn than run now, which a turn waits for each token."""
    return load.joined_iteration_s


def decode_work_s(load: LoadView, context_tokens: float) -> float:
    """Return one turn's seconds of a decode iteration: its share of the common cost, and the reading of its own KV."""
    return load.joined_share_s + context_tokens * load.facts.cost.context_s


def turn_work_s(turn: TurnView, prefill_s: float | None = None) -> float:
    """Return the expected GPU seconds of a turn: its prefill, and its share of its decode iterations."""
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
    prefill_s = _prefill_s(turn) if prefill_s is None else prefill_s
    return prefill_s + output * decode_work_s(turn.load, turn.tokens + output / 2)


def later_work_s(turn: TurnView) -> float:
    """Return the expected GPU seconds of the turns after this one, if no KV is lost."""
    forecast, load = turn.forecast, turn.load
    later = max(0.0, forecast.later_tokens)
    outputs = min(_later_outputs(forecast), later)
    context = turn.tokens + max(0.0, forecast.output_tokens) + later / 2
    return (later - outputs) * load.facts.cost.token_s + outputs * decode_work_s(load, context)


def to_first_s(turn: TurnView, prefill_s: float | None = None) -> float:
    """Return the seconds from the turn's arrival to its first token, if it is admitted now."""
    if turn.first_token_s is not None:
        return turn.first_token_s - turn.arrived_s
    # The others decode beside its prefill, and the current step has to end before it.
    prefill_s = _prefill_s(turn) if prefill_s is None else prefill_s
    return turn.load.now_s - turn.arrived_s + prefill_s + 2 * token_s(turn.load)


def turn_s(turn: TurnView, prefill_s: float | None = None) -> float:
    """Return the seconds from the turn's arrival to its end, if it is admitted now."""
    load = turn.load
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
    prefill_s = _prefill_s(turn) if prefill_s is None else prefill_s
    return load.now_s - turn.arrived_s + prefill_s + (2 + output) * token_s(load)


def turn_in_time(turn: TurnView, prefill_s: float | None = None) -> bool:
    """Return whether the turn can still meet its bounds, if it is admitted now.

    Args:
        turn: the turn.
        prefill_s: seconds until its prompt is in memory, if they are known already. Likewise in other functions.
    """
    ttft_s, e2e_s = turn.bounds.ttft_s, turn.bounds.e2e_s
    if ttft_s is not None and to_first_s(turn, prefill_s) > ttft_s:
        return False
    return e2e_s is None or turn_s(turn, prefill_s) <= e2e_s


def slack_s(turn: TurnView) -> float:
    """Return the seconds that a turn may wait for admission and still be in time. Negative: it is late. inf: no bound
    depends on it.
    """
    if not turn_in_time(turn):
        return -inf
    ttft_s, e2e_s = turn.bounds.ttft_s, turn.bounds.e2e_s
    to_first = inf if ttft_s is None or turn.first_token_s is not None else ttft_s - to_first_s(turn)
    return min(to_first, inf if e2e_s is None else e2e_s - turn_s(turn))


def program_in_time(turn: TurnView, prefill_s: float | None = None) -> bool:
    """Return whether all turns of the program were in time, and its time per token can still be within the bound."""
    if turn.bounds.ttft_s is not None and not turn.program.on_time:
        return False
    bound_s = turn.bounds.normalized_latency_s
    if bound_s is None:
        return True
    generated = max(float(turn.generated_tokens), turn.forecast.output_tokens)
    return paces(bound_s, turn.program, turn.forecast, turn.load, turn_s(turn, prefill_s), generated)


def paces(
    bound_s: float | None, program: ProgramState, forecast: Forecast, load: LoadView, turn_s: float, output: float
) -> bool:
    """Return whether the program's time per generated token can still be within the bound.

    Args:
        bound_s: the bound. None: there is none.
        program: the program, with the time and the tokens of its ended turns.
        forecast: the forecast of the current turn, or of the one that has just ended.
        load: the replica's load now.
        turn_s: seconds that the current turn will have taken. 0 if there is none.
        output: tokens that the current turn will have generated.
    """
    if bound_s is None:
        return True
    later = _later_outputs(forecast)
    returned = round(max(0.0, forecast.returned_tokens))
    later_s = later * token_s(load) + max(0.0, forecast.later_turns) * load.facts.cost.token_s * returned
    return program.busy_s + turn_s + later_s <= bound_s * (program.generated_tokens + output + later)


@dataclass(frozen=True, slots=True)
class ValuePerWork:
    """Smith's rule over programs, see the module. Without an SLO all turns have the same value."""

    turn_value: float
    program_value: float
    max_wait_s: float
    refresh_steps: int | None

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (priority, seconds of work per value, 1 if the turn is late).

        In a tree of programs the work is that of the whole tree. Before the last number the rank has the seconds of the
        way through the program, with a minus.

        A turn that has waited for a half of the longest wait, or a sheddable one for twice of it (`is_due`), comes
        before all others, by arrival.
        """
        priority = float(turn.hints.priority or 0)
        if is_due(turn, self.max_wait_s):
            return (-inf, turn.arrived_s, IN_TIME)
        prefill_s = _prefill_s(turn)
        left_s = turn_work_s(turn, prefill_s) + later_work_s(turn)
        way: tuple[float, ...] = ()
        if turn.tree is not None:  # the tree is done when all its programs are: the longest way through it comes first
            left_s += trees.work_s(turn.tree.others, turn.load)
            way = (-trees.way_s(turn, prefill_s, _later_outputs(turn.forecast)),)
        if not turn_in_time(turn, prefill_s):
            return (priority, left_s, *way, LATE)
        value = 1.0 + self.turn_value + (self.program_value if program_in_time(turn, prefill_s) else 0.0)
        return (priority, left_s / value, *way, IN_TIME)


IN_TIME, LATE = 0.0, 1.0


def is_late(rank: RankKey) -> bool:
    """Return whether a turn of this rank can no longer be in time. A rank that the scheduler gives is never late."""
    return rank[-1:] == (LATE,)


def _prefill_s(turn: TurnView) -> float:
    """Return the seconds until all of the prompt's KV is in memory: swapped KV is loaded, missing KV computed."""
    cost, cached = turn.load.facts.cost, min(turn.cached_tokens, turn.tokens)
    fetched_s = cost.swap_s(cached) if turn.kv is KvPlace.SWAPPED else 0.0
    return fetched_s + cost.prefill_s(turn.tokens - cached, cached, turn.load.facts.max_tokens)


def _later_outputs(forecast: Forecast) -> float:
    """Return the tokens that the later turns generate. Each is assumed to generate as many as this one."""
    return max(0.0, forecast.later_turns) * max(0.0, forecast.output_tokens)


# --- holds ------------------------------------------------------------------------------------------------------------


def pressure(load: LoadView) -> float:
    """Return how scarce memory is, in [0, 1].

    It is the share of the waiting turns' KV that does not fit into free memory now. Waiting turns are assumed to be as
    long as the running ones. It is 0 where no turn waits that can still meet the SLO.
    """
    demand = load.waiting_in_time * max(1.0, load.running_tokens / max(1, load.running))
    return max(0.0, demand - load.free_tokens) / demand if load.waiting_in_time else 0.0


@dataclass(frozen=True, slots=True)
class Tool:
    """What is known of the tool that a program waits for."""

    statistics: Durations | None
    """Observed durations, or None if no tool was observed."""
    hinted_s: float | None
    """The client's hint in seconds for this pause, or None if there is none."""
    expected_s: float

    @classmethod
    def of(cls, view: PauseView | HoldView, min_observations: int) -> "Tool":
        """Return what is known of the tool of a paused program.

        The statistics are those of the tool with such arguments if it has ``min_observations``, else of the tool, else
        of all tools.
        """
        hinted_s = max(0.0, view.forecast.pause_s) if view.forecast.pause_hinted else None
        tools = view.tools if isinstance(view, PauseView) else view.program.tools
        statistics = _statistics(view.durations, tool_key(tools), min_observations)
        return cls(statistics, hinted_s, max(1e-3, view.forecast.pause_s))

    def survival(self, elapsed_s: float) -> Callable[[float], float]:
        """Return the function P(lasts t seconds longer | lasted ``elapsed_s``) of t.

        Beyond all observations, or without any, the tool is expected to last as long again as it has lasted, or as it
        was expected to.
        """
        hinted_s = None if self.hinted_s is None else self.hinted_s * HINT_SLACK - elapsed_s
        if hinted_s is not None and hinted_s >= 0:
            return lambda more_s: 1.0 if more_s < hinted_s else 0.0
        statistics = self.statistics
        lasted = statistics.survival(elapsed_s) if statistics else 0.0
        if statistics is None or lasted <= 0:
            scale_s = max(elapsed_s, self.expected_s)
            return lambda more_s: scale_s / (scale_s + more_s)
        return lambda more_s: statistics.survival(elapsed_s + more_s) / lasted


def gains(survival: Callable[[float], float], break_even_s: float) -> Iterator[tuple[float, float]]:
    """Yield (t, gain) for each t of LOOKAHEAD, in seconds from now.

    The gain of a hold until t is P(back within t) - E[min(t, back)] / break-even.
    """
    cost, before, before_s = 0.0, 1.0, 0.0
    for times in LOOKAHEAD:
        at_s = times * break_even_s
        survives = survival(at_s)
        cost += (before + survives) / 2 * (at_s - before_s) / break_even_s
        before, before_s = survives, at_s
        yield at_s, 1.0 - survives - cost


def best_stop_s(survival: Callable[[float], float], break_even_s: float) -> float | None:
    """Return when to end a hold, in seconds from now.

    None: at once, because every later time costs more than it gains.
    """
    at_s, gain = max(gains(survival, break_even_s), key=lambda stop: stop[1])
    return at_s if gain > 0 else None


@dataclass(frozen=True, slots=True)
class Stopping:
    """Holds while it pays at the current price.

    Programs that have missed the SLO, and holds of least value, go first.
    """

    min_observations: int
    review_steps: int | None
    worth: float = HOLD_WORTH

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold while it pays."""
        return self._choose(pause, 0.0)

    def review(self, hold: HoldView) -> PauseDecision:
        """Decide again with the current load and the time that the tool has taken already."""
        return Hold(hold.until_s, reason=PauseReason.BACK) if hold.owner_waits else self._choose(hold, elapsed_s(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank (0 missed the SLO or 1 in time, 0 paused or 1 back, value per token and second)."""
        return (0.0 if has_missed_slo(hold) else 1.0, 1.0 if hold.owner_waits else 0.0, self._value_rate(hold))

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """Return whether the hold may be evicted for ``claimant``.

        It always yields to a running turn. It yields to a waiting turn if holding would not pay at full pressure, or if
        the program is back and has missed its SLO, because it then ranks low and may wait for long. A hold that any
        waiting turn may evict would protect nothing.
        """
        if claimant is not Claimant.WAITING:
            return True
        if hold.owner_waits:
            return has_missed_slo(hold)
        if hold.asked:
            return False
        survival = self._survival(hold, elapsed_s(hold))
        return not any(gain > 0 for _, gain in gains(survival, self._break_even_s(hold, 1.0)))

    def _choose(self, view: PauseView | HoldView, elapsed: float) -> PauseDecision:
        scarce = pressure(view.load)
        if scarce <= 0:
            return Hold(view.load.now_s + LONGEST_S, reason=PauseReason.FREE)
        survival = self._survival(view, elapsed)
        stop_s = best_stop_s(survival, self._break_even_s(view, scarce))
        if stop_s is not None:
            return Hold(view.load.now_s + min(stop_s, LONGEST_S), reason=PauseReason.PAYS)
        place, _ = cheapest_below(view)
        if place is Place.COMPUTE:
            return Release(PauseReason.DOES_NOT_PAY)
        return Swap(PauseReason.DOES_NOT_PAY, place)

    def _survival(self, view: PauseView | HoldView, elapsed: float) -> Callable[[float], float]:
        """Return P(the pause lasts t seconds longer) of t: by the children that it waits for, else by its tool.

        A program that may not come back at all has been silent for ``elapsed`` seconds, by Bayes' rule, with more
        probability because it does not.
        """
        if isinstance(view, HoldView) and view.children_s is not None:
            return trees.survival(view.children_s)
        tool = Tool.of(view, self.min_observations)
        lasts = tool.survival(elapsed)
        if view.returns >= 1 or tool.hinted_s is not None:
            return lasts
        silent = view.returns * tool.survival(0.0)(elapsed)
        returns = silent / (silent + 1.0 - view.returns)
        return lambda more_s: 1.0 - returns * (1.0 - lasts(more_s))

    def _break_even_s(self, view: PauseView | HoldView, scarce: float) -> float:
        """Return the seconds after which a hold has cost as much as it can save."""
        _, lost = cheapest_below(view)
        capacity_tokens = view.load.facts.capacity_tokens
        return self.worth * held_for_s(lost, max(1, view.context_tokens), capacity_tokens, scarce)

    def _value_rate(self, hold: HoldView) -> float:
        window_s = self._break_even_s(hold, 1.0)
        if hold.owner_waits:
            return window_s
        return window_s * (1.0 - self._survival(hold, elapsed_s(hold))(window_s))


def elapsed_s(hold: HoldView) -> float:
    """Return the seconds that the tool has taken, by its executor's report if there is one."""
    started_s = hold.program.tool_started_s
    return max(0.0, hold.load.now_s - (hold.since_s if started_s is None else max(started_s, hold.since_s)))


def has_missed_slo(hold: HoldView) -> bool:
    """Return whether the program has missed the SLO: with an ended turn, with the waiting turn, or per token."""
    slo, waited_s = hold.bounds, hold.load.now_s - hold.program.last_event_s if hold.owner_waits else 0.0
    if (slo.ttft_s is not None or slo.slowdown is not None) and not hold.program.on_time:
        return True
    if any(bound_s is not None and waited_s > bound_s for bound_s in (slo.ttft_s, slo.e2e_s)):
        return True
    return not paces(slo.normalized_latency_s, hold.program, hold.forecast, hold.load, waited_s, 0.0)


def cheapest_below(view: PauseView | HoldView) -> tuple[Place, Price]:
    """Return the cheapest place of a context that leaves the device, and its price."""
    context, host_tokens = view.context_tokens, view.load.facts.host_tokens
    places = []
    if 0 < context <= host_tokens:  # what comes from disk passes through the host
        places += [Place.HOST] * view.host_room + [Place.DISK] * view.on_disk
    return view.load.rates(context).cheapest(places, max(1, context))


def _statistics(durations: DurationTable, tool: str, min_observations: int) -> Durations | None:
    levels = list(durations.levels(tool))
    return next((level for level in levels if level.count >= min_observations), levels[-1] if levels else None)


# --- budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PacedBudget:
    """The largest step that spreads prompts well and keeps the bound on the time per output token (TPOT)."""

    min_prefill_tokens: int
    prompt_share: float = PROMPT_SHARE
    prompt_slowdown: float = PROMPT_SLOWDOWN

    def _spread(self, load: LoadView) -> float:
        """Return the tokens of a step beyond which a prompt would only slow the turns that decode beside it.

        It is the saturation point, or the b with which P / b steps take ``prompt_slowdown`` times as long as P tokens
        alone: each has a constant time beside that of its tokens.
        """
        cost = load.facts.cost
        constant_s = cost.overhead_s + cost.weights_s
        return max(cost.saturation_tokens, constant_s / (cost.token_s * (self.prompt_slowdown - 1)))

    def _prompt_bound(self, load: LoadView) -> int:
        """Return the tokens of a step with which the prompts are computed in time: b, with P / b steps of b tokens."""
        ttft_s, tokens = load.facts.slo.ttft_s, load.prefill_tokens + min(load.waiting_tokens, load.free_tokens)
        if ttft_s is None or not tokens:
            return 0
        cost = load.facts.cost
        compute_s = self.prompt_share * ttft_s - tokens * cost.token_s
        if compute_s <= 0:
            return load.facts.max_tokens
        fixed_s = cost.decode_step_s(load.running, load.running_tokens)
        return load.running + round(min(tokens * fixed_s / compute_s, load.facts.max_tokens))

    def tokens(self, load: LoadView) -> int:
        """Return the tokens of every running turn, and as much prefill as the bounds allow.

        It is the maximum if none runs.
        """
        most, bound_s = load.facts.max_tokens, load.facts.slo.tpot_s
        if not load.running:
            return most
        least = load.running + self.min_prefill_tokens
        most = min(most, max(round(self._spread(load)), self._prompt_bound(load), least))
        if bound_s is None:
            return most
        cost, context, sequences = load.facts.cost, load.running_tokens, load.running + 1

        def step_s(tokens: int) -> float:
            # One more prompt beside the decodes: its own pairs only, theirs are in reading their KV.
            return cost.step_s(tokens, context + tokens, sequences, pairs=context + tokens * tokens / 2)

        within = bisect_right(range(1, most + 1), bound_s, key=step_s)
        return min(most, max(within, least))
