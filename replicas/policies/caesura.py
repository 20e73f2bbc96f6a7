"""Caesura's own policy: triage by the SLO, holds by optimal stopping, and steps within a time bound.

Triage decides which turns can still meet the SLO and which of them come first. There are three groups, in this order:
lottery winners among the turns that have missed the SLO, feasible turns, and the other turns that have missed it. The
last two are ordered by the remaining work of the whole program, so that programs that cost most for one met SLO come
last. Admission is trunk reservation: in a quiet moment, a new program must not fill the memory that the turns of the
next seconds need; still less may a turn that has missed the SLO. The lottery (as in lottery scheduling) keeps the last
group from starving. Every EPOCH_S each of its turns wins with a probability for which the expected work of all winners
is ``lottery_share`` of the epoch. There are no counters: the draw is a hash of program, turn and epoch.

Optimal stopping holds a paused program's KV while waiting for its tool is worth the memory. Both sides are GPU seconds.
The value of a hold is the time to compute the context again, or to load it from the host tier. The price per second is
the hold's share of the memory times how scarce memory is (`pressure`), because all memory together is worth all work of
the replica. At full pressure and without a host tier, the break-even time is ``CostModel.refill_s``, the time to fill
the memory again, whatever the context's length. How long the tool may still take follows from its observed durations,
given that it has lasted so long.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.lifecycle.events import PauseReason
from cluster.core.lifecycle.machine import ProgramState
from cluster.core.program import tool_key
from cluster.durations.statistics import Durations
from cluster.durations.table import DurationTable
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

# LOTTERY_SHARE and MISSED_HEADROOM: see docs/adr/0007. The other constants below were chosen, not measured one by one.

LOTTERY_SHARE = 0.01
"""Expected share of the replica's time that turns that have missed the SLO get before all others. They get more where
the others leave time."""
NEWCOMER_HEADROOM = 0.1
"""Share of the memory that a program's first turn leaves to the programs that have begun."""
MISSED_HEADROOM = 0.5
"""Share of the memory that a turn that has missed the SLO leaves to all others, on an overloaded replica."""
HOLD_WORTH = 1.0
"""Value of a lost context, as a multiple of the cost to compute it again."""
STEP_SATURATIONS = 2.0
"""Upper bound on scheduled tokens per step where many feasible turns wait, as a multiple of the saturation point. Where
none waits, the multiple is 1: a prompt is spread over steps that read the weights anyway, and turns that decode beside
it are hardly slowed."""
PROMPT_SHARE = 0.25
"""Share of the TTFT SLO within which the running prompts should be computed. Steps become larger if that is necessary.
"""
PROMPT_SLOWDOWN = 3.0
"""Largest multiple of its time alone that a prompt may take because its steps are small. Where kernels are short and
the time between them is long, as on a CPU, the saturation point is too small: a step costs the same with or without a
few prompt tokens, and a prompt of thousands of tokens would take hundreds of steps."""
EPOCH_S = 2.0
"""Seconds for which a lottery draw is valid. It is long enough to be admitted at the head of the queue when memory is
freed."""

LOTTERY_WINNER, SLO_FEASIBLE, SLO_MISSED = 0.0, 1.0, 2.0

OVERLOADED_AT = 0.35
"""Waiting turns per running turn from which on turns that have missed the SLO leave their whole headroom to others."""

URGENT_AT = 0.15
"""Waiting turns per running turn, only those that can still meet the SLO, from which on steps have their largest size.
"""

NO_TIER_FACTOR = 0.8
"""Factor on the headroom of turns that have missed the SLO, on a replica without a host tier. The longer such a turn
waits, the more probably its context is lost and computed again. With a tier the context is loaded, and less headroom
costs goodput (0.03 of it at 6 programs/s on the Merge trace)."""

LONGEST_S = 3600.0
"""Seconds after which a hold that costs nothing ends. The replica's own limit is usually shorter."""

LOOKAHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Times at which a hold may be ended, from now, as multiples of the break-even time."""

HINT_SLACK = 1.25
"""Multiple of the client's hint on a pause up to which the hint is trusted."""


