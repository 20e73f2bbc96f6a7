"""What a turn is placed by: the work expected of its program, and each replica's load as of now. Pure.

`Arrival` is the turn, `Candidate` a replica that might take it, and `Gap` what of the turn's prompt is missing there.
They are frozen; scorers and filters see nothing else. Lengths are in tokens, times in seconds.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from statistics import median
from typing import NamedTuple

from cluster.core.kv_price import KvRates, Place
from cluster.core.program import Hints, Prediction
from cluster.core.replica_snapshot import PREFIX_BLOCK_TOKENS, TAKES_ALL_S, ReplicaSnapshot, StepCosts, program_work_s

# --- a replica's load -------------------------------------------------------------------------------------------------

MAX_LOAD_TOKENS = 1e12
MAX_COUNT = 1e7
MAX_SECONDS = 1e6
DEFAULT_COSTS = StepCosts(2e-3, 1e-5, 6e-3, 3e-5, 5e-8, 3e-6)
"""Roughly an 8B model on a large GPU, for replicas that have published nothing: only the ratios matter."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The numbers of a `ReplicaSnapshot`, each finite and not negative."""

    overhead_s: float = DEFAULT_COSTS.overhead_s
    sequence_s: float = DEFAULT_COSTS.sequence_s
    weights_s: float = DEFAULT_COSTS.weights_s
    token_s: float = DEFAULT_COSTS.token_s
    context_s: float = DEFAULT_COSTS.context_s
    swap_token_s: float = DEFAULT_COSTS.swap_token_s
    disk_token_s: float = 0.0
    kv_tokens: float = 100_000.0
    free_tokens: float = 100_000.0
    host_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    running_tokens: float = 0.0
    waiting_tokens: float = 0.0
    output_tokens: float = 0.0
    programs: float = 0.0
    working_set_tokens: float = 0.0
    working_set_programs: float = 0.0
    active_tokens: float = 0.0
    active_programs: float = 0.0
    turn_output_tokens: float = 0.0
    turn_new_tokens: float = 0.0
    program_turns: float = 0.0
    pause_s: float = 0.0
    shed_from_s: float = TAKES_ALL_S
    shed_sheddable_from_s: float = TAKES_ALL_S
    shed_retry_after_s: float = 0.0
    max_sequences: float = 256.0
    step_time_ratio: float = 1.0
    resume_tokens: tuple[tuple[float, float], ...] = ()

    @property
    def costs(self) -> StepCosts:
        """The cost model of its steps."""
        return StepCosts(
            self.overhead_s, self.sequence_s, self.weights_s, self.token_s, self.context_s, self.swap_token_s
        )

    @property
    def rates(self) -> KvRates:
        """Seconds of one token, by which the places of a context are compared."""
        return KvRates(self.token_s, self.swap_token_s, self.disk_token_s or inf)

    @classmethod
    def of(cls, snapshot: ReplicaSnapshot) -> "ReplicaLoad":
        """The snapshot's numbers, clamped to the range that makes sense."""
        costs = {name: _sound(getattr(snapshot.costs, name), MAX_SECONDS) for name in _COSTS}
        numbers = {name: _sound(getattr(snapshot, name), _most(name)) for name in _COUNTS}
        resumes = tuple(
            (_sound(within_s, MAX_SECONDS), _sound(tokens, MAX_LOAD_TOKENS))
            for within_s, tokens in snapshot.resume_tokens
        )
        return cls(**costs, **numbers, resume_tokens=resumes)

    @classmethod
    def median(cls, loads: Sequence["ReplicaLoad"]) -> "ReplicaLoad":
        """The median of each number; the defaults where there are no replicas."""
        if not loads:
            return cls()
        return cls(**{name: median(getattr(one, name) for one in loads) for name in (*_COSTS, *_COUNTS)})


_COSTS = StepCosts.__struct_fields__
_COUNTS = tuple(field.name for field in fields(ReplicaLoad) if field.name not in (*_COSTS, "resume_tokens"))


def _most(name: str) -> float:
    if name.endswith("_s"):
        return MAX_SECONDS
    return MAX_LOAD_TOKENS if name.endswith("_tokens") else MAX_COUNT


def _sound(value: float, most: float) -> float:
    if not value > 0:  # not a number, too
        return 0.0
    return float(value) if value < most else most


# --- the work expected of a program -----------------------------------------------------------------------------------

RESIDUAL_SHARE = 0.5
"""At least this part of the mean number of turns is ahead of every program, since program lengths are heavy-tailed."""
TYPICAL_PAUSE = 0.25
"""A typical pause, as a part of the mean one, since pauses are heavy-tailed: recorded coding sessions have a mean of
160 s and a median of 10 s."""
MAX_EXPECTED_TURNS = 1e4
MAX_EXPECTED_TOKENS = 1e8


