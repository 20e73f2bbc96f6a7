"""Caesura's own policy: triage by the SLO, holds by optimal stopping, steps that keep the pace.

Triage: which turns can still be good, and which of them first. Three groups, in this order: lottery winners among the
turns that have missed the SLO, the feasible, the others that have missed it; the last two by the work of all that their
programs have left, so that last comes what costs most for one good program. Admission is trunk reservation: a new
program, and more so a turn that has missed the SLO, must not fill in a quiet moment the memory that the turns of the
next seconds need. The lottery (in the sense of lottery scheduling) keeps the last group from starving: every EPOCH_S
each of its turns wins with a probability that makes the work of all winners ``lottery_share`` of the epoch, in
expectation. No counters: the draw is a hash of program, turn and epoch.

Optimal stopping: a paused program's KV is held for as long as waiting for its tool is worth the memory. Both sides are
GPU seconds. Value: computing the context again, or fetching it from the host tier. Price, per second: the share of the
memory that it takes, times how scarce memory is, since all memory together is worth all that the replica can do. At
full pressure the break-even time without a host tier is therefore that in which the memory could be filled anew,
``CostModel.refill_s``, whatever the context's length. How long the tool may still take is what was observed of it,
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
"""Part of the replica's time, in expectation, that goes to turns that have missed the SLO, before all others. They get
more wherever the others leave any."""
NEWCOMER_HEADROOM = 0.1
"""Part of the memory that a program's first turn leaves to the programs that have begun."""
MISSED_HEADROOM = 0.5
"""Part of the memory that a turn that has missed the SLO leaves to all others, on an overloaded replica."""
HOLD_WORTH = 1.0
"""What losing a context costs, in times of computing it again."""
STEP_SATURATIONS = 2.0
"""The largest step where many feasible turns wait, in times of the tokens for which reading the weights takes as long
as computing. Where none waits it is once as many: a prompt is spread over steps that read the weights anyway, and the
turns that decode beside it hardly notice."""
PROMPT_SHARE = 0.25
"""Part of the bound on the time to the first token within which the prompts under way are to be computed; steps are
larger where that takes it."""
EPOCH_S = 2.0
"""Seconds for which a draw counts: long enough to be admitted, at the head of the queue, as memory comes free."""

LOTTERY_WINNER, SLO_FEASIBLE, SLO_MISSED = 0.0, 1.0, 2.0

OVERLOADED_AT = 0.35
"""Turns that wait for each one that runs, from which on turns past their SLO leave their whole headroom to others."""

URGENT_AT = 0.15
"""Turns that can still be in time and wait, for each one that runs, from which on steps are the largest."""

NO_TIER_FACTOR = 0.8
"""Without a host tier turns past their SLO leave so much of their headroom: the longer one waits, the surer its context
is lost and computed again. With a tier it is fetched, and less headroom costs goodput (0.03 of it at 6 a second on the
Merge trace)."""

LONGEST_S = 3600.0
"""A hold that costs nothing ends after this time; the replica's own limit is usually less."""

LOOKAHEAD = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Times at which a hold may be ended, in break-even times from now."""

HINT_SLACK = 1.25
"""A client's word on a pause is trusted up to so many times its length."""


