"""The mutable state of one ingress's placement: replicas, programs and their homes, turns in flight. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.core.errors import IntegrityError
from cluster.core.replica_snapshot import ReplicaSnapshot, program_name, unpack_blocks, unpack_names
from cluster.core.scaling_report import turn_work_s
from router.candidate import (
    NO_NAMES,
    Candidate,
    ExpectedWork,
    Gap,
    ReplicaLoad,
    Sent,
    WorkloadEstimate,
    candidate_of,
)
from router.decisions import Home, TurnRequest
from router.demand import DemandMeter
from router.settings import EngineSettings
from router.volumes import Volumes

UNKNOWN_LOAD = ReplicaLoad()
SWEPT = 4
"""Programs that each turn checks for whether they have been idle too long."""
MAX_SCALE = 8.0
"""The programs that this ingress placed on a replica stand for at most so many times their number."""


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """A program that is bound to a replica."""

    key: str
    home: Home
    parent_key: str | None
    replica: "ReplicaState"
    """The state of its home. Where the replica is gone, the engine has dropped that state."""
    needed_tokens: int
    """KV that it is expected to need, averaged over the work that is ahead."""
    context_tokens: int = 0
    """KV that it had at the end of its last turn."""
    counted_tokens: int = 0
    """What its replica's state counts for it."""
    name: int = 0
    turns: int = 0
    moves: int = 0
    """Migrations for load."""
    in_flight: dict[str, "InFlightTurn"] = field(default_factory=dict)
    joined: bool = False
    """Another ingress placed it, and no turn of it has come here since."""
    final: bool = False
    """It ends with its turns in flight."""
    ended_number: int | None = None
    """Number of its home's newest snapshot when its last turn ended."""
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.name = program_name(self.key)


class InFlightTurn(NamedTuple):
    """A turn that was sent to a replica. Lengths in tokens."""

    replica: "ReplicaState"
    missing_tokens: int
    """Part of its prompt that was missing there."""
    output_tokens: int
    """Expected output."""
    prefix: tuple[int, ...]
    prompt_tokens: int


class _Turn(NamedTuple):
    number: int
    prompt_tokens: int
    output_tokens: int


class _Left(NamedTuple):
    number: int
    name: int
    tokens: int


class RecentBlocks:
    """Prefix blocks of the newest prompts: at least half of ``most``, at most all of it and one prompt.

    An LRU list costs ten times as much for each block.
    """

    def __init__(self, most: int) -> None:
        self._half = most / 2
        self._older: set[int] = set()
        self._newer: set[int] = set()

    def add(self, prefix: tuple[int, ...]) -> None:
        """Add the blocks of a prompt."""
        self._newer.update(prefix)
        if len(self._newer) > self._half:
            self._older, self._newer = self._newer if self._half else set(), set()

    def __contains__(self, block: object) -> bool:
        return block in self._newer or block in self._older