class CaesuraParameters(BaseModel):
    """Parameters of the policy `caesura`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    ageing: float = Field(0.05, ge=0)
    """Seconds of remaining work that one second of waiting outweighs, where no SLO is set."""
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
        """Build the policy."""
        order = Triage(self.ageing, self.refresh_steps)
        pause = Stopping(self.min_observations, self.review_steps)
        budget = PacedBudget(self.min_prefill_tokens)
        return Policy("caesura", order, pause, budget, self.reserve_share, order, (SLO_MISSED,))


# --- order and admission ----------------------------------------------------------------------------------------------


def overload(load: LoadView) -> float:
    """Return how far the replica is behind, in [0, 1], by the number of waiting turns per running turn."""
    return min(1.0, load.waiting / (OVERLOADED_AT * max(1, load.running)))


def urgency(load: LoadView) -> float:
    """Return how many turns wait that can still meet the SLO, in [0, 1], relative to the running turns.

    Turns that have missed their SLO do not count. They wait in any case, and steps that are larger for them slow down
    all others, so that more of them miss it.
    """
    return min(1.0, load.waiting_in_time / (URGENT_AT * max(1, load.running)))


def token_s(load: LoadView) -> float:
    """Return the seconds of a decode iteration with one more turn than run now, which a turn waits for each token."""
    return load.joined_iteration_s


def decode_work_s(load: LoadView, context_tokens: float) -> float:
    """Return one turn's seconds of a decode iteration: its share of the common cost, and the reading of its own KV."""
    cost, turns = load.facts.cost, load.running + 1
    return cost.decode_step_s(turns) / turns + context_tokens * cost.context_s


def turn_work_s(turn: TurnView) -> float:
    """Return the expected GPU seconds of a turn: its prefill, and its share of its decode iterations."""
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
    return _prefill_s(turn) + output * decode_work_s(turn.load, turn.tokens + output / 2)


def later_work_s(turn: TurnView) -> float:
    """Return the expected GPU seconds of the turns after this one, if no KV is lost."""
    forecast, load = turn.forecast, turn.load
    later = max(0.0, forecast.later_tokens)
    outputs = min(_later_outputs(forecast), later)
    context = turn.tokens + max(0.0, forecast.output_tokens) + later / 2
    return (later - outputs) * load.facts.cost.token_s + outputs * decode_work_s(load, context)


def is_feasible(turn: TurnView) -> bool:
    """Return whether the turn and its program can still meet every bound, if the turn is admitted now."""
    load, slo = turn.load, turn.load.facts.slo
    # The others decode beside its prefill, and the current step has to end before it.
    to_first_s = load.now_s - turn.arrived_s + _prefill_s(turn) + 2 * token_s(load)
    if slo.ttft_s is not None:
        ttft_s = to_first_s if turn.first_token_s is None else turn.first_token_s - turn.arrived_s
        if not turn.program.on_time or ttft_s > slo.ttft_s:
            return False
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
    turn_s = to_first_s + output * token_s(load)
    if slo.e2e_s is not None and turn_s > slo.e2e_s:
        return False
    generated = turn.generated_tokens + output
    return slo.normalized_latency_s is None or paces(turn.program, turn.forecast, load, turn_s, generated)


def paces(program: ProgramState, forecast: Forecast, load: LoadView, turn_s: float, output: float) -> bool:
    """Return whether the program's time per generated token can still be within the bound.

    Args:
        program: the program, with the time and the tokens of its ended turns.
        forecast: the forecast of the current turn, or of the one that has just ended.
        load: the replica's load now.
        turn_s: seconds that the current turn will have taken. 0 if there is none.
        output: tokens that the current turn will have generated.
    """
    bound_s = load.facts.slo.normalized_latency_s
    if bound_s is None:
        return True
    later = _later_outputs(forecast)
    returned = round(max(0.0, forecast.returned_tokens))
    later_s = later * token_s(load) + max(0.0, forecast.later_turns) * load.facts.cost.token_s * returned
    return program.busy_s + turn_s + later_s <= bound_s * (program.generated_tokens + output + later)