class CaesuraParameters(BaseModel):
    """Parameters of the policy `caesura`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    ageing: float = Field(0.05, ge=0)
    """Without an SLO: seconds of work that a second of waiting makes up for."""
    refresh_steps: int = Field(8, ge=1)
    """Ranks are taken again every so many steps: waiting turns miss the SLO."""
    review_steps: int = Field(8, ge=1)
    """Holds are looked at again every so many steps."""
    min_observations: int = Field(3, ge=1)
    """A tool's own durations count from so many observations on; before, all tools' together."""
    reserve_share: float = Field(0.0, ge=0, lt=1)
    """Part of the memory that admissions leave to the growth of running turns."""
    min_prefill_tokens: int = Field(64, ge=1)
    """However slow the steps, so many tokens of prompts may be computed in each."""

    def build(self) -> Policy:
        """The policy."""
        order = Triage(self.ageing, self.refresh_steps)
        pause = Stopping(self.min_observations, self.review_steps)
        budget = PacedBudget(self.min_prefill_tokens)
        return Policy("caesura", order, pause, budget, self.reserve_share, order, (SLO_MISSED,))


# --- order and admission ----------------------------------------------------------------------------------------------


def overload(load: LoadView) -> float:
    """How far the replica is behind, in [0, 1]: by the turns that wait for each one that runs."""
    return min(1.0, load.waiting / (OVERLOADED_AT * max(1, load.running)))


def urgency(load: LoadView) -> float:
    """How many wait that can still be in time, in [0, 1]. Turns past their SLO do not count: they wait in any case, and
    steps that are large for their sake make all others slow, so that more of them miss it.
    """
    return min(1.0, load.waiting_in_time / (URGENT_AT * max(1, load.running)))


def token_s(load: LoadView) -> float:
    """Seconds of a decode iteration with one more turn than run now: what a turn waits for each of its tokens."""
    return load.joined_iteration_s


def decode_work_s(load: LoadView, context_tokens: float) -> float:
    """One turn's part of a decode iteration: its share of what all have in common, and the reading of its own KV."""
    cost, turns = load.facts.cost, load.running + 1
    return cost.decode_step_s(turns) / turns + context_tokens * cost.context_s


def turn_work_s(turn: TurnView) -> float:
    """Expected GPU seconds of a turn: the prefill of what is missing, and its part of the iterations after it."""
    output = max(0.0, turn.forecast.output_tokens - turn.generated_tokens)
    return _prefill_s(turn) + output * decode_work_s(turn.load, turn.tokens + output / 2)


def later_work_s(turn: TurnView) -> float:
    """Expected GPU seconds of the turns after this one, if no KV is lost."""
    forecast, load = turn.forecast, turn.load
    later = max(0.0, forecast.later_tokens)
    outputs = min(_later_outputs(forecast), later)
    context = turn.tokens + max(0.0, forecast.output_tokens) + later / 2
    return (later - outputs) * load.facts.cost.token_s + outputs * decode_work_s(load, context)


def is_feasible(turn: TurnView) -> bool:
    """Can the turn and its program still meet every bound, if it is admitted now and all goes as expected?"""
    load, slo = turn.load, turn.load.facts.slo
    # The others decode beside its prefill, and the step under way has to end before it.
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
    """Can the program's time for each of its tokens still be within the bound?

    Args:
        program: with what its ended turns took and generated.
        forecast: of the turn under way, or the one that has just ended.
        load: the replica now.
        turn_s: seconds that the turn under way will have taken; 0 where none is.
        output: tokens that it will have generated.
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
    """Feasible turns first, then those past their SLO; without an SLO, the least work first, less what it waited."""

    ageing: float
    refresh_steps: int | None
    lottery_share: float = LOTTERY_SHARE
    newcomer_headroom: float = NEWCOMER_HEADROOM
    missed_headroom: float = MISSED_HEADROOM

    def key(self, turn: TurnView) -> RankKey:
        """(group, seconds of work)."""
        left_s = turn_work_s(turn) + later_work_s(turn)
        if not bounds(turn.load):
            return (SLO_FEASIBLE, left_s - self.ageing * (turn.load.now_s - turn.arrived_s))
        if is_feasible(turn):
            return (SLO_FEASIBLE, left_s)
        return (LOTTERY_WINNER, turn.arrived_s) if self._wins_lottery(turn) else (SLO_MISSED, left_s)

    def room_share(self, turn: TurnView) -> float:
        """A program that has begun takes what there is; a new one leaves room for them, a turn past its SLO for all.

        As far as many wait, since what keeps a few waiting is soon over; and as far as turns are on time at all:
        where none could be, the room would help no turn.
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
        """Each turn past its SLO with probability share · EPOCH_S / (its work · turns that wait)."""
        load = turn.load
        ticket = f"{turn.program.key}\n{turn.program.turns}\n{int(load.now_s / EPOCH_S)}"
        draw = int.from_bytes(blake2b(ticket.encode("utf-8", "surrogatepass"), digest_size=8).digest()) / 2**64
        return draw * turn_work_s(turn) * max(1, load.waiting) < self.lottery_share * EPOCH_S


def bounds(load: LoadView) -> bool:
    """Is there an SLO that waiting can break?"""
    slo = load.facts.slo
    return not (slo.ttft_s is None and slo.e2e_s is None and slo.normalized_latency_s is None)


