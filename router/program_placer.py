"""Brings a turn to its replica: the engine decides, the store makes ingresses agree, and replicas hear of moves.

All of it lives in one event loop. A program's home is read from the store once, so that later turns cost no call. It is
written once, and moved by compare-and-set. Without the store, the engine decides so that all ingresses agree, and the
homes are written when the store is back.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from cluster.core.clock import Clock
from cluster.core.errors import Overloaded
from cluster.core.replica_snapshot import Home, ReplicaSnapshot
from cluster.core.scaling_report import Demand
from cluster.core.supervision import SupervisedTasks
from cluster.store.placements import PlacementStore
from router.admission_queue import MIN_RETRY_S
from router.cold_start import ColdStart
from router.decisions import Go, Placed, Refuse, Refused, TurnRequest, Wait
from router.move_notifier import MovedAway, MoveNotifier
from router.placement import Fallback, Placement, rejection, to_public_dict
from router.placement_engine import PlacementEngine
from router.snapshots import ReplicaHealth

PUMP_S = 0.1
"""While turns wait for admission, the engine is polled at least this often."""
FIRST_SNAPSHOT_S = 5.0
"""In a process that has just started, a turn waits this long for the first replica."""
MAX_ROUNDS = 4
"""A turn is placed this often because the store has another home for it; then that home is taken, unless it has failed
the turn."""
SWEEPS = 4
"""A home in use is touched at least this often within its expiry."""
SWEEP_S = 60.0
"""And at least this often, to find out whether the store has another home."""
WRITTEN_AT_ONCE = 64
"""Homes written at once when the store is back."""
MAX_WAITS = 16_384
"""Waiting times kept for the metrics; of more, the oldest are lost."""
EVICTION_TRIES = 4
"""Programs that each turn tries to evict while there are too many. Those with turns stay."""
PROBE_S = 1.0
"""A store that failed is probed this often. Until it answers, no turn waits for it."""


@dataclass(slots=True)
class _Program:
    """What this ingress knows of a program."""

    stored: Home | None = None
    """Its home in the store; None: the store is not known to have one."""
    used_s: float = 0.0
    turns: int = 0
    """Turns in flight or waiting."""


class SingleFlight:
    """Runs concurrent work of the same name once."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    async def do(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of the work of that name. Concurrent callers share it, and none of them can cancel it."""
        task = self._tasks.get(name)
        if task is None:
            self._tasks[name] = task = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return await asyncio.shield(task)

    def stop(self) -> None:
        """Cancel all of it."""
        for task in self._tasks.values():
            task.cancel()


