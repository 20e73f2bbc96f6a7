"""Triage: which turns can still be good, and which of them first.

Three groups, in this order: lottery winners among the hopeless, the alive, the hopeless; the last two by the work of
all that their programs have left, so that last comes what costs most for one good program. Admission is trunk
reservation: a new program, and more so a hopeless turn, must not fill in a quiet moment the memory that the turns of
the next seconds need. The lottery (in the sense of lottery scheduling) is what keeps the last group from starving:
every EPOCH_S each hopeless turn is drawn with a probability that makes the work of all that are
drawn ``hopeless_share`` of the epoch, in expectation. No counters: the draw is a hash of program, turn and epoch.
"""

from dataclasses import dataclass
from hashlib import blake2b

from cluster.lifecycle import ProgramState
from replicas.policy import Forecast, KvPlace, LoadView, RankKey, TurnView

EPOCH_S = 2.0
"""Seconds for which a draw counts: long enough to be admitted, at the head of the queue, as memory comes free."""

DRAWN, ALIVE, HOPELESS = 0.0, 1.0, 2.0

CROWD = 0.35
"""Turns that wait for each one that runs, from which on the hopeless leave all of their room to others."""

HASTE_CROWD = 0.15
"""Turns that can still be in time and wait, for each one that runs, from which on steps are the largest."""

UNTIERED = 0.8
"""Without a host tier the hopeless leave so much of their room: the longer one waits, the surer its context is lost and
computed again. With a tier it is fetched, and less room costs goodput (0.03 of it at 6 a second on the Merge trace)."""


def overload(load: LoadView) -> float:
    """How far the replica is behind, in [0, 1]: by the turns that wait for each one that runs."""
    return min(1.0, load.waiting / (CROWD * max(1, load.running)))


def haste(load: LoadView) -> float:
    """How many wait that can still be in time, in [0, 1]. The hopeless do not count: they wait whatever is done, and
    steps that are large for their sake make all others slow, which makes more of them hopeless.
    """
    return min(1.0, load.waiting_in_time / (HASTE_CROWD * max(1, load.running)))


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


def is_alive(turn: TurnView) -> bool:
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
    """The alive first, the hopeless after; without an SLO, the least work first, less what it waited."""

    hopeless_share: float
    ageing: float
    refresh_steps: int | None
    newcomers_room: float
    hopeless_room: float

    def key(self, turn: TurnView) -> RankKey:
        """(group, seconds of work)."""
        left_s = turn_work_s(turn) + later_work_s(turn)
        if not bounds(turn.load):
            return (ALIVE, left_s - self.ageing * (turn.load.now_s - turn.arrived_s))
        if is_alive(turn):
            return (ALIVE, left_s)
        return (DRAWN, turn.arrived_s) if self._drawn(turn) else (HOPELESS, left_s)

    def room_share(self, turn: TurnView) -> float:
        """Who is invested in takes what there is; a new program leaves room for them, a hopeless turn for all.

        As far as many wait, since what keeps a few waiting is soon over; and as far as turns are on time at all:
        where nobody could be, room would be left for nobody.
        """
        if not bounds(turn.load):
            return 0.0
        if is_alive(turn):
            return self.newcomers_room if turn.program.turns <= 1 else 0.0
        if self._drawn(turn):
            return 0.0
        room = self.hopeless_room if turn.load.facts.host_tokens else UNTIERED * self.hopeless_room
        return room * turn.load.on_time_share * overload(turn.load)

    def _drawn(self, turn: TurnView) -> bool:
        """Each hopeless turn with probability share · EPOCH_S / (its work · turns that wait)."""
        load = turn.load
        ticket = f"{turn.program.key}\n{turn.program.turns}\n{int(load.now_s / EPOCH_S)}"
        drawn = int.from_bytes(blake2b(ticket.encode("utf-8", "surrogatepass"), digest_size=8).digest()) / 2**64
        return drawn * turn_work_s(turn) * max(1, load.waiting) < self.hopeless_share * EPOCH_S


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
    """Tokens that the turns after this one generate, each as many as this one: no forecast says it."""
    return max(0.0, forecast.later_turns) * max(0.0, forecast.output_tokens)