@dataclass(frozen=True, slots=True)
class WorkloadEstimate:
    """The mean turn and the mean program of all replicas together."""

    output_tokens: float = 128.0
    new_tokens: float = 256.0
    program_turns: float = 4.0
    pause_s: float = 1.0

    @classmethod
    def of(cls, loads: Sequence[ReplicaLoad]) -> "WorkloadEstimate":
        """The means, weighted by the programs of each replica; defaults for what no replica has seen yet."""
        default = cls()
        return cls(
            output_tokens=_mean([(one.turn_output_tokens, one.programs) for one in loads], default.output_tokens),
            new_tokens=_mean([(one.turn_new_tokens, one.programs) for one in loads], default.new_tokens),
            program_turns=max(1.0, _mean([(one.program_turns, one.programs) for one in loads], default.program_turns)),
            pause_s=_mean([(one.pause_s, one.programs) for one in loads], default.pause_s),
        )


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """What is ahead of a program."""

    prompt_tokens: int
    output_tokens: float
    """Of the present turn."""
    later_turns: float
    later_outputs: float
    """Generated by all later turns together."""
    context_tokens: float
    """Mean length of its KV over what is ahead of it."""
    new_tokens: float
    """New prompt tokens of each later turn."""
    pause_s: float
    """A typical pause."""

    @property
    def outputs(self) -> float:
        """All tokens that it will generate."""
        return self.output_tokens + self.later_outputs


