"""The router's core: places programs on the replicas of one model, and admits their turns. Pure.

Events come in, decisions go out. The ingress drives the engine through `router.program_placer`, and the simulator
drives it directly, so both place programs by the same code. The engine reads no clock and does no I/O: every method is
given the time, in seconds. No input makes it raise; a decision is always made, and contains its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from cluster.config.schema import SloConfig
from cluster.core.replica_snapshot import ReplicaSnapshot, program_name
from cluster.core.scaling_report import Demand, turn_work_s
from router.admission_queue import LOOKAHEAD, MIN_RETRY_S, AdmissionQueue, Waiter
from router.candidate import NO_WORK, Arrival, Candidate, ExpectedWork, Gap, expected_work, gap
from router.decisions import Decision, Go, Home, Placed, Refuse, Refused, TurnRequest, Wait
from router.placement_policy import Choice, PlacementPolicy, migration_margin_s, migration_pays, ranked
from router.router_state import ProgramRecord, RouterState
from router.settings import EngineSettings, RouterSettings

CHILD_TRIES = 4 * LOOKAHEAD
"""Waiting children that are tried without success at a time, of all parents together."""
UNKNOWN_EPOCH = 0
"""The epoch of a home that was chosen without the store. No replica refuses a turn with it."""


class PlacementEngine:
    """Decides where each turn goes, and when.

    A turn's id names it from `turn` to `ended`, and is unique in this engine.

    Args:
        settings: the constants of `EngineSettings` have their defaults where the user's settings are given.
        slo: orders the waiting turns; None applies no SLO.
        model: replicas that publish another model are not used; None uses all.
        tenant_slos: the SLO of each tenant that has its own.
    """

    def __init__(
        self,
        settings: RouterSettings | None = None,
        slo: SloConfig | None = None,
        model: str | None = None,
        tenant_slos: Mapping[str, SloConfig] | None = None,
    ) -> None:
        self._settings = EngineSettings.of(settings or RouterSettings())
        self._slo = slo or SloConfig(ttft_s=None)
        self._tenant_slos = tenant_slos or {}
        self._policy = PlacementPolicy.of(self._settings, model)
        self._state = RouterState(self._settings)
        self._queue = AdmissionQueue(self._settings)
        self._ready: list[tuple[str, Go | Refuse]] = []
        self._now_s = 0.0

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None], now_s: float) -> None:
        """The replicas that can be reached now, each with its newest snapshot; None: it has published none."""
        self._state.observe(snapshots, self._time(now_s))

    def turn(self, turn_id: str, request: TurnRequest, now_s: float, *, store_available: bool = True) -> Decision:
        """A turn has come. A turn with an id that is in use replaces the former one.

        ``store_available``: False makes a decision on which all ingresses agree without the store.
        """
        now_s = self._time(now_s)
        self._withdraw(turn_id, None, now_s)
        for replica in request.avoid:
            self._state.suspect(replica, now_s + self._settings.suspect_s)
        record = self._state.program(request.key)
        if record is not None:
            return self._resumed(turn_id, request, record, now_s, store_available)
        return self._first(turn_id, request, now_s, store_available)

    def admitted(self, now_s: float) -> Sequence[tuple[str, Go | Refuse]]:
        """Turns whose wait is over, with the decision. Each is returned once."""
        now_s = self._time(now_s)
        self._ready += self._queue.expired(now_s)
        self._admit_children(now_s)
        while self._queue and self._admit_one(now_s):
            pass
        ready, self._ready = self._ready, []
        return ready

    def settle(self, key: str, home: Home, now_s: float) -> None:
        """The store has confirmed a program's home, which this or another ingress chose. An older epoch is ignored."""
        now_s = self._time(now_s)
        record = self._state.program(key)
        if record is not None:
            if home.epoch < record.home.epoch:
                return
            elsewhere = record.home.replica != home.replica
            self._state.bind(key, home, record.needed_tokens)
            if elsewhere:
                record.joined = True
                self._state.carry(record)
            return
        waiter = self._queue.waiter(key)
        expected = self._expect(waiter.request) if waiter is not None else NO_WORK
        parent_key = None if waiter is None else waiter.request.parent_key
        record = self._state.bind(key, home, round(expected.context_tokens), parent_key)
        record.joined, record.last_s = True, now_s
        if waiter is not None:
            for turn_id, request in self._queue.drop(waiter).items():
                self._ready.append((turn_id, self._stay(turn_id, request, record, Placed.JOINED, now_s)))

    def start_s(self, now_s: float) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: there is no replica."""
        candidates = [one for one in self._state.candidates(self._time(now_s)) if not one.draining]
        if not candidates:
            return None
        queue_s = self._queue.wait_s(self._expected_admissions_per_s(candidates), self._now_s)
        return queue_s + min(one.start_s for one in candidates)

    def demand(self, now_s: float, turns: int, missed: int) -> Demand:
        """The demand now, for the autoscaler.

        Args:
            now_s: the time.
            turns: turns that have ended since the ingress started.
            missed: those of them that missed their SLO.
        """
        now_s = self._time(now_s)
        meter = self._state.demand
        meter.ended(now_s, turns, missed)
        load = self._state.typical_load(now_s)
        work_s = tokens = 0.0
        for request in self._queue.requests():
            expected = self._expect(request)
            context = expected.prompt_tokens + expected.output_tokens / 2
            work_s += turn_work_s(load, expected.prompt_tokens, expected.output_tokens, context)
            tokens += expected.context_tokens
        return meter.demand(now_s, work_s, tokens)

    def home_of(self, key: str) -> Home | None:
        """The program's home, as far as this ingress knows."""
        record = self._state.program(key)
        return None if record is None else record.home

    def ended(self, turn_id: str, now_s: float, *, context_tokens: int | None = None) -> None:
        """The turn is over, whatever its outcome, or its client is gone.

        ``context_tokens``: the KV of its program now, where that is known.
        """
        self._withdraw(turn_id, context_tokens, self._time(now_s))

    def forget(self, key: str, now_s: float) -> None:
        """The program has ended."""
        self._time(now_s)
        if self._state.forget(key):
            self._queue.room_grew()

    @property
    def waiting(self) -> int:
        """Programs that wait for admission."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """Check all counts against each other.

        Raises:
            IntegrityError: they do not.
        """
        self._state.check_integrity()
        self._queue.check_integrity()

    def _time(self, now_s: float) -> float:
        if self._now_s < now_s < inf:
            self._now_s = now_s
        return self._now_s

    def _withdraw(self, turn_id: str, context_tokens: int | None, now_s: float) -> None:
        self._queue.remove(turn_id)
        if self._state.end(turn_id, context_tokens, now_s):
            self._queue.room_grew()
        if self._ready:
            self._ready = [one for one in self._ready if one[0] != turn_id]

    def _expect(self, request: TurnRequest, turns: int = 0) -> ExpectedWork:
        final = request.last or request.single_turn
        return expected_work(
            self._state.workload, request.hints, request.prompt_tokens, turns, final, predicted=request.forecast
        )

    def _arrival(self, request: TurnRequest, expected: ExpectedWork, record: ProgramRecord | None) -> Arrival:
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
            bool(record.in_flight) or record.ended_number == record.replica.number,
        )

    # --- programs that have a home ------------------------------------------------------------------------------------

    def _resumed(
        self, turn_id: str, request: TurnRequest, record: ProgramRecord, now_s: float, store_available: bool
    ) -> Decision:
        joined = record.joined
        expected = self._expect(request, record.turns)
        arrival = self._arrival(request, expected, record)
        candidates = self._state.candidates(now_s)
        home = next((one for one in candidates if one.replica == record.home.replica), None)
        if home is None or home.replica in request.avoid:
            choice = self._anew(arrival, candidates, store_available)
            if choice is None:
                return Refuse(Refused.NO_REPLICA, MIN_RETRY_S)
            reason = Placed.MOVED_FROM_LOST if store_available else Placed.HASHED
            return self._move(turn_id, request, record, choice, expected, reason, now_s)
        if not record.in_flight:
            if home.draining:
                choice = self._anew(arrival, candidates, store_available)
                if choice is not None:
                    reason = Placed.MOVED_FROM_DRAINING
                    return self._move(turn_id, request, record, choice, expected, reason, now_s)
            elif store_available and record.moves < self._settings.max_moves:
                choice = self._better(arrival, home, candidates)
                if choice is not None:
                    record.moves += 1
                    return self._move(turn_id, request, record, choice, expected, Placed.MOVED_FOR_LOAD, now_s)
        record.needed_tokens = round(home.needs(expected))
        self._state.begin(turn_id, request, record, expected, gap(arrival, home), now_s)
        return Go(record.home, Placed.JOINED if joined else Placed.STAYED)

    def _anew(self, arrival: Arrival, candidates: list[Candidate], store_available: bool) -> Choice | None:
        """Another replica for a program that has to leave its home. It prefers one with room, but never waits."""
        eligible = self._policy.eligible(arrival, candidates, deterministic=not store_available)
        eligible = [one for one in eligible if one.replica != arrival.home]
        if not store_available:
            return self._hashed(arrival, eligible)
        return self._best_with_room(arrival, eligible, None) or self._policy.best(arrival, eligible)

    def _better(self, arrival: Arrival, home: Candidate, candidates: list[Candidate]) -> Choice | None:
        """A replica that is better than the home by enough to migrate."""
        settings = self._settings
        here = self._policy.score(arrival, home)
        if here.seconds <= settings.move_gain_s:
            return None
        others = [one for one in self._policy.eligible(arrival, candidates) if one is not home]
        at_most_s = here.seconds - migration_margin_s(arrival, here, settings)
        best = self._best_with_room(arrival, others, None, at_most_s)
        if best is None or not migration_pays(arrival, here, best, settings, self._slo.ttft_s):
            return None
        return best

    def _move(
        self,
        turn_id: str,
        request: TurnRequest,
        record: ProgramRecord,
        choice: Choice,
        expected: ExpectedWork,
        reason: Placed,
        now_s: float,
    ) -> Go:
        before = record.home
        record.needed_tokens = round(choice.candidate.needs(expected))
        self._state.bind(record.key, Home(choice.candidate.replica, before.epoch + 1), record.needed_tokens)
        self._state.begin(turn_id, request, record, expected, choice.gap, now_s)
        return Go(record.home, reason, moved_from=before.replica)

    def _stay(self, turn_id: str, request: TurnRequest, record: ProgramRecord, reason: Placed, now_s: float) -> Go:
        """The turn goes to the program's home, whatever is known of that replica."""
        expected = self._expect(request, record.turns)
        self._state.begin(turn_id, request, record, expected, Gap(expected.prompt_tokens, 0.0), now_s)
        return Go(record.home, reason)

    # --- programs without a home --------------------------------------------------------------------------------------

    def _first(self, turn_id: str, request: TurnRequest, now_s: float, store_available: bool) -> Decision:
        expected = self._expect(request)
        arrival = self._arrival(request, expected, None)
        eligible = self._policy.eligible(arrival, self._state.candidates(now_s), deterministic=not store_available)
        if not eligible:
            return Refuse(Refused.NO_REPLICA, MIN_RETRY_S)
        if not store_available or not self._state.any_fresh(now_s):
            return self._without_store(turn_id, request, arrival, eligible, now_s)
        at_once, is_child = self._goes_at_once(request, arrival, eligible), self._is_child(request)
        sheddable = request.hints.sheddable
        taking = [one for one in eligible if at_once or is_child or not one.sheds(expected, sheddable=sheddable)]
        if not taking:
            return Refuse(Refused.LOAD_SHED, max(MIN_RETRY_S, min(one.load.shed_retry_after_s for one in eligible)))
        eligible = taking
        if at_once:
            choice = self._best_with_room(arrival, eligible, None) or self._policy.best(arrival, eligible)
        elif self._queue and not is_child:
            choice = None
        else:
            choice = self._best_with_room(arrival, eligible, None)
        if choice is not None:
            self._join_others(request.key, choice, now_s)
            return self._enter(turn_id, request, choice, expected, Placed.NEW, now_s)
        return self._wait(turn_id, request, expected, eligible, now_s)

    def _is_needed(self, request: TurnRequest) -> bool:
        """Whether a living program needs this turn: its parent, none of whose children lives, may wait for it.

        Without this, a parent and its child could wait for each other. One child at a time is enough.
        """
        parent = request.parent_key
        return parent is not None and self._state.program(parent) is not None and not self._state.has_children(parent)

    def _is_child(self, request: TurnRequest) -> bool:
        """Whether a living program started it, or another one lives that names the same parent: a sample of the same
        group. The programs of one parent are admitted as one working set.

        None is shed, since the work of the others would be lost, and those that wait come before all other programs.
        """
        parent = request.parent_key
        return parent is not None and (self._state.program(parent) is not None or self._state.has_children(parent))

    def _goes_at_once(self, request: TurnRequest, arrival: Arrival, eligible: list[Candidate]) -> bool:
        """Whether the program is admitted already, or needed by a program that is."""
        return self._is_needed(request) or any(arrival.name in one.residents for one in eligible)

    def _without_store(
        self, turn_id: str, request: TurnRequest, arrival: Arrival, eligible: list[Candidate], now_s: float
    ) -> Decision:
        resident = ranked(arrival.key, [one.replica for one in eligible if arrival.name in one.residents])
        if resident:
            choice = next(self._policy.score(arrival, one) for one in eligible if one.replica == resident[0])
            reason = Placed.FOUND
        else:
            hashed = self._hashed(arrival, eligible)
            if hashed is None:
                return Refuse(Refused.NO_REPLICA, MIN_RETRY_S)
            choice, reason = hashed, Placed.HASHED
        self._join_others(request.key, choice, now_s)
        return self._enter(turn_id, request, choice, arrival.expected, reason, now_s, UNKNOWN_EPOCH)

    def _hashed(self, arrival: Arrival, eligible: list[Candidate]) -> Choice | None:
        """A choice by the key and the replicas alone, on which all ingresses agree."""
        first = ranked(arrival.key, [one.replica for one in eligible])[:1]
        return next((self._policy.score(arrival, one) for one in eligible if one.replica in first), None)

    def _enter(
        self,
        turn_id: str,
        request: TurnRequest,
        choice: Choice,
        expected: ExpectedWork,
        reason: Placed,
        now_s: float,
        epoch: int = UNKNOWN_EPOCH + 1,
    ) -> Go:
        """The program is bound to the chosen replica."""
        record = self._state.program(request.key)
        if record is None:
            home = Home(choice.candidate.replica, epoch)
            needed = round(choice.candidate.needs(expected))
            record = self._state.bind(request.key, home, needed, request.parent_key)
        self._state.begin(turn_id, request, record, expected, choice.gap, now_s)
        return Go(record.home, reason)

    def _join_others(self, key: str, choice: Choice, now_s: float) -> None:
        """Waiting turns of the program go where it goes."""
        waiter = self._queue.waiter(key)
        if waiter is not None:
            for turn_id, request in self._queue.drop(waiter).items():
                go = self._enter(turn_id, request, choice, self._expect(request), Placed.NEW, now_s)
                self._ready.append((turn_id, go))

    # --- admission ----------------------------------------------------------------------------------------------------

    def _has_room(self, arrival: Arrival, waiter: Waiter | None) -> Callable[[Candidate], bool]:
        """Whether a replica has room for the program, which may be one that waits in the queue."""
        kept, empty_share = self._queue.reserved_for(waiter), self._settings.empty_share
        return lambda one: one.replica != kept and one.has_room(arrival.expected, empty_share)

    def _best_with_room(
        self, arrival: Arrival, candidates: list[Candidate], waiter: Waiter | None, at_most_s: float = inf
    ) -> Choice | None:
        return self._policy.best(arrival, candidates, fits=self._has_room(arrival, waiter), at_most_s=at_most_s)

    def _wait(
        self, turn_id: str, request: TurnRequest, expected: ExpectedWork, eligible: list[Candidate], now_s: float
    ) -> Decision:
        like = eligible[0]
        work_s = like.work_s(expected)
        refusal = self._queue.refusal(request, work_s, self._expected_admissions_per_s(eligible), now_s)
        if refusal is not None:
            return refusal
        prefill_s = expected.prompt_tokens * like.load.token_s
        turn_s = prefill_s + expected.output_tokens * like.step_s
        bounds = self._tenant_slos.get(request.tenant, self._slo).bounds
        ttft_s, e2e_s, deadline_s = bounds.ttft_bound_s(prefill_s), bounds.e2e_s, request.hints.deadline_s
        ends = [bound_s - turn_s for bound_s in (e2e_s, deadline_s) if bound_s is not None]
        on_time_s = min(inf if ttft_s is None else ttft_s - prefill_s, *ends, inf)
        self._ready += self._queue.add(turn_id, request, now_s, work_s=work_s, on_time_until_s=now_s + on_time_s)
        return Wait()

    def _expected_admissions_per_s(self, eligible: list[Candidate]) -> float:
        """Admissions a second by the means of the replicas: as many programs as end."""
        workload = self._state.workload
        rate = 0.0
        for one in eligible:
            turn_s = workload.pause_s + workload.output_tokens * one.step_s + workload.new_tokens * one.load.token_s
            rate += max(1.0, one.programs) / max(1e-3, turn_s * workload.program_turns)
        return rate

    def _admit_children(self, now_s: float) -> None:
        """Admit the children of living programs: those that fit, and those without which a program cannot go on.

        As many as `LOOKAHEAD` of a parent, and about `CHILD_TRIES` of all, are tried without success. Then the other
        parents come first at the next time.
        """
        failed: dict[str, int] = {}
        for parent, children in self._queue.children():
            if sum(failed.values()) >= CHILD_TRIES:
                self._queue.postpone(failed)
                break
            if not self._is_child(children[0].request):
                continue
            for waiter in children:
                if not self._admit_child(waiter, now_s):
                    failed[parent] = failed.get(parent, 0) + 1
                    if failed[parent] >= LOOKAHEAD:
                        break

    def _admit_child(self, waiter: Waiter, now_s: float) -> bool:
        arrival = self._arrival(waiter.request, self._expect(waiter.request), None)
        eligible = self._policy.eligible(arrival, self._state.candidates(now_s))
        choice = self._best_with_room(arrival, eligible, waiter)
        if choice is None and self._is_needed(waiter.request):
            choice = self._policy.best(arrival, eligible)
        if choice is not None:
            self._enter_waiting(waiter, choice, Placed.NEW, now_s)
        return choice is not None

    def _enter_waiting(self, waiter: Waiter, choice: Choice, reason: Placed, now_s: float) -> None:
        for turn_id, request in self._queue.take(waiter, now_s).items():
            go = self._enter(turn_id, request, choice, self._expect(request), reason, now_s)
            self._ready.append((turn_id, go))

    def _admit_one(self, now_s: float) -> bool:
        """Admit the first program that fits; False if none of those that are tried now does."""
        candidates = self._state.candidates(now_s)
        fresh = self._state.any_fresh(now_s)
        for waiter in self._queue.in_order(now_s):
            expected = self._expect(waiter.request)
            arrival = self._arrival(waiter.request, expected, None)
            eligible = self._policy.eligible(arrival, candidates)
            if fresh:
                choice = self._best_with_room(arrival, eligible, waiter)
            else:
                choice = self._hashed(arrival, list(filter(self._has_room(arrival, waiter), eligible)))
            if choice is None:
                self._reserve(waiter, arrival, eligible)
                continue
            self._enter_waiting(waiter, choice, Placed.NEW if fresh else Placed.HASHED, now_s)
            return True
        return False

    def _reserve(self, waiter: Waiter, arrival: Arrival, eligible: list[Candidate]) -> None:
        """A program that is overdue gets the next room of some replica, however much it needs."""
        if waiter.reserved is not None and any(one.replica == waiter.reserved for one in eligible):
            return
        if not self._queue.is_overdue(waiter):
            return
        most = max(eligible, key=lambda one: (one.bound_tokens - one.occupied_tokens, one.replica), default=None)
        self._queue.reserve(waiter, None if most is None else most.replica)