class ReplicaState:
    """One replica: its newest snapshot, and what this ingress has done there since.

    A snapshot may be older than the arrival of what was sent last. So programs that were bound count until the snapshot
    names them as residents, those that left until it does not, and turns until they end; all of them for at most
    `EngineSettings.unconfirmed_snapshots` newer snapshots.
    """

    def __init__(self, replica: str, settings: EngineSettings) -> None:
        self.id = replica
        self.load: ReplicaLoad | None = None
        self.number = 0
        self.seen_s = 0.0
        self.suspect_until_s = float("-inf")
        self.draining = False
        self._settings = settings
        self._model: str | None = None
        self._guards_memory = False
        self._residents, self._on_device, self._on_host, self._prefixes = NO_NAMES, NO_NAMES, NO_NAMES, NO_NAMES
        self.volume = ""
        """Name of the volume of its disk tier; empty: it has none."""
        self.on_disk = NO_NAMES
        """The programs whose KV it has written there."""
        self.on_volume: Container[int] = NO_NAMES
        """The programs whose KV is on its volume, whichever replica has written it."""
        self._turns: dict[str, _Turn] = {}
        self._newcomers: dict[str, tuple[int, ProgramRecord]] = {}
        self._left: dict[str, _Left] = {}
        self._blocks = RecentBlocks(settings.own_prefix_blocks)
        self._settled = 0
        self._newcomers_tokens = self._growth_tokens = self._left_tokens = 0
        self._cached: tuple[tuple[ReplicaLoad, bool], Candidate] | None = None

    def update(self, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Take a snapshot; False if it is not newer, or cannot be read."""
        if self.load is not None and snapshot.number <= self.number:
            return False
        try:
            packed = (snapshot.residents, snapshot.on_device, snapshot.on_host, snapshot.on_disk)
            names = [unpack_names(one) for one in packed]
            prefixes = unpack_blocks(snapshot.prefixes)
        except ValueError:
            return False
        self._residents, self._on_device, self._on_host, self.on_disk = names
        self.volume = snapshot.volume
        self._prefixes = prefixes
        self.load, self.number, self.seen_s = ReplicaLoad.of(snapshot), snapshot.number, now_s
        self.draining, self._model = snapshot.draining, snapshot.model or None
        self._guards_memory = snapshot.guards_memory
        self._settle()
        self._cached = None
        return True

    def is_fresh(self, now_s: float) -> bool:
        """Whether its newest snapshot is recent."""
        return self.load is not None and now_s - self.seen_s <= self._settings.stale_s

    def _is_silent(self, now_s: float) -> bool:
        """Whether it has published snapshots, but none lately."""
        return self.load is not None and now_s - self.seen_s > self._settings.silent_s

    def candidate(self, load: ReplicaLoad, now_s: float) -> Candidate:
        """The replica as scorers see it. ``load``: its own, or what stands for it where that is stale."""
        suspect = now_s < self.suspect_until_s or self._is_silent(now_s)
        if self._cached is not None:
            (of_load, of_suspect), candidate = self._cached
            if of_load is load and of_suspect == suspect:
                return candidate
        settings = self._settings
        share = settings.guarded_working_set if self._guards_memory else settings.working_set
        candidate = candidate_of(
            self.id,
            load,
            self.sent(load),
            bound_tokens=share * (load.kv_tokens + settings.host_share * load.host_tokens),
            model=self._model,
            draining=self.draining,
            suspect=suspect,
            residents=self._residents,
            on_device=self._on_device,
            on_host=self._on_host,
            on_volume=self.on_volume,
            prefixes=self._prefixes,
            sent_prefixes=self._blocks,
        )
        self._cached = ((load, suspect), candidate)
        return candidate

    def sent(self, load: ReplicaLoad) -> Sent:
        """What counts beside ``load``."""
        # Below 1 where the replica expects that most of them have ended without a last turn.
        alive, soon = self._per_settled(load.programs), self._per_settled(load.working_set_programs)
        active = self._per_settled(load.active_programs)
        come = self._newcomers_tokens - self._left_tokens
        return Sent(
            turns=len(self._turns),
            prompt_tokens=sum(turn.prompt_tokens for turn in self._turns.values()),
            output_tokens=sum(turn.output_tokens for turn in self._turns.values()),
            programs=len(self._newcomers) - len(self._left),
            kv_tokens=come + alive * self._growth_tokens,
            active_tokens=come + active * self._growth_tokens,
            late_tokens=max(0.0, alive - soon) * self._growth_tokens,
        )

    def _per_settled(self, programs: float) -> float:
        return min(MAX_SCALE, programs / self._settled) if self._settled > 0 else 1.0

    def begin(self, turn_id: str, prompt_tokens: int, output_tokens: int, prefix: tuple[int, ...]) -> None:
        """A turn goes there; ``prompt_tokens``: of its prompt, those that are missing there."""
        self._turns[turn_id] = _Turn(self.number, prompt_tokens, output_tokens)
        self._blocks.add(prefix)
        self._cached = None

    def end(self, turn_id: str) -> None:
        """A turn has ended."""
        if self._turns.pop(turn_id, None) is not None:
            self._cached = None

    def arrive(self, record: ProgramRecord) -> None:
        """A program is bound to this replica."""
        record.replica = self
        record.counted_tokens = record.needed_tokens
        record.ended_number = None
        self._newcomers[record.key] = (self.number, record)
        self._newcomers_tokens += record.counted_tokens
        if (left := self._left.pop(record.key, None)) is not None:
            self._left_tokens -= left.tokens
        self._cached = None

    def depart(self, record: ProgramRecord) -> None:
        """A program is no longer bound to it."""
        if self._newcomers.pop(record.key, None) is not None:
            self._newcomers_tokens -= record.counted_tokens
        else:
            self._settled -= 1
            self._growth_tokens -= record.counted_tokens
            self._left[record.key] = _Left(self.number, record.name, record.context_tokens)
            self._left_tokens += record.context_tokens
        record.counted_tokens = 0
        self._cached = None

    def recount(self, record: ProgramRecord) -> None:
        """A program's numbers have changed."""
        before = record.counted_tokens
        if record.key in self._newcomers:
            record.counted_tokens = record.needed_tokens
            self._newcomers_tokens += record.counted_tokens - before
        else:
            record.counted_tokens = max(0, record.needed_tokens - record.context_tokens)
            self._growth_tokens += record.counted_tokens - before
        if record.counted_tokens != before:
            self._cached = None

    def check_integrity(self, records: list[ProgramRecord], turns: list[str]) -> None:
        """Check the sums against the programs that are bound here and the turns in flight.

        Raises:
            IntegrityError: they do not.
        """
        newcomers = [record for record in records if record.key in self._newcomers]
        settled = [record for record in records if record.key not in self._newcomers]
        sums = {
            "newcomers": (len(self._newcomers), len(newcomers)),
            "newcomers' tokens": (self._newcomers_tokens, sum(one.counted_tokens for one in newcomers)),
            "settled": (self._settled, len(settled)),
            "growth": (self._growth_tokens, sum(one.counted_tokens for one in settled)),
            "left": (self._left_tokens, sum(one.tokens for one in self._left.values())),
            "turns": (len(self._turns), len([turn for turn in turns if turn in self._turns])),
        }
        wrong = {name: pair for name, pair in sums.items() if pair[0] != pair[1]}
        if wrong:
            raise IntegrityError(f"the state of {self.id} does not add up (counted, should be): {wrong}")

    def _settle(self) -> None:
        """Drop what the new snapshot confirms."""
        settled_at = self.number - self._settings.unconfirmed_snapshots
        for key, (number, record) in list(self._newcomers.items()):
            if number <= settled_at or record.name in self._residents:
                del self._newcomers[key]
                self._newcomers_tokens -= record.counted_tokens
                record.counted_tokens = max(0, record.needed_tokens - record.context_tokens)
                self._growth_tokens += record.counted_tokens
                self._settled += 1
        for key, left in list(self._left.items()):
            if left.number <= settled_at or left.name not in self._residents:
                self._left_tokens -= left.tokens
                del self._left[key]
        for turn_id, turn in list(self._turns.items()):
            if turn.number <= settled_at:
                del self._turns[turn_id]


class RouterState:
    """What one ingress keeps: replicas, homes of programs, turns in flight.

    Everything in it is bounded by the settings, by the replicas, or by the turns in flight.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.workload = WorkloadEstimate()
        self.demand = DemandMeter()
        self._settings = settings
        self._replicas: dict[str, ReplicaState] = {}
        self._programs: OrderedDict[str, ProgramRecord] = OrderedDict()
        self._siblings: Counter[str] = Counter()
        """Number of living programs by the parent that they name, which may be no program here."""
        self._turns: dict[str, ProgramRecord] = {}
        self._neutral, self._neutral_of = ReplicaLoad(), list[ReplicaLoad]()
        self._volumes = Volumes(settings.program_ttl_s)

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        """The replicas that there are, with their newest snapshots."""
        changed = self._replicas.keys() != snapshots.keys()
        if changed:
            self._replicas = {
                replica: self._replicas.get(replica) or ReplicaState(replica, self._settings)
                for replica in sorted(snapshots)
            }
        for replica, snapshot in snapshots.items():
            if snapshot is not None and (state := self._replicas[replica]).update(snapshot, now_s):
                state.on_volume = self._volumes.wrote(replica, state.volume, state.on_disk, now_s)
                changed = True
        if changed:
            self.workload = WorkloadEstimate.of([load for _, load in self._fresh(now_s)])
            self.candidates(now_s)  # so that no turn pays for them

    def candidates(self, now_s: float) -> list[Candidate]:
        """All replicas, in the order of their ids; stale ones as the median of the others, if any is not."""
        states = self._replicas.values()
        if all(state.is_fresh(now_s) for state in states):
            return [state.candidate(state.load, now_s) for state in states if state.load is not None]
        fresh = self._fresh(now_s)
        if not fresh:  # their last snapshots, and what was sent since
            return [state.candidate(state.load or UNKNOWN_LOAD, now_s) for state in states]
        neutral = self._median([load for _, load in fresh])
        known = dict(fresh)
        return [state.candidate(known.get(state.id, neutral), now_s) for state in states]

    def any_fresh(self, now_s: float) -> bool:
        """Whether any replica has a recent snapshot."""
        return any(state.is_fresh(now_s) for state in self._replicas.values())

    def typical_load(self, now_s: float) -> ReplicaLoad:
        """The median of the replicas with recent snapshots."""
        return self._median([load for _, load in self._fresh(now_s)])

    def suspect(self, replica: str, until_s: float) -> None:
        """The replica has failed a turn."""
        if (state := self._replicas.get(replica)) is not None:
            state.suspect_until_s = until_s

    def replica(self, replica: str) -> ReplicaState | None:
        """The replica's state, if it is there."""
        return self._replicas.get(replica)

    def program(self, key: str) -> ProgramRecord | None:
        """The program, if it has a home."""
        return self._programs.get(key)

    def has_children(self, parent_key: str) -> bool:
        """Whether a living program names this parent, which may be only the name of a group."""
        return parent_key in self._siblings

    def bind(self, key: str, home: Home, needed_tokens: int, parent_key: str | None = None) -> ProgramRecord:
        """A program is bound to its home."""
        record = self._programs.get(key)
        state = self._replicas.get(home.replica) or ReplicaState(home.replica, self._settings)
        if record is None:
            record = ProgramRecord(key, home, None, state, needed_tokens)
            self._programs[key] = record
            self._name_parent(record, parent_key)
            state.arrive(record)
        elif record.home.replica != home.replica:
            record.replica.depart(record)
            state.arrive(record)
        record.home = home
        return record

    def _name_parent(self, record: ProgramRecord, parent_key: str | None) -> None:
        """Count the program as a child. The store does not know the parents of the programs whose homes it has."""
        if record.parent_key is None and parent_key is not None:
            record.parent_key = parent_key
            self._siblings[parent_key] += 1

    def carry(self, record: ProgramRecord) -> None:
        """The program's turns in flight go to its new home, wherever they were about to go."""
        for turn_id, turn in record.in_flight.items():
            turn.replica.end(turn_id)
            record.replica.begin(turn_id, turn.missing_tokens, turn.output_tokens, turn.prefix)
            record.in_flight[turn_id] = turn._replace(replica=record.replica)

    def begin(
        self, turn_id: str, request: TurnRequest, record: ProgramRecord, expected: ExpectedWork, gap: Gap, now_s: float
    ) -> None:
        """A turn of a program is sent to its home."""
        self._name_parent(record, request.parent_key)
        current = self._replicas.get(record.home.replica)
        if current is not None and record.replica is not current:  # the replica was gone, and came back
            record.replica.depart(record)
            current.arrive(record)
        turn = InFlightTurn(
            record.replica,
            round(gap.compute_tokens),
            round(expected.output_tokens),
            request.prefix,
            expected.prompt_tokens,
        )
        record.replica.begin(turn_id, turn.missing_tokens, turn.output_tokens, turn.prefix)
        record.replica.recount(record)
        self._count(record, expected, gap, now_s)
        record.turns += 1
        record.in_flight[turn_id] = turn
        record.joined = False
        record.final = record.final or request.last or request.single_turn
        record.last_s = now_s
        self._turns[turn_id] = record
        self._programs.move_to_end(record.key)
        self._sweep(now_s)

    def _count(self, record: ProgramRecord, expected: ExpectedWork, gap: Gap, now_s: float) -> None:
        """Count the demand of a turn that is sent, and that of its program if it is new."""
        load = record.replica.load or UNKNOWN_LOAD
        output = expected.output_tokens
        work_s = turn_work_s(load, gap.compute_tokens, output, expected.prompt_tokens + output / 2)
        self.demand.turn(now_s, work_s)
        if record.turns == 0 and not record.joined:
            computed = expected.later_turns * expected.new_tokens
            later_s = turn_work_s(load, computed, expected.later_outputs, expected.context_tokens)
            step_s = load.costs.decode_step_s(max(1.0, load.running), min(load.kv_tokens, load.running_tokens))
            lasts_s = expected.later_turns * self.workload.pause_s + expected.outputs * step_s
            self.demand.program(now_s, work_s + later_s, lasts_s)

    def end(self, turn_id: str, context_tokens: int | None, now_s: float) -> bool:
        """A turn that was sent is over; other ids are ignored. Return whether its program has left its replica."""
        record = self._turns.pop(turn_id, None)
        if record is None:
            return False
        turn = record.in_flight.pop(turn_id)
        turn.replica.end(turn_id)
        record.last_s = now_s
        known = turn.prompt_tokens + turn.output_tokens if context_tokens is None else context_tokens
        record.context_tokens = max(0, known)
        record.ended_number = record.replica.number if record.replica is turn.replica else None
        record.replica.recount(record)
        return record.final and self.forget(record.key)

    def forget(self, key: str) -> bool:
        """The program has ended: now, or with its turns in flight. Return whether it has left its replica."""
        record = self._programs.get(key)
        if record is None:
            return False
        record.final = True
        if record.in_flight:
            return False
        del self._programs[key]
        record.replica.depart(record)
        if record.parent_key is not None:
            self._siblings[record.parent_key] -= 1
            if not self._siblings[record.parent_key]:
                del self._siblings[record.parent_key]
        return True

    def check_integrity(self) -> None:
        """Check programs, turns in flight and replicas against each other.

        Raises:
            IntegrityError: they do not.
        """
        in_flight = {turn_id: record for record in self._programs.values() for turn_id in record.in_flight}
        siblings = Counter(one.parent_key for one in self._programs.values() if one.parent_key is not None)
        if siblings != self._siblings:
            raise IntegrityError(f"children by parent: {self._siblings}, of programs: {siblings}")
        if in_flight != self._turns:
            raise IntegrityError(f"turns in flight: {sorted(self._turns)}, of programs: {sorted(in_flight)}")
        for state in self._replicas.values():
            bound = [record for record in self._programs.values() if record.replica is state]
            state.check_integrity(bound, [id for id, one in self._turns.items() if one.in_flight[id].replica is state])

    def _fresh(self, now_s: float) -> list[tuple[str, ReplicaLoad]]:
        return [
            (state.id, state.load)
            for state in self._replicas.values()
            if state.load is not None and state.is_fresh(now_s)
        ]

    def _median(self, loads: list[ReplicaLoad]) -> ReplicaLoad:
        known = self._neutral_of
        if len(known) != len(loads) or any(one is not other for one, other in zip(known, loads, strict=True)):
            self._neutral, self._neutral_of = ReplicaLoad.median(loads), loads
        return self._neutral

    def _sweep(self, now_s: float) -> None:
        """Forget a few programs that have been idle for too long, or are too many."""
        for _ in range(SWEPT):
            record = next(iter(self._programs.values()), None)
            if record is None:
                return
            idle = now_s - record.last_s >= self._settings.program_ttl_s
            if not idle and len(self._programs) <= self._settings.max_programs:
                return
            self._programs.move_to_end(record.key)
            if not record.in_flight:
                self.forget(record.key)