NO_WORK = ExpectedWork(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""For a program of which only the home is known."""


def expected_work(
    workload: WorkloadEstimate,
    hints: Hints,
    prompt_tokens: int,
    turns: int,
    final: bool,
    *,
    predicted: Prediction | None = None,
) -> ExpectedWork:
    """What is ahead of a program, by the hints, then the prediction, then the means of the replicas.

    Args:
        workload: the means.
        hints: of this turn.
        prompt_tokens: of this turn.
        turns: turns that the program has had before.
        final: no turn comes after this one.
        predicted: the prediction, if there is one.
    """
    prompt = min(max(0, prompt_tokens), int(MAX_EXPECTED_TOKENS))
    usual_output = workload.output_tokens if predicted is None else predicted.output_tokens
    output = _hinted(hints.expected_output_tokens, usual_output, MAX_EXPECTED_TOKENS)
    if final:
        return ExpectedWork(prompt, output, 0.0, 0.0, prompt + output / 2, 0.0, 0.0)
    hinted_turns, hinted_tokens = hints.expected_later_turns, hints.expected_later_tokens
    ahead: tuple[float | None, float | None] = (hinted_turns, hinted_tokens)
    if predicted is not None and hinted_turns is None and hinted_tokens is None:
        # A client's number of turns is never combined with the predictor's number of tokens.
        ahead = (predicted.later_turns, predicted.later_tokens)
    usual = max(workload.program_turns - 1 - turns, RESIDUAL_SHARE * (workload.program_turns - 1))
    later = _hinted(ahead[0], usual, MAX_EXPECTED_TURNS)
    usual_new = workload.new_tokens if predicted is None else predicted.returned_tokens
    new = _hinted(hints.expected_returned_tokens, usual_new, MAX_EXPECTED_TOKENS)
    tokens = _hinted(ahead[1], later * (output + new), MAX_EXPECTED_TOKENS)
    if ahead[0] is None and ahead[1] is not None:
        later = tokens / max(1.0, output + new)
    usual_pause_s = TYPICAL_PAUSE * workload.pause_s if predicted is None else predicted.pause_p50_s
    return ExpectedWork(
        prompt_tokens=prompt,
        output_tokens=output,
        later_turns=later,
        later_outputs=min(tokens, later * output),
        context_tokens=prompt + (output + tokens) / 2,
        new_tokens=max(0.0, tokens - later * output) / later if later else 0.0,
        pause_s=_hinted(hints.expected_pause_s, usual_pause_s, 1e6),
    )


def _hinted(hint: float | None, otherwise: float, most: float) -> float:
    return min(max(0.0, float(hint)), most) if hint is not None and hint == hint else otherwise


def _mean(weighted: Sequence[tuple[float, float]], default: float) -> float:
    known = [(value, 1.0 + weight) for value, weight in weighted if value > 0]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else default


# --- a turn and a replica ---------------------------------------------------------------------------------------------

NO_NAMES: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn that is to be placed."""

    key: str
    name: int
    """The program's name in snapshots (`cluster.core.replica_snapshot.program_name`)."""
    tenant: str
    prefix: tuple[int, ...]
    expected: ExpectedWork
    avoid: frozenset[str] = frozenset()
    home: str | None = None
    """The replica that its program is bound to, if it is."""
    home_tokens: int = 0
    """KV that its program had there at the end of its last turn."""
    just_ended: bool = False
    """The last turn ended after the replica's newest snapshot."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as of now: its snapshot, and what was sent there since."""

    replica: str
    model: str | None
    """None: it has published nothing."""
    draining: bool
    suspect: bool
    """It has failed a turn recently."""
    load: ReplicaLoad
    turns: float
    """Turns that run, wait, or are on their way."""
    backlog_tokens: float
    """Prompt tokens to be computed before those of another turn."""
    start_s: float
    """Time until the backlog is computed, including prompts of programs that resume meanwhile."""
    residual_s: float
    """Mean time until a running turn ends."""
    step_s: float
    """Time of an iteration now."""
    programs: float
    active: float
    """Programs that run, wait, or resume within seconds."""
    active_step_s: float
    """Time of an iteration with all active programs."""
    refill_s: float
    """Programs that pause for longer are not worth their memory."""
    occupied_tokens: float
    """Expected KV of the programs that are bound to the replica."""
    late_tokens: float
    """The part that is growth of programs that pause for longer than `refill_s`. Admission need not wait for it."""
    bound_tokens: float
    """Limit of `occupied_tokens` for admissions."""
    residents: frozenset[int] = NO_NAMES
    on_device: frozenset[int] = NO_NAMES
    on_host: frozenset[int] = NO_NAMES
    on_volume: Container[int] = NO_NAMES
    """Programs whose KV is on the volume that the replica reads, whichever replica has written it."""
    prefixes: Container[int] = NO_NAMES
    """Prefix blocks that the replica has published as cached."""
    sent_prefixes: Container[int] = field(default=NO_NAMES)
    """Prefix blocks that were sent there."""

    def shared_blocks(self, prefix: tuple[int, ...], guess: int = 0) -> int:
        """Leading blocks of a prompt that are likely cached here.

        Names are chained, and the cached part of a prompt is its beginning, so bisection finds its length. ``guess``,
        the length on another replica, often is the answer at once.
        """
        published, sent = self.prefixes, self.sent_prefixes
        if not prefix or (prefix[0] not in published and prefix[0] not in sent):
            return 0
        there, missing = 1, len(prefix) + 1
        middle = min(guess, len(prefix)) if guess > 1 else (there + missing) // 2
        while missing - there > 1:
            if prefix[middle - 1] in published or prefix[middle - 1] in sent:
                there = middle
                middle = middle + 1 if middle == guess else (there + missing) // 2
            else:
                missing = middle
                middle = (there + missing) // 2
        return there

    def needs(self, expected: ExpectedWork) -> float:
        """KV of such a program in the working set here: all of it if its pauses are short, else in proportion to its
        active time.
        """
        if expected.pause_s <= self.refill_s:
            return expected.context_tokens
        turn_s = expected.new_tokens * self.load.token_s + expected.output_tokens * self.step_s
        return expected.context_tokens * (turn_s + self.refill_s) / (turn_s + expected.pause_s)

    def work_s(self, expected: ExpectedWork) -> float:
        """Seconds of this replica that such a program takes. Reading the weights is not counted: batches share it."""
        computed = expected.prompt_tokens + expected.later_turns * expected.new_tokens
        return program_work_s(self.load, computed, expected.outputs, expected.context_tokens)

    def sheds(self, expected: ExpectedWork, *, sheddable: bool = False) -> bool:
        """Whether the replica refuses such a new program, because turns that it has admitted wait for long."""
        from_s = self.load.shed_sheddable_from_s if sheddable else self.load.shed_from_s
        return from_s < TAKES_ALL_S and self.work_s(expected) >= from_s

    def has_room(self, expected: ExpectedWork, empty_share: float) -> bool:
        """Whether such a program may be admitted. One larger than the bound may be, where little else is."""
        needed = self.needs(expected)
        taken = self.occupied_tokens - self.late_tokens
        if taken + needed <= self.bound_tokens:
            return True
        return needed > (1 - empty_share) * self.bound_tokens and taken <= empty_share * self.bound_tokens


class Gap(NamedTuple):
    """The part of a turn's prompt that is not in a replica's device memory."""

    compute_tokens: float
    fetch_tokens: float
    """To be fetched from its host tier."""
    shared_blocks: int = 0
    """Leading blocks of the prompt that are cached there; 0 where the program's own KV counts."""
    read_tokens: float = 0.0
    """To be read from the volume of its disk tier."""

    def seconds(self, load: ReplicaLoad) -> float:
        """Time to compute, fetch and read it."""
        rates = load.rates
        parts = ((Place.COMPUTE, self.compute_tokens), (Place.HOST, self.fetch_tokens), (Place.DISK, self.read_tokens))
        return sum(rates.price(place, tokens).seconds for place, tokens in parts)


def gap(turn: Arrival, candidate: Candidate, guess: int = 0) -> Gap:
    """The missing part. At home the program's own KV counts. Elsewhere, the prefixes that prompts share count, or the
    program's KV on a common volume, whichever takes less time.

    ``guess``: the shared blocks on another replica.
    """
    prompt = turn.expected.prompt_tokens
    if turn.home == candidate.replica:
        known = min(turn.home_tokens, prompt)
        if turn.just_ended or turn.name in candidate.on_device:
            return Gap(prompt - known, 0.0)
        if turn.name in candidate.on_host:
            return Gap(prompt - known, known)
    elif turn.home is None and turn.name in candidate.residents:  # another ingress placed it
        known = round(max(0.0, prompt - turn.expected.new_tokens))
        if turn.name in candidate.on_device:
            return Gap(prompt - known, 0.0)
        if turn.name in candidate.on_host:
            return Gap(prompt - known, known)
    shared = candidate.shared_blocks(turn.prefix, guess)
    computed = Gap(max(0, prompt - shared * PREFIX_BLOCK_TOKENS), 0.0, shared)
    if turn.name not in candidate.on_volume:
        return computed
    known = min(turn.home_tokens, prompt) or round(max(0.0, prompt - turn.expected.new_tokens))
    read = Gap(prompt - known, 0.0, read_tokens=known)
    return min(computed, read, key=lambda one: one.seconds(candidate.load))


@dataclass(frozen=True, slots=True)
class Sent:
    """What this ingress has done to a replica since its snapshot."""

    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    programs: int = 0
    """Programs that were bound to it, less those that left."""
    kv_tokens: float = 0.0
    """Expected KV of new programs and growth of the others, less the KV that left."""
    active_tokens: float = 0.0
    """The same, with only the growth that is expected within seconds."""
    late_tokens: float = 0.0
    """The growth that is not expected within the replica's refill time."""


def candidate_of(
    replica: str,
    load: ReplicaLoad,
    sent: Sent,
    *,
    bound_tokens: float,
    model: str | None = None,
    draining: bool = False,
    suspect: bool = False,
    residents: frozenset[int] = NO_NAMES,
    on_device: frozenset[int] = NO_NAMES,
    on_host: frozenset[int] = NO_NAMES,
    on_volume: Container[int] = NO_NAMES,
    prefixes: Container[int] = NO_NAMES,
    sent_prefixes: Container[int] = NO_NAMES,
) -> Candidate:
    """The replica as scorers and filters see it."""
    costs = load.costs
    turns = load.running + load.waiting + sent.turns
    backlog = load.waiting_tokens + sent.prompt_tokens
    running_tokens = min(load.kv_tokens, load.running_tokens + sent.prompt_tokens)
    step_s = costs.decode_step_s(turns, running_tokens)
    start_s = backlog * costs.token_s
    start_s += _resumed_tokens(load.resume_tokens, start_s) * costs.token_s

    programs = max(0.0, load.programs + sent.programs)
    occupied = max(0.0, load.working_set_tokens + sent.kv_tokens)
    active = max(0.0, load.active_programs + sent.programs)
    active_tokens = max(0.0, load.active_tokens + sent.active_tokens)
    return Candidate(
        replica=replica,
        model=model,
        draining=draining,
        suspect=suspect,
        load=load,
        turns=turns,
        backlog_tokens=backlog,
        start_s=start_s,
        residual_s=(load.output_tokens + sent.output_tokens) / max(1.0, turns) * step_s,
        step_s=step_s,
        programs=programs,
        active=active,
        active_step_s=costs.decode_step_s(active, min(load.kv_tokens, active_tokens)),
        refill_s=load.kv_tokens * costs.token_s,
        occupied_tokens=occupied,
        late_tokens=sent.late_tokens,
        bound_tokens=bound_tokens,
        residents=residents,
        on_device=on_device,
        on_host=on_host,
        on_volume=on_volume,
        prefixes=prefixes,
        sent_prefixes=sent_prefixes,
    )


def _resumed_tokens(forecast: tuple[tuple[float, float], ...], within_s: float) -> float:
    """Tokens to be computed for programs that resume within a time, interpolated between the forecast's points."""
    before_s = before = 0.0
    for by_s, tokens in forecast:
        if by_s > within_s:
            return before + max(0.0, tokens - before) * (within_s - before_s) / (by_s - before_s)
        before_s, before = max(before_s, by_s), max(before, tokens)
    return before