@dataclass(frozen=True, slots=True)
class Triage:
    """Orders feasible turns first, then those that have missed the SLO.

    Without an SLO the turn with the least work comes first, where waiting time reduces the work.
    """

    ageing: float
    refresh_steps: int | None
    lottery_share: float = LOTTERY_SHARE
    newcomer_headroom: float = NEWCOMER_HEADROOM
    missed_headroom: float = MISSED_HEADROOM

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank (group, seconds of work)."""
        left_s = turn_work_s(turn) + later_work_s(turn)
        if not bounds(turn.load):
            return (SLO_FEASIBLE, left_s - self.ageing * (turn.load.now_s - turn.arrived_s))
        if is_feasible(turn):
            return (SLO_FEASIBLE, left_s)
        return (LOTTERY_WINNER, turn.arrived_s) if self._wins_lottery(turn) else (SLO_MISSED, left_s)

    def room_share(self, turn: TurnView) -> float:
        """Return the share of the memory that the turn leaves to others.

        It is 0 for a program that has begun. A new program leaves room for those that have begun, and a turn that has
        missed the SLO leaves room for all others. Its room is larger the more turns wait, because a short queue empties
        soon. It is also proportional to the share of turns on time: where no turn is on time, the room would help none.
        """
        if not bounds(turn.load):
            return 0.0
        if is_feasible(turn):
            return self.newcomer_headroom if turn.program.turns <= 1 else 0.0
        if self._wins_lottery(turn):
            return 0.0
        room = self.missed_headroom if turn.load.facts.host_tokens else NO_TIER_FACTOR * self.missed_headroom
        return room * turn.load.on_time_share * overload(turn.load)

    def _wins_lottery(self, turn: TurnView) -> bool:
        """Return whether a turn wins, with probability share · EPOCH_S / (its work · waiting turns)."""
        load = turn.load
        ticket = f"{turn.program.key}\n{turn.program.turns}\n{int(load.now_s / EPOCH_S)}"
        draw = int.from_bytes(blake2b(ticket.encode("utf-8", "surrogatepass"), digest_size=8).digest()) / 2**64
        return draw * turn_work_s(turn) * max(1, load.waiting) < self.lottery_share * EPOCH_S


def bounds(load: LoadView) -> bool:
    """Return whether there is an SLO that waiting can violate."""
    slo = load.facts.slo
    return not (slo.ttft_s is None and slo.e2e_s is None and slo.normalized_latency_s is None)


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
        """Hold for as long as the client requests (``retention_s``), else while it pays."""
        if pause.hints.retention_s is not None:
            return Hold(pause.now_s + max(0.0, pause.hints.retention_s), reason=PauseReason.RETENTION)
        return self._choose(pause, 0.0)

    def review(self, hold: HoldView) -> PauseDecision:
        """Decide again with the current load and the time that the tool has taken already."""
        return Hold(hold.until_s, reason=PauseReason.BACK) if hold.owner_waits else self._choose(hold, elapsed_s(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank (0 missed the SLO or 1 feasible, 0 paused or 1 back, value per token and second)."""
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
        survival = Tool.of(hold, self.min_observations).survival(elapsed_s(hold))
        return not any(gain > 0 for _, gain in gains(survival, self._break_even_s(hold, 1.0)))

    def _choose(self, view: PauseView | HoldView, elapsed: float) -> PauseDecision:
        scarce = pressure(view.load)
        if scarce <= 0:
            return Hold(view.load.now_s + LONGEST_S, reason=PauseReason.FREE)
        survival = Tool.of(view, self.min_observations).survival(elapsed)
        stop_s = best_stop_s(survival, self._break_even_s(view, scarce))
        if stop_s is not None:
            return Hold(view.load.now_s + min(stop_s, LONGEST_S), reason=PauseReason.PAYS)
        return Swap(PauseReason.DOES_NOT_PAY) if _swaps(view) else Release(PauseReason.DOES_NOT_PAY)

    def _break_even_s(self, view: PauseView | HoldView, scarce: float) -> float:
        """Return the seconds after which a hold has cost as much as it can save."""
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
    """Return the seconds that the tool has taken, by its executor's report if there is one."""
    started_s = hold.program.tool_started_s
    return max(0.0, hold.load.now_s - (hold.since_s if started_s is None else max(started_s, hold.since_s)))


def has_missed_slo(hold: HoldView) -> bool:
    """Return whether the program has missed the SLO: with an ended turn, with the waiting turn, or per token."""
    slo, waited_s = hold.load.facts.slo, hold.load.now_s - hold.program.last_event_s if hold.owner_waits else 0.0
    if slo.ttft_s is not None and (not hold.program.on_time or waited_s > slo.ttft_s):
        return True
    return not paces(hold.program, hold.forecast, hold.load, waited_s, 0.0)


def _swaps(view: PauseView | HoldView) -> bool:
    """Return whether the context fits the host tier and loads faster from there than it is computed."""
    facts, context = view.load.facts, view.context_tokens
    return 0 < context <= facts.host_tokens and facts.cost.swap_s(context) < facts.cost.prefill_s(context)


def _statistics(durations: DurationTable, tool: str, min_observations: int) -> Durations | None:
    levels = list(durations.levels(tool))
    return next((level for level in levels if level.count >= min_observations), levels[-1] if levels else None)


# --- budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PacedBudget:
    """The largest step that spreads prompts well and keeps the bound on the time per output token (TPOT)."""

    min_prefill_tokens: int
    step_saturations: float = STEP_SATURATIONS
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
        """Return the tokens of a step with which the running prompts are computed in time: b, with P / b steps of b
        tokens.
        """
        ttft_s, tokens = load.facts.slo.ttft_s, load.prefill_tokens
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
        saturations = 1.0 + (self.step_saturations - 1.0) * urgency(load)
        spread = round(saturations * self._spread(load))
        most = min(most, max(spread, self._prompt_bound(load), load.running + self.min_prefill_tokens))
        if bound_s is None:
            return most
        cost, context, sequences = load.facts.cost, load.running_tokens, load.running + 1

        def step_s(tokens: int) -> float:
            # One more prompt beside the decodes: its own pairs only, theirs are in reading their KV.
            return cost.step_s(tokens, context + tokens, sequences, pairs=context + tokens * tokens / 2)

        within = bisect_right(range(1, most + 1), bound_s, key=step_s)
        return min(most, max(within, load.running + self.min_prefill_tokens))
