"""What a front knows of one replica: its newest snapshot, and what the front itself did there since.

A snapshot may have been taken before what was sent last had arrived. So programs that came count until they are among
the residents, those that left until they are not, and turns until they have ended; all of them no longer than
`FrontSettings.ledger_snapshots` newer snapshots.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.errors import IntegrityError
from cluster.routing import ReplicaSnapshot, program_name, unpack_blocks, unpack_names
from router.candidate import NO_NAMES, Candidate, Sent, candidate_of
from router.decisions import Home
from router.facts import Facts
from router.settings import FrontSettings

MOST_OTHERS = 8.0
"""Of the programs on a replica, those that this front placed stand for no more than so many times as many."""


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """A program that has a home."""

    key: str
    home: Home
    parent_key: str | None
    book: "ReplicaBook"
    """Of its home; one that the front has dropped where the replica has gone."""
    needed_tokens: int
    """KV that it is expected to need, in the mean over what is ahead of it."""
    context_tokens: int = 0
    """KV that it had when its last turn ended."""
    counted_tokens: int = 0
    """What its replica's book counts for it."""
    name: int = 0
    turns: int = 0
    moves: int = 0
    """For load."""
    flights: dict[str, "Flight"] = field(default_factory=dict)
    """Its turns in flight."""
    children: int = 0
    """Programs that it has begun and that live."""
    joined: bool = False
    """Another front placed it, and no turn of it has come here since."""
    final: bool = False
    """It ends with the turns in flight."""
    ended_number: int | None = None
    """Of the snapshot that its home had told when its last turn ended."""
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.name = program_name(self.key)


class Flight(NamedTuple):
    """A turn that was sent. Lengths in tokens."""

    book: "ReplicaBook"
    """Of the replica that it was sent to."""
    missing_tokens: int
    """Of its prompt, there."""
    output_tokens: int
    """Expected."""
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


class ReplicaBook:
    """One replica's."""

    def __init__(self, replica: str, settings: FrontSettings) -> None:
        self.replica = replica
        self.facts: Facts | None = None
        self.number = 0
        self.seen_s = 0.0
        self.suspect_until_s = float("-inf")
        self.draining = False
        self._settings = settings
        self._model: str | None = None
        self._guards_memory = False
        self._residents, self._on_device, self._on_host, self._prefixes = NO_NAMES, NO_NAMES, NO_NAMES, NO_NAMES
        self._turns: dict[str, _Turn] = {}
        self._newcomers: dict[str, tuple[int, ProgramRecord]] = {}
        self._left: dict[str, _Left] = {}
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._settled = 0
        self._newcomers_tokens = self._growth_tokens = self._left_tokens = 0
        self._cached: tuple[tuple[Facts, bool], Candidate] | None = None

    def told(self, snapshot: ReplicaSnapshot, now_s: float) -> bool:
        """Take a snapshot; False if it is old news, or none that can be read."""
        if self.facts is not None and snapshot.number <= self.number:
            return False
        try:
            names = [unpack_names(one) for one in (snapshot.residents, snapshot.on_device, snapshot.on_host)]
            prefixes = unpack_blocks(snapshot.prefixes)
        except ValueError:
            return False
        self._residents, self._on_device, self._on_host = names
        self._prefixes = prefixes
        self.facts, self.number, self.seen_s = Facts.of(snapshot), snapshot.number, now_s
        self.draining, self._model = snapshot.draining, snapshot.model or None
        self._guards_memory = snapshot.guards_memory
        self._settle()
        self._cached = None
        return True

    def is_fresh(self, now_s: float) -> bool:
        """Has it told something of late?"""
        return self.facts is not None and now_s - self.seen_s <= self._settings.stale_s

    def candidate(self, facts: Facts, now_s: float) -> Candidate:
        """For scorers. ``facts``: its own, or what stands for them where they are stale."""
        suspect = now_s < self.suspect_until_s
        if self._cached is not None:
            (of_facts, of_suspect), candidate = self._cached
            if of_facts is facts and of_suspect == suspect:
                return candidate
        settings = self._settings
        share = settings.guarded_working_set if self._guards_memory else settings.working_set
        candidate = candidate_of(
            self.replica,
            facts,
            self.sent(facts),
            bound_tokens=share * (facts.kv_tokens + settings.host_share * facts.host_tokens),
            model=self._model,
            draining=self.draining,
            suspect=suspect,
            residents=self._residents,
            on_device=self._on_device,
            on_host=self._on_host,
            prefixes=self._prefixes,
            sent_prefixes=self._blocks,
        )
        self._cached = ((facts, suspect), candidate)
        return candidate

    def sent(self, facts: Facts) -> Sent:
        """What counts beside ``facts``."""
        # Less than once where the replica thinks that most of them have ended, though nobody said so.
        alive, soon = self._per_settled(facts.programs), self._per_settled(facts.working_set_programs)
        active = self._per_settled(facts.active_programs)
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
        return min(MOST_OTHERS, programs / self._settled) if self._settled > 0 else 1.0

    def begin(self, turn_id: str, prompt_tokens: int, output_tokens: int, prefix: tuple[int, ...]) -> None:
        """A turn goes there; ``prompt_tokens``: of its prompt, those that are missing there."""
        self._turns[turn_id] = _Turn(self.number, prompt_tokens, output_tokens)
        blocks = self._blocks
        for block in prefix:
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._settings.own_prefix_blocks:
            blocks.popitem(last=False)
        self._cached = None

    def end(self, turn_id: str) -> None:
        """It has ended."""
        if self._turns.pop(turn_id, None) is not None:
            self._cached = None

    def arrive(self, record: ProgramRecord) -> None:
        """A program lives here from now on."""
        record.book = self
        record.counted_tokens = record.needed_tokens
        record.ended_number = None
        self._newcomers[record.key] = (self.number, record)
        self._newcomers_tokens += record.counted_tokens
        if (left := self._left.pop(record.key, None)) is not None:
            self._left_tokens -= left.tokens
        self._cached = None

    def depart(self, record: ProgramRecord) -> None:
        """It does so no longer."""
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
        """The program's numbers have changed."""
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
        """Do the sums fit the programs that live here and the turns in flight?

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
            raise IntegrityError(f"the book of {self.replica} does not add up (counted, should be): {wrong}")

    def _settle(self) -> None:
        """Drop what the new snapshot knows."""
        settled_at = self.number - self._settings.ledger_snapshots
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
