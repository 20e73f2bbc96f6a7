"""What a front keeps in mind: replicas, the homes of programs, turns in flight."""

from collections import OrderedDict
from collections.abc import Mapping

from cluster.errors import IntegrityError
from cluster.routing import ReplicaSnapshot
from router.candidate import Candidate, Gap
from router.decisions import Home, TurnRequest
from router.facts import Facts
from router.outlook import Expected, Outlook
from router.replica_book import Flight, ProgramRecord, ReplicaBook
from router.settings import FrontSettings

NOTHING_KNOWN = Facts()
SWEPT = 4
"""Programs that each turn looks at for whether they have been idle too long."""


class Ledger:
    """Mutable; everything in it is bounded by the settings, by replicas, or by turns in flight."""

    def __init__(self, settings: FrontSettings) -> None:
        self.outlook = Outlook()
        self._settings = settings
        self._books: dict[str, ReplicaBook] = {}
        self._programs: OrderedDict[str, ProgramRecord] = OrderedDict()
        self._turns: dict[str, ProgramRecord] = {}
        self._neutral, self._neutral_of = Facts(), list[Facts]()

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        """The replicas there are, with what is new of them."""
        changed = self._books.keys() != snapshots.keys()
        if changed:
            self._books = {
                replica: self._books.get(replica) or ReplicaBook(replica, self._settings)
                for replica in sorted(snapshots)
            }
        for replica, snapshot in snapshots.items():
            if snapshot is not None and self._books[replica].told(snapshot, now_s):
                changed = True
        if changed:
            self.outlook = Outlook.of([facts for _, facts in self._fresh(now_s)])
            self.candidates(now_s)  # so that no turn pays for them

    def candidates(self, now_s: float) -> list[Candidate]:
        """All replicas, in the order of their ids; stale ones as the median of the others, if any is not."""
        books = self._books.values()
        if all(book.is_fresh(now_s) for book in books):
            return [book.candidate(book.facts, now_s) for book in books if book.facts is not None]
        fresh = self._fresh(now_s)
        if not fresh:  # what they said last, and what was sent since
            return [book.candidate(book.facts or NOTHING_KNOWN, now_s) for book in books]
        neutral = self._median([facts for _, facts in fresh])
        known = dict(fresh)
        return [book.candidate(known.get(book.replica, neutral), now_s) for book in books]

    def any_fresh(self, now_s: float) -> bool:
        """Has any replica told something of late?"""
        return any(book.is_fresh(now_s) for book in self._books.values())

    def suspect(self, replica: str, until_s: float) -> None:
        """It has failed a turn."""
        if (book := self._books.get(replica)) is not None:
            book.suspect_until_s = until_s

    def book(self, replica: str) -> ReplicaBook | None:
        """The replica's, if it is there."""
        return self._books.get(replica)

    def program(self, key: str) -> ProgramRecord | None:
        """The program, if it has a home."""
        return self._programs.get(key)

    def in_flight(self, turn_id: str) -> bool:
        """Was this turn sent, and has not ended?"""
        return turn_id in self._turns

    def settle(self, key: str, home: Home, needed_tokens: int, parent_key: str | None = None) -> ProgramRecord:
        """A program lives there from now on."""
        record = self._programs.get(key)
        book = self._books.get(home.replica) or ReplicaBook(home.replica, self._settings)
        if record is None:
            record = ProgramRecord(key, home, parent_key, book, needed_tokens)
            self._programs[key] = record
            if parent_key is not None and (parent := self._programs.get(parent_key)) is not None:
                parent.children += 1
            book.arrive(record)
        elif record.home.replica != home.replica:
            record.book.depart(record)
            book.arrive(record)
        record.home = home
        return record

    def carry(self, record: ProgramRecord) -> None:
        """The program's turns in flight go to its home, wherever they were about to go."""
        for turn_id, flight in record.flights.items():
            flight.book.end(turn_id)
            record.book.begin(turn_id, flight.missing_tokens, flight.output_tokens, flight.prefix)
            record.flights[turn_id] = flight._replace(book=record.book)

    def begin(
        self, turn_id: str, request: TurnRequest, record: ProgramRecord, expected: Expected, gap: Gap, now_s: float
    ) -> None:
        """A turn of a program is sent to its home."""
        current = self._books.get(record.home.replica)
        if current is not None and record.book is not current:  # the replica had gone, and came back
            record.book.depart(record)
            current.arrive(record)
        flight = Flight(
            record.book,
            round(gap.compute_tokens),
            round(expected.output_tokens),
            request.prefix,
            expected.prompt_tokens,
        )
        record.book.begin(turn_id, flight.missing_tokens, flight.output_tokens, flight.prefix)
        record.book.recount(record)
        record.turns += 1
        record.flights[turn_id] = flight
        record.joined = False
        record.final = record.final or request.last or request.lone
        record.last_s = now_s
        self._turns[turn_id] = record
        self._programs.move_to_end(record.key)
        self._sweep(now_s)

    def end(self, turn_id: str, context_tokens: int | None, now_s: float) -> None:
        """A turn that was sent is over; of others nothing is known."""
        record = self._turns.pop(turn_id, None)
        if record is None:
            return
        flight = record.flights.pop(turn_id)
        flight.book.end(turn_id)
        record.last_s = now_s
        known = flight.prompt_tokens + flight.output_tokens if context_tokens is None else context_tokens
        record.context_tokens = max(0, known)
        record.ended_number = record.book.number if record.book is flight.book else None
        record.book.recount(record)
        if record.final and not record.flights:
            self.forget(record.key)

    def forget(self, key: str) -> None:
        """The program has ended: at once, or with its turns in flight."""
        record = self._programs.get(key)
        if record is None:
            return
        record.final = True
        if record.flights:
            return
        del self._programs[key]
        record.book.depart(record)
        if record.parent_key is not None and (parent := self._programs.get(record.parent_key)) is not None:
            parent.children = max(0, parent.children - 1)

    def check_integrity(self) -> None:
        """Do programs, turns in flight and the replicas' books fit each other?

        Raises:
            IntegrityError: they do not.
        """
        flights = {turn_id: record for record in self._programs.values() for turn_id in record.flights}
        if flights != self._turns:
            raise IntegrityError(f"turns in flight: {sorted(self._turns)}, of programs: {sorted(flights)}")
        by_book: dict[int, list[ProgramRecord]] = {}
        for record in self._programs.values():
            by_book.setdefault(id(record.book), []).append(record)
        for book in self._books.values():
            turns = [
                turn for one in self._programs.values() for turn, flight in one.flights.items() if flight.book is book
            ]
            book.check_integrity(by_book.get(id(book), []), turns)

    def _fresh(self, now_s: float) -> list[tuple[str, Facts]]:
        return [
            (book.replica, book.facts)
            for book in self._books.values()
            if book.facts is not None and book.is_fresh(now_s)
        ]

    def _median(self, facts: list[Facts]) -> Facts:
        known = self._neutral_of
        if len(known) != len(facts) or any(one is not other for one, other in zip(known, facts, strict=True)):
            self._neutral, self._neutral_of = Facts.median(facts), facts
        return self._neutral

    def _sweep(self, now_s: float) -> None:
        """Forget programs that have been idle for too long, or are too many, a few at a time."""
        for _ in range(SWEPT):
            record = next(iter(self._programs.values()), None)
            if record is None:
                return
            idle = now_s - record.last_s >= self._settings.idle_program_s
            if not idle and len(self._programs) <= self._settings.max_programs:
                return
            self._programs.move_to_end(record.key)
            if not record.flights:
                self.forget(record.key)