class ProgramPlacer:
    """Places turns by the engine's decisions.

    Args:
        engine: decides.
        store: where ingresses agree on homes.
        clock: gives the engine its time.
        tasks: run background work; their owner closes them.
        moved_away: notifies a replica that a program has left it.
        idle_s: a program without a turn for this long is forgotten; also the expiry of homes in the store.
        max_programs: bound of the programs that are remembered.
        cold_start: holds turns while there is no replica; None: they are rejected.
    """

    def __init__(
        self,
        engine: PlacementEngine,
        store: PlacementStore,
        clock: Clock,
        *,
        tasks: SupervisedTasks,
        moved_away: MovedAway,
        idle_s: float,
        max_programs: int,
        cold_start: ColdStart | None = None,
    ) -> None:
        self.placements: Counter[Placed] = Counter()
        self.refusals: Counter[Refused] = Counter()
        self.fallbacks: Counter[Fallback] = Counter()
        self._engine = engine
        self._store = store
        self._clock = clock
        self._tasks = tasks
        self._notifier = MoveNotifier(moved_away, clock, tasks, self._count_unacknowledged)
        self._idle_s = idle_s
        self._max_programs = max_programs
        self._cold_start = cold_start
        self._turn_ids = count()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[Go | Refuse]] = {}
        self._store_calls = SingleFlight()
        self._waits_s: deque[float] = deque(maxlen=MAX_WAITS)
        self._timer: asyncio.TimerHandle | None = None
        self.replicas = ReplicaHealth(clock)
        self._started = asyncio.Event()
        self._swept_s = clock.now_s()
        self._made_up = 0
        """Failures of the store after which all homes were touched or written."""

    # --- events -------------------------------------------------------------------------------------------------------

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None]) -> None:
        """The replicas that can be reached now, with their snapshots."""
        self.replicas.observe(snapshots)
        if snapshots:
            self._started.set()
        if self._cold_start is not None:
            self._cold_start.observe(len(snapshots))
            self._cold_start.start_s = max(self.replicas.starts_s(), default=self._cold_start.start_s)
        self._engine.observe(snapshots, self._clock.now_s())
        self._notifier.deliver(snapshots)
        self._pump()

    async def attend(self) -> None:
        """Repeat notices of moves, keep homes from expiring, and probe a store that failed. Never returns."""
        while True:
            await asyncio.sleep(PROBE_S)
            self._notifier.deliver(self.replicas)
            failures = self._store.failures.total()
            if not self._store.healthy or failures != self._made_up:
                # Any call may find that the store is back, and a call that failed later may have lost a home too.
                if await self._store.touch({}) is not None:
                    await self.sweep(everything=True)
                    self._made_up = failures
            elif self._clock.now_s() - self._swept_s >= min(SWEEP_S, self._idle_s / SWEEPS):
                await self.sweep()

    async def sweep(self, *, everything: bool = False) -> None:
        """Touch the homes of programs that had a turn since the last sweep, and forget idle programs.

        ``everything``: touch all homes, since the store was unavailable and may have lost any.
        """
        now_s, since_s = self._clock.now_s(), self._swept_s
        self._swept_s = now_s
        for key, program in list(self._programs.items()):
            if program.used_s > now_s - self._idle_s:
                break  # in the order of their last use
            if not program.turns:
                self._drop(key)
        homes = {
            key: known.stored
            for key, known in self._programs.items()
            if known.stored and (everything or known.turns or known.used_s >= since_s)
        }
        for key in await self._store.touch(homes) or ():
            if (known := self._programs.get(key)) is not None:
                known.stored = None  # its next turn claims it again, or reads the new home
        if everything:
            await self._write_all()

    async def _write_all(self) -> None:
        """Write the homes that the store lacks, before other ingresses read them."""
        unwritten = [key for key, known in self._programs.items() if known.stored is None]
        for start in range(0, len(unwritten), WRITTEN_AT_ONCE):
            if not self._store.healthy:
                return
            homes = {key: self._engine.home_of(key) for key in unwritten[start : start + WRITTEN_AT_ONCE]}
            claims = (self._write(key, Go(home, Placed.STAYED), None) for key, home in homes.items() if home)
            await asyncio.gather(*claims)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def place(self, request: TurnRequest) -> Placement:
        """A place for a turn. It may wait for admission.

        Raises:
            Overloaded: it is rejected; TooManyRequests: its tenant exceeds its share.
        """
        if self._cold_start is not None:
            await self._cold_start.replica()
        elif not self._started.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SNAPSHOT_S):
                    await self._started.wait()
        known = self._use(request)
        try:
            for left in reversed(range(MAX_ROUNDS)):
                store_available = await self._read_home(request, begins=left == MAX_ROUNDS - 1)
                turn_id = f"turn-{next(self._turn_ids)}"
                placement = None
                try:
                    go = await self._decide(turn_id, request, store_available)
                    home = go.home if request.single_turn else await self._settle(request, go)
                    same = home.replica == go.home.replica
                    if home.replica not in request.avoid and (not left or same or home.replica in self.replicas):
                        self.placements[reason := go.reason if same else Placed.JOINED] += 1
                        placement = Placement(self, request, home.replica, home, turn_id, reason.value)
                        return placement
                finally:
                    if placement is None:
                        self._engine.ended(turn_id, self._clock.now_s())
                        self._pump()
            self.refusals[Refused.NO_REPLICA] += 1
            raise rejection(Refused.NO_REPLICA, MIN_RETRY_S)  # each time it got a home that has failed it
        except BaseException:
            known.turns -= 1
            raise

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Called by `Placement.end`, once."""
        request, now_s = placement.request, self._clock.now_s()
        self._engine.ended(placement.turn_id, now_s, context_tokens=context_tokens)
        if (known := self._programs.get(request.key)) is not None:
            known.turns = max(0, known.turns - 1)  # it may have been forgotten and met again meanwhile
            known.used_s = now_s
            self._programs.move_to_end(request.key)
            if request.last and complete and not known.turns:
                self.forget(request.key)
        self._pump()

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """The replica knows a later epoch: read the program's home again.

        Where the store has no later home, it has lost a move. Then the program stays, with an epoch above all others.
        """
        key, refused = placement.request.key, placement.home
        known = self._engine.home_of(key)
        if refused is None or (known is not None and known.epoch > refused.epoch):
            return  # another turn has read it meanwhile
        self.fallbacks[Fallback.FENCED] += 1
        latest = max(refused.epoch, epoch or 0)
        answer = (await self._store.get(key)) if self._store.healthy else None
        held = None if answer is None else answer[0]
        if answer is not None and (
            held is None or held.epoch <= refused.epoch or held == Home(refused.replica, latest)
        ):
            held = await self._store.move(key, latest, refused.replica)
        self._learn(key, held or Home(refused.replica, latest + 1), stored=held is not None)

    async def session_of(self, key: str, *, fresh: bool = False) -> str | None:
        """The replica that a program is bound to; None: it is bound to none. ``fresh``: the store is asked."""
        home = self._engine.home_of(key)
        if (fresh or home is None) and self._store.healthy:
            await self._look_up(key)
            home = self._engine.home_of(key)
        return None if home is None else home.replica

    def forget(self, key: str) -> None:
        """The program has ended. It is forgotten here and in the store."""
        known = self._programs.get(key)
        # The engine has forgotten a program whose last turn has ended.
        home = self._engine.home_of(key) or (None if known is None else known.stored)
        self._drop(key)
        if home is not None:
            self._tasks.run("forget", self._store.forget(key, home.epoch))

    # --- for metrics and operators ------------------------------------------------------------------------------------

    def start_s(self) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: there is no replica."""
        return self._engine.start_s(self._clock.now_s())

    def demand(self, turns: int, missed: int) -> Demand:
        """The demand that this ingress sees; see `PlacementEngine.demand`."""
        return self._engine.demand(self._clock.now_s(), turns, missed)

    @property
    def waiting(self) -> int:
        """Turns that wait for admission, or for the first replica."""
        return len(self._waiting) + (0 if self._cold_start is None else self._cold_start.waiting)

    @property
    def moves(self) -> int:
        """Migrations by this ingress."""
        return sum(count for reason, count in self.placements.items() if reason.value.startswith("moved"))

    def take_waits_s(self) -> list[float]:
        """The waiting times of the turns that were admitted since the last call."""
        return [self._waits_s.popleft() for _ in range(len(self._waits_s))]

    def view(self) -> dict[str, Any]:
        """For operators."""
        replicas = {
            replica: {"snapshot_age_s": age_s, **to_public_dict(self.replicas[replica])}
            for replica, age_s in self.replicas.ages_s().items()
        }
        return {
            "router": "caesura",
            "programs": len(self._programs),
            "turns": sum(known.turns for known in self._programs.values()),
            "waiting": self.waiting,
            "replicas": replicas,
            "placements": {reason.value: n for reason, n in self.placements.items()},
            "refusals": {reason.value: n for reason, n in self.refusals.items()},
            "fallbacks": {kind.value: n for kind, n in self.fallbacks.items()},
            "moves": self.moves,
            "store": {
                "healthy": self._store.healthy,
                "failures": {k.value: n for k, n in self._store.failures.items()},
            },
        }

    # --- deciding -----------------------------------------------------------------------------------------------------

    async def _read_home(self, request: TurnRequest, *, begins: bool) -> bool:
        """Read the home of a program that is unknown here, since its turns must not wait. Whether the store answers.

        A program that begins has none. If another ingress has placed it all the same, its claim returns that home, or
        it is found while the turn waits for admission, or before it is refused. ``begins``: no round has placed this
        turn before.
        """
        store_available = request.single_turn or self._store.healthy
        is_known = request.single_turn or self._engine.home_of(request.key) is not None
        if begins and request.first and not request.avoid:
            # The engine forgets a program that ends with this turn, also where an attempt at the turn has failed. Then
            # the store still has the home, and only a later epoch replaces it.
            known = self._programs.get(request.key)
            is_known = is_known or known is None or known.stored is None
        if store_available and not is_known:
            store_available = await self._look_up(request.key)
        if not store_available:
            self.fallbacks[Fallback.STORE_GONE] += 1
        return store_available

    async def _decide(self, turn_id: str, request: TurnRequest, store_available: bool) -> Go:
        arrived_s = self._clock.now_s()
        decision = self._engine.turn(turn_id, request, arrived_s, store_available=store_available)
        may_live_elsewhere = request.first and store_available and not request.single_turn
        if isinstance(decision, Refuse) and may_live_elsewhere:
            await self._look_up(request.key)
            if self._engine.home_of(request.key) is not None:  # a program that lives elsewhere is not refused as new
                decision = self._engine.turn(turn_id, request, arrived_s)
        if isinstance(decision, Wait):
            if may_live_elsewhere:
                self._tasks.run("look up", self._look_up(request.key))
            decision = await self._admitted(turn_id)
        match decision:
            case Refuse(reason, retry_after_s):
                self.refusals[reason] += 1
                raise rejection(reason, retry_after_s)
            case Go():
                self._waits_s.append(self._clock.now_s() - arrived_s)
                return decision

    async def _admitted(self, turn_id: str) -> Go | Refuse:
        future: asyncio.Future[Go | Refuse] = asyncio.get_running_loop().create_future()
        self._waiting[turn_id] = future
        try:
            self._pump()
            return await future
        finally:
            del self._waiting[turn_id]

    def _pump(self) -> None:
        """Send the turns whose wait is over."""
        for turn_id, outcome in self._engine.admitted(self._clock.now_s()):
            future = self._waiting.get(turn_id)
            if future is not None and not future.done():
                future.set_result(outcome)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()

    # --- agreeing -----------------------------------------------------------------------------------------------------

    async def _look_up(self, key: str) -> bool:
        """Read the program's home from the store. Whether the store answers."""
        return bool(await self._store_calls.do("get " + key, lambda: self._found(key)))

    async def _found(self, key: str) -> bool:
        answer = await self._store.get(key)
        if answer is not None and answer[0] is not None:
            self._learn(key, answer[0], stored=True)
        return answer is not None

    async def _settle(self, request: TurnRequest, go: Go) -> Home:
        """The home that all ingresses agree on: the engine's choice, or that of an ingress that was faster."""
        known = self._use(request, begins=False)
        if known.stored == go.home or not self._store.healthy:
            return go.home
        held = await self._write(request.key, go, known.stored)
        if held is None:
            self.fallbacks[Fallback.STORE_GONE] += 1
        return held or go.home

    async def _write(self, key: str, go: Go, before: Home | None) -> Home | None:
        held: Home | None = await self._store_calls.do("set " + key, lambda: self._written(key, go, before))
        return held

    async def _written(self, key: str, go: Go, before: Home | None) -> Home | None:
        if before is not None and before.epoch < go.home.epoch:
            held = await self._store.move(key, go.home.epoch - 1, go.home.replica)
        else:
            held = await self._store.claim(key, go.home)
        if held is None:
            return None
        self._learn(key, held, stored=True)
        left = go.moved_from
        if held == go.home and left is not None and left != held.replica:
            self._notifier.notify(left, key, held.epoch, self.replicas)
        return held

    def _learn(self, key: str, home: Home, *, stored: bool) -> None:
        known = self._programs.setdefault(key, _Program(used_s=self._clock.now_s()))
        known.stored = home if stored else None
        self._notifier.withdraw(home.replica, key)
        self._engine.settle(key, home, self._clock.now_s())

    # --- remembering --------------------------------------------------------------------------------------------------

    def _use(self, request: TurnRequest, *, begins: bool = True) -> _Program:
        """The program's entry. A turn of no program gets one of its own."""
        if request.single_turn:
            return _Program(turns=1)
        known = self._programs.setdefault(request.key, _Program())
        known.used_s = self._clock.now_s()
        known.turns += begins
        self._programs.move_to_end(request.key)
        self._evict()
        return known

    def _evict(self) -> None:
        """Drop the least recently used programs while there are too many. Those with turns stay, and count as used."""
        for _ in range(EVICTION_TRIES):
            if len(self._programs) <= self._max_programs:
                return
            key, oldest = next(iter(self._programs.items()))
            if oldest.turns:
                oldest.used_s = self._clock.now_s()
                self._programs.move_to_end(key)
            else:
                self._drop(key)

    def _count_unacknowledged(self) -> None:
        self.fallbacks[Fallback.MOVE_UNACKNOWLEDGED] += 1

    def _drop(self, key: str) -> None:
        self._programs.pop(key, None)
        self._engine.forget(key, self._clock.now_s())

    async def aclose(self) -> None:
        """Stop all work. Turns that wait for admission are rejected."""
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Overloaded("this ingress ends; retry", retry_after_s=1))
        self._store_calls.stop()
        await self._store.close()
