"""The router's core: turns come, and go to their program's home, wait, or are refused. Implements `decisions.Front`.

Pure: no clock, no I/O; the live cluster and the simulator drive the same class. Nothing in what it is told makes it
throw: a decision is always made, and its reason is in it.
"""

from collections.abc import Mapping, Sequence
from math import inf

from cluster.config import SloConfig
from cluster.routing import ReplicaSnapshot, program_name
from router.admission import LEAST_RETRY_S, FrontQueue, Waiter
from router.candidate import Arrival, Candidate, Gap, Sent, gap
from router.decisions import Decision, Go, Home, Placed, Refuse, Refused, TurnRequest, Wait
from router.facts import Facts
from router.ledger import Ledger
from router.moving import gains
from router.outlook import NOTHING_EXPECTED, Expected, expect
from router.placement import Choice, Placement
from router.rendezvous import bounded, ranked
from router.replica_book import ProgramRecord
from router.settings import FrontSettings

UNKNOWN_EPOCH = 0
"""Of a home that was found without the store: nobody knows better, so no replica refuses it."""


class ProgramFront:
    """Places programs on the replicas of one model, and admits them. See `decisions.Front` for what each method does.

    Args:
        settings: None takes the defaults.
        slo: by which the waiting are ordered; None: bounds that nobody set do not apply.
        model: replicas that say they serve another are passed over; None takes all.
    """

    def __init__(
        self, settings: FrontSettings | None = None, slo: SloConfig | None = None, model: str | None = None
    ) -> None:
        self._settings = settings or FrontSettings()
        self._slo = slo or SloConfig(ttft_s=None)
        self._placement = Placement.of(self._settings, model)
        self._ledger = Ledger(self._settings)
        self._queue = FrontQueue(self._settings)
        self._ready: list[tuple[str, Go | Refuse]] = []
        self._now_s = 0.0

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        """The replicas that can be reached now."""
        self._ledger.observe(snapshots, self._time(now_s))

    def turn(self, turn_id: str, request: TurnRequest, now_s: float, *, shared: bool = True) -> Decision:
        """A turn has come. An id that is in use is that turn again: what was decided before is void."""
        now_s = self._time(now_s)
        self._withdraw(turn_id, None, now_s)
        for replica in request.avoid:
            self._ledger.suspect(replica, now_s + self._settings.suspect_s)
        record = self._ledger.program(request.key)
        if record is not None:
            return self._resumed(turn_id, request, record, now_s, shared)
        return self._first(turn_id, request, now_s, shared)

    def admitted(self, now_s: float) -> Sequence[tuple[str, Go | Refuse]]:
        """Turns whose wait is over."""
        now_s = self._time(now_s)
        self._ready += self._queue.expired(now_s)
        self._admit_children(now_s)
        while self._queue and self._admit_one(now_s):
            pass
        ready, self._ready = self._ready, []
        return ready

    def settle(self, key: str, home: Home, now_s: float) -> None:
        """The store says where the program lives. An epoch older than the known one is a late answer."""
        now_s = self._time(now_s)
        record = self._ledger.program(key)
        if record is not None:
            if home.epoch < record.home.epoch:
                return
            elsewhere = record.home.replica != home.replica
            self._ledger.settle(key, home, record.needed_tokens)
            if elsewhere:
                record.joined = True
                self._ledger.carry(record)
            return
        waiter = self._queue.waiter(key)
        expected = self._expect(waiter.request) if waiter is not None else NOTHING_EXPECTED
        record = self._ledger.settle(key, home, round(expected.context_tokens))
        record.joined, record.last_s = True, now_s
        if waiter is not None:
            for turn_id, request in self._queue.drop(waiter).items():
                self._ready.append((turn_id, self._stay(turn_id, request, record, Placed.JOINED, now_s)))

    def start_s(self, now_s: float) -> float | None:
        """What waits at the front, and on the replica that is free first."""
        candidates = [one for one in self._ledger.candidates(self._time(now_s)) if not one.draining]
        if not candidates:
            return None
        queue_s = self._queue.wait_s(self._expected_admissions_per_s(candidates), self._now_s)
        return queue_s + min(one.start_s for one in candidates)

    def home_of(self, key: str) -> Home | None:
        """Where the program lives."""
        record = self._ledger.program(key)
        return None if record is None else record.home

    def ended(self, turn_id: str, now_s: float, *, context_tokens: int | None = None) -> None:
        """The turn is over."""
        self._withdraw(turn_id, context_tokens, self._time(now_s))

    def forget(self, key: str, now_s: float) -> None:
        """The program has ended."""
        self._time(now_s)
        self._ledger.forget(key)

    def explain(self, request: TurnRequest, now_s: float) -> dict[str, dict[str, float]]:
        """What each replica would cost such a turn: seconds by scorer, by replica. Changes nothing."""
        arrival = self._arrival(request, self._expect(request), self._ledger.program(request.key))
        candidates = self._ledger.candidates(self._time(now_s))
        return {one.replica: self._placement.reasons(arrival, one) for one in candidates}

    @property
    def waiting(self) -> int:
        """Programs that wait to be admitted."""
        return len(self._queue)

    def sent(self, replica: str) -> Sent:
        """What counts of a replica beside its snapshot: this front's own doing. Nothing where there is no replica."""
        book = self._ledger.book(replica)
        return Sent() if book is None else book.sent(book.facts or Facts())

    def check_integrity(self) -> None:
        """Do all counts fit each other?

        Raises:
            IntegrityError: they do not.
        """
        self._ledger.check_integrity()
        self._queue.check_integrity()

    def _time(self, now_s: float) -> float:
        if self._now_s < now_s < inf:
            self._now_s = now_s
        return self._now_s

    def _withdraw(self, turn_id: str, context_tokens: int | None, now_s: float) -> None:
        self._queue.remove(turn_id)
        self._ledger.end(turn_id, context_tokens, now_s)
        if self._ready:
            self._ready = [one for one in self._ready if one[0] != turn_id]

    def _expect(self, request: TurnRequest, turns: int = 0) -> Expected:
        final = request.last or request.lone
        return expect(
            self._ledger.outlook, request.hints, request.prompt_tokens, turns, final, foreseen=request.forecast
        )

    def _arrival(self, request: TurnRequest, expected: Expected, record: ProgramRecord | None) -> Arrival:
        if record is None:
            return Arrival(
                request.key, program_name(request.key), request.tenant, request.prefix, expected, request.avoid
            )
        return Arrival(
            request.key,
            record.name,
            request.tenant,
            request.prefix,
            expected,
            request.avoid,
            record.home.replica,
            record.context_tokens,
            bool(record.flights) or record.ended_number == record.book.number,
        )

    # A program that has a home.

    def _resumed(
        self, turn_id: str, request: TurnRequest, record: ProgramRecord, now_s: float, shared: bool
    ) -> Decision:
        joined = record.joined
        expected = self._expect(request, record.turns)
        arrival = self._arrival(request, expected, record)
        candidates = self._ledger.candidates(now_s)
        home = next((one for one in candidates if one.replica == record.home.replica), None)
        if home is None or home.replica in request.avoid:
            choice = self._anew(arrival, candidates, shared)
            if choice is None:
                return Refuse(Refused.NO_REPLICA, LEAST_RETRY_S)
            reason = Placed.MOVED_FROM_LOST if shared else Placed.HASHED
            return self._move(turn_id, request, record, choice, expected, reason, now_s)
        if not record.flights:
            if home.draining:
                choice = self._anew(arrival, candidates, shared)
                if choice is not None:
                    reason = Placed.MOVED_FROM_DRAINING
                    return self._move(turn_id, request, record, choice, expected, reason, now_s)
            elif shared and record.moves < self._settings.max_moves:
                choice = self._better(arrival, home, candidates)
                if choice is not None:
                    record.moves += 1
                    return self._move(turn_id, request, record, choice, expected, Placed.MOVED_FOR_LOAD, now_s)
        record.needed_tokens = round(home.needs(expected))
        self._ledger.begin(turn_id, request, record, expected, gap(arrival, home), now_s)
        return Go(record.home, Placed.JOINED if joined else Placed.STAYED)

    def _anew(self, arrival: Arrival, candidates: list[Candidate], shared: bool) -> Choice | None:
        """Another place for a program that has to leave its own: it does not wait, but looks for room first."""
        eligible = self._placement.eligible(arrival, candidates, alike=not shared)
        eligible = [one for one in eligible if one.replica != arrival.home]
        if not shared:
            return self._hashed(arrival, eligible)
        return self._placement.best(arrival, self._with_room(arrival, eligible, None) or eligible)

    def _better(self, arrival: Arrival, home: Candidate, candidates: list[Candidate]) -> Choice | None:
        """Where the program would lose less than at home, by enough to move."""
        settings = self._settings
        here = self._placement.score(arrival, home)
        if here.seconds <= settings.move_gain_s:
            return None
        others = [one for one in self._placement.eligible(arrival, candidates) if one is not home]
        best = self._placement.best(arrival, self._with_room(arrival, others, None))
        if best is None or not gains(arrival, here, best, settings, self._slo.ttft_s):
            return None
        return best

    def _move(
        self,
        turn_id: str,
        request: TurnRequest,
        record: ProgramRecord,
        choice: Choice,
        expected: Expected,
        reason: Placed,
        now_s: float,
    ) -> Go:
        before = record.home
        record.needed_tokens = round(choice.candidate.needs(expected))
        self._ledger.settle(record.key, Home(choice.candidate.replica, before.epoch + 1), record.needed_tokens)
        self._ledger.begin(turn_id, request, record, expected, choice.gap, now_s)
        return Go(record.home, reason, moved_from=before.replica)

    def _stay(self, turn_id: str, request: TurnRequest, record: ProgramRecord, reason: Placed, now_s: float) -> Go:
        """Wherever the program lives, whatever is known of that."""
        expected = self._expect(request, record.turns)
        self._ledger.begin(turn_id, request, record, expected, Gap(expected.prompt_tokens, 0.0), now_s)
        return Go(record.home, reason)

    # A program that has none.

    def _first(self, turn_id: str, request: TurnRequest, now_s: float, shared: bool) -> Decision:
        expected = self._expect(request)
        arrival = self._arrival(request, expected, None)
        eligible = self._placement.eligible(arrival, self._ledger.candidates(now_s), alike=not shared)
        if not eligible:
            return Refuse(Refused.NO_REPLICA, LEAST_RETRY_S)
        if not shared or not self._ledger.any_fresh(now_s):
            return self._without_store(turn_id, request, arrival, eligible, now_s)
        if self._goes_at_once(request, arrival, eligible):
            choice = self._placement.best(arrival, self._with_room(arrival, eligible, None) or eligible)
        elif self._queue:
            choice = None
        else:
            choice = self._placement.best(arrival, self._with_room(arrival, eligible, None))
        if choice is not None:
            self._join_others(request.key, choice, now_s)
            return self._enter(turn_id, request, choice, expected, Placed.NEW, now_s)
        return self._wait(turn_id, request, expected, eligible, now_s)

    def _is_needed(self, request: TurnRequest) -> bool:
        """By a program that lives, which else might wait for a child that waits for it: one child at a time."""
        parent = self._ledger.program(request.parent_key) if request.parent_key is not None else None
        return parent is not None and parent.children == 0

    def _goes_at_once(self, request: TurnRequest, arrival: Arrival, eligible: list[Candidate]) -> bool:
        """Is it admitted already, or needed by a program that is?"""
        return self._is_needed(request) or any(arrival.name in one.residents for one in eligible)

    def _without_store(
        self, turn_id: str, request: TurnRequest, arrival: Arrival, eligible: list[Candidate], now_s: float
    ) -> Decision:
        resident = ranked(arrival.key, [one.replica for one in eligible if arrival.name in one.residents])
        if resident:
            choice = next(self._placement.score(arrival, one) for one in eligible if one.replica == resident[0])
            reason = Placed.FOUND
        else:
            hashed = self._hashed(arrival, eligible)
            if hashed is None:
                return Refuse(Refused.NO_REPLICA, LEAST_RETRY_S)
            choice, reason = hashed, Placed.HASHED
        self._join_others(request.key, choice, now_s)
        return self._enter(turn_id, request, choice, arrival.expected, reason, now_s, UNKNOWN_EPOCH)

    def _hashed(self, arrival: Arrival, eligible: list[Candidate]) -> Choice | None:
        """By the key and the snapshots alone, so that every front says the same."""
        programs = {one.replica: int(one.facts.programs) for one in eligible}
        replica = bounded(arrival.key, programs, self._settings.hash_bound)
        return next((self._placement.score(arrival, one) for one in eligible if one.replica == replica), None)

    def _enter(
        self,
        turn_id: str,
        request: TurnRequest,
        choice: Choice,
        expected: Expected,
        reason: Placed,
        now_s: float,
        epoch: int = UNKNOWN_EPOCH + 1,
    ) -> Go:
        """The program's home is chosen."""
        record = self._ledger.program(request.key)
        if record is None:
            home = Home(choice.candidate.replica, epoch)
            needed = round(choice.candidate.needs(expected))
            record = self._ledger.settle(request.key, home, needed, request.parent_key)
        self._ledger.begin(turn_id, request, record, expected, choice.gap, now_s)
        return Go(record.home, reason)

    def _join_others(self, key: str, choice: Choice, now_s: float) -> None:
        """Turns of the program that wait go where it goes."""
        waiter = self._queue.waiter(key)
        if waiter is not None:
            for turn_id, request in self._queue.drop(waiter).items():
                go = self._enter(turn_id, request, choice, self._expect(request), Placed.NEW, now_s)
                self._ready.append((turn_id, go))

    # The front queue.

    def _with_room(self, arrival: Arrival, candidates: list[Candidate], waiter: Waiter | None) -> list[Candidate]:
        kept, empty_share = self._queue.reserved_for(waiter), self._settings.empty_share
        return [one for one in candidates if one.replica != kept and one.has_room(arrival.expected, empty_share)]

    def _wait(
        self, turn_id: str, request: TurnRequest, expected: Expected, eligible: list[Candidate], now_s: float
    ) -> Decision:
        like = eligible[0]
        work_s = like.work_s(expected)
        refusal = self._queue.refusal(request, work_s, self._expected_admissions_per_s(eligible), now_s)
        if refusal is not None:
            return refusal
        prefill_s = expected.prompt_tokens * like.facts.token_s
        turn_s = prefill_s + expected.output_tokens * like.step_s
        ttft_s, e2e_s = self._slo.ttft_s, self._slo.e2e_s
        on_time_s = min(inf if ttft_s is None else ttft_s - prefill_s, inf if e2e_s is None else e2e_s - turn_s)
        self._ready += self._queue.add(turn_id, request, now_s, work_s=work_s, on_time_until_s=now_s + on_time_s)
        return Wait()

    def _expected_admissions_per_s(self, eligible: list[Candidate]) -> float:
        """As many as end, were there only what the means say."""
        outlook = self._ledger.outlook
        rate = 0.0
        for one in eligible:
            turn_s = outlook.pause_s + outlook.output_tokens * one.step_s + outlook.new_tokens * one.facts.token_s
            rate += max(1.0, one.programs) / max(1e-3, turn_s * outlook.program_turns)
        return rate

    def _admit_children(self, now_s: float) -> None:
        """Those without which programs that live cannot go on."""
        for waiter in self._queue.first_children():
            if not self._is_needed(waiter.request):
                continue
            arrival = self._arrival(waiter.request, self._expect(waiter.request), None)
            eligible = self._placement.eligible(arrival, self._ledger.candidates(now_s))
            choice = self._placement.best(arrival, self._with_room(arrival, eligible, waiter) or eligible)
            if choice is not None:
                self._enter_waiting(waiter, choice, Placed.NEW, now_s)

    def _enter_waiting(self, waiter: Waiter, choice: Choice, reason: Placed, now_s: float) -> None:
        for turn_id, request in self._queue.take(waiter, now_s).items():
            go = self._enter(turn_id, request, choice, self._expect(request), reason, now_s)
            self._ready.append((turn_id, go))

    def _admit_one(self, now_s: float) -> bool:
        """Admit the first who fits; False if none does."""
        candidates = self._ledger.candidates(now_s)
        fresh = self._ledger.any_fresh(now_s)
        for waiter in self._queue.in_order(now_s):
            expected = self._expect(waiter.request)
            arrival = self._arrival(waiter.request, expected, None)
            eligible = self._placement.eligible(arrival, candidates)
            roomy = self._with_room(arrival, eligible, waiter)
            choice = self._placement.best(arrival, roomy) if fresh else self._hashed(arrival, roomy)
            if choice is None:
                self._reserve(waiter, arrival, eligible)
                continue
            self._enter_waiting(waiter, choice, Placed.NEW if fresh else Placed.HASHED, now_s)
            return True
        return False

    def _reserve(self, waiter: Waiter, arrival: Arrival, eligible: list[Candidate]) -> None:
        """Whose turn it is because it has waited longest gets the next room somewhere, however much it needs."""
        if waiter.reserved is not None and any(one.replica == waiter.reserved for one in eligible):
            return
        if waiter not in self._queue.overdue():
            return
        most = max(eligible, key=lambda one: (one.bound_tokens - one.occupied_tokens, one.replica), default=None)
        self._queue.reserve(waiter, None if most is None else most.replica)