def _prefill_s(turn: TurnView) -> float:
    """Seconds until all of the prompt's KV is there: what is swapped is fetched, what is missing computed."""
    cost, cached = turn.load.facts.cost, min(turn.cached_tokens, turn.tokens)
    fetched_s = cost.swap_s(cached) if turn.kv is KvPlace.SWAPPED else 0.0
    return fetched_s + cost.prefill_s(turn.tokens - cached, cached, turn.load.facts.max_tokens)


def _later_outputs(forecast: Forecast) -> float:
    """Tokens that the turns after this one generate, each as many as this one: no forecast has it."""
    return max(0.0, forecast.later_turns) * max(0.0, forecast.output_tokens)


# --- holds ------------------------------------------------------------------------------------------------------------


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
    hinted_s: float | None
    """The client's word on this very pause."""
    expected_s: float

    @classmethod
    def of(cls, view: PauseView | HoldView, min_observations: int) -> "Tool":
        """Its own durations with such arguments once they were seen ``min_observations`` times, else those of the
        tool, else of all tools.
        """
        hinted_s = max(0.0, view.forecast.pause_s) if view.forecast.pause_hinted else None
        tools = view.tools if isinstance(view, PauseView) else view.program.tools
        statistics = _statistics(view.durations, tool_key(tools), min_observations)
        return cls(statistics, hinted_s, max(1e-3, view.forecast.pause_s))

    def survival(self, elapsed_s: float) -> Callable[[float], float]:
        """P(lasts t seconds longer | lasted ``elapsed_s``), of t.

        Past all that was observed, or where nothing was, the tool is taken to last as long again as it did or as
        expected, in the mean.
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
    """Hold while it pays at the present price; programs past their SLO and what is least worth its memory go first."""

    min_observations: int
    review_steps: int | None
    worth: float = HOLD_WORTH

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold for as long as the client asks (``retention_s``), else while it pays."""
        if pause.hints.retention_s is not None:
            return Hold(pause.now_s + max(0.0, pause.hints.retention_s), reason=PauseReason.RETENTION)
        return self._choose(pause, 0.0)

    def review(self, hold: HoldView) -> PauseDecision:
        """With the load of now, and what the tool has taken already."""
        return Hold(hold.until_s, reason=PauseReason.BACK) if hold.owner_waits else self._choose(hold, elapsed_s(hold))

    def victim_key(self, hold: HoldView) -> RankKey:
        """(0 past the SLO or 1 feasible, 0 paused or 1 back, value for each token and second)."""
        return (0.0 if has_missed_slo(hold) else 1.0, 1.0 if hold.owner_waits else 0.0, self._value_rate(hold))

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """To a running turn always; to a waiting one if holding would not pay at full pressure, or if the program is
        back itself and past its SLO: then it ranks low and may wait for long. Whatever any waiting turn may break
        protects nothing.
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


def has_missed_slo(hold: HoldView) -> bool:
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


# --- budget -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PacedBudget:
    """The largest step that spreads prompts well and whose time is within the bound on the time per output token."""

    min_prefill_tokens: int
    step_saturations: float = STEP_SATURATIONS
    prompt_share: float = PROMPT_SHARE

    def _prompt_bound(self, load: LoadView) -> int:
        """Tokens of a step with which the prompts under way are computed in time: b with P / b steps of b tokens."""
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
        """Every running turn's next token, and as much prefill as the bounds let in; all where nothing runs."""
        most, bound_s = load.facts.max_tokens, load.facts.slo.tpot_s
        if not load.running:
            return most
        saturations = 1.0 + (self.step_saturations - 1.0) * urgency(load)
        spread = round(saturations * load.facts.cost.saturation_tokens)
        most = min(most, max(spread, self._prompt_bound(load), load.running + self.min_prefill_tokens))
        if bound_s is None:
            return most
        cost, context, sequences = load.facts.cost, load.running_tokens, load.running + 1

        def step_s(tokens: int) -> float:
            # One more prompt beside the decodes: its own pairs only, theirs are in reading their KV.
            return cost.step_s(tokens, context + tokens, sequences, pairs=context + tokens * tokens / 2)

        within = bisect_right(range(1, most + 1), bound_s, key=step_s)
        return min(most, max(within, load.running + self.min_prefill_tokens))
