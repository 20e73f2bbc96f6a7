"""The way of a turn to its replica: `Front` decides, the store settles between ingresses, the placer does the rest.

Lives in one event loop. A program's home is asked of the store once (a turn of a program that is known here costs no
call), written once, and moved by compare-and-set; without the store, `Front` decides so that all ingresses agree, and
what was decided is written when the store answers again.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from cluster.clock import Clock
from cluster.errors import Overloaded
from cluster.placement_store import PlacementStore
from cluster.routing import Home, ReplicaSnapshot
from router.decisions import Front, Go, Placed, Refuse, Refused, TurnRequest, Wait
from router.farewells import Farewells, MovedAway
from router.places import Fallback, Placement, facts, refusal
from router.sightings import Sightings
from router.single_flight import SingleFlight

PUMP_S = 0.1
"""While somebody waits to be admitted, `Front` is asked so often at least."""
BEGIN_S = 5.0
"""In a process that has just begun, a turn waits so long for the first news of replicas."""
MAX_ROUNDS = 4
"""How often a turn is decided anew because the store has another home for it, before that home is taken."""
SWEEPS = 4
"""How often within a home's expiry it is touched at least, if it is used."""
SWEEP_S = 60.0
"""And so often, to learn whether the store has another."""
WRITTEN_AT_ONCE = 64
"""Homes, when the store is back."""
MAX_WAITS = 16_384
"""Waits that are kept for who asks; of more, the oldest are lost."""
PROBE_S = 1.0
"""A store that failed is asked so often whether it answers again; until then nobody else waits for it."""


@dataclass(slots=True)
class _Program:
    """What is known of a program here."""

    stored: Home | None = None
    """As the store has it; None: it is not known to have one."""
    used_s: float = 0.0
    turns: int = 0
    """In flight, or waiting."""


class Placer:
    """Places turns by a `Front`.

    Args:
        front: decides.
        store: where ingresses agree.
        clock: all of `Front`'s time.
        moved_away: told of each program that leaves a replica which is still there.
        idle_s: a program without a turn for so long is forgotten; the expiry of the store's homes.
        max_programs: most programs that are remembered.
    """

    def __init__(
        self,
        front: Front,
        store: PlacementStore,
        clock: Clock,
        *,
        moved_away: MovedAway,
        idle_s: float,
        max_programs: int,
    ) -> None:
        self.placements: Counter[Placed] = Counter()
        self.refusals: Counter[Refused] = Counter()
        self.fallbacks: Counter[Fallback] = Counter()
        self._front = front
        self._store = store
        self._clock = clock
        self._farewells = Farewells(moved_away, clock)
        self._idle_s = idle_s
        self._max_programs = max_programs
        self._turn_ids = count()
        self._programs: OrderedDict[str, _Program] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[Go | Refuse]] = {}
        self._asking = SingleFlight()
        self._waits_s: deque[float] = deque(maxlen=MAX_WAITS)
        self._background: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.sightings = Sightings(clock)
        self._begun = asyncio.Event()
        self._swept_s = clock.now_s()

    # --- what others tell it ------------------------------------------------------------------------------------------

    def observe(self, snapshots: Mapping[str, ReplicaSnapshot | None]) -> None:
        """The replicas that can be reached, and what they say of themselves."""
        self.sightings.observe(snapshots)
        if snapshots:
            self._begun.set()
        self._front.observe(snapshots, self._clock.now_s())
        self._farewells.tell(snapshots)
        self._pump()

    async def attend(self) -> None:
        """Keeps the store's homes from expiring, and looks whether a store that failed is back; for ever."""
        while True:
            await asyncio.sleep(PROBE_S)
            if not self._store.healthy:
                if await self._store.touch({}) is not None:
                    await self.sweep(everything=True)
            elif self._clock.now_s() - self._swept_s >= min(SWEEP_S, self._idle_s / SWEEPS):
                await self.sweep()

    async def sweep(self, *, everything: bool = False) -> None:
        """Touch the homes of programs that had a turn since the last time; forget those that had none for long.

        ``everything``: the store was away, and may have lost any.
        """
        now_s, since_s = self._clock.now_s(), self._swept_s
        self._swept_s = now_s
        while self._programs:
            key, oldest = next(iter(self._programs.items()))
            if oldest.turns or oldest.used_s > now_s - self._idle_s:
                break
            self._drop(key)
        homes = {
            key: known.stored
            for key, known in self._programs.items()
            if known.stored and (everything or known.turns or known.used_s >= since_s)
        }
        for key in await self._store.touch(homes) or ():
            if (known := self._programs.get(key)) is not None:
                known.stored = None  # its next turn claims it again, or learns where it lives
        if everything:
            await self._write_all()

    async def _write_all(self) -> None:
        """Write the homes that the store does not have before other ingresses ask for them."""
        unwritten = [key for key, known in self._programs.items() if known.stored is None]
        for start in range(0, len(unwritten), WRITTEN_AT_ONCE):
            if not self._store.healthy:
                return
            homes = {key: self._front.home_of(key) for key in unwritten[start : start + WRITTEN_AT_ONCE]}
            claims = (self._write(key, Go(home, Placed.STAYED), None) for key, home in homes.items() if home)
            await asyncio.gather(*claims)

    # --- turns --------------------------------------------------------------------------------------------------------

    async def place(self, request: TurnRequest) -> Placement:
        """A place for a turn; it may wait to be admitted.

        Raises:
            Overloaded: it is refused; TooManyRequests where that is its tenant's doing.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                await self._begun.wait()
        known = self._use(request)
        try:
            for last_round in (*(False,) * (MAX_ROUNDS - 1), True):
                shared = await self._asked_the_store(request)
                turn_id = f"turn-{next(self._turn_ids)}"
                placement = None
                try:
                    go = await self._decide(turn_id, request, shared)
                    home = go.home if request.lone else await self._settle(request, go)
                    same = home.replica == go.home.replica
                    if last_round or same or self._is_there(home, request):
                        self.placements[reason := go.reason if same else Placed.JOINED] += 1
                        placement = Placement(self, request, home.replica, home, turn_id, reason.value)
                        return placement
                finally:
                    if placement is None:
                        self._front.ended(turn_id, self._clock.now_s())
                        self._pump()
            raise AssertionError("the last round returns")
        except BaseException:
            known.turns -= 1
            raise

    def ended(self, placement: Placement, *, context_tokens: int | None, complete: bool) -> None:
        """Called by `Placement.end`, once."""
        request, now_s = placement.request, self._clock.now_s()
        self._front.ended(placement.turn_id, now_s, context_tokens=context_tokens)
        if (known := self._programs.get(request.key)) is not None:
            known.turns = max(0, known.turns - 1)  # it may have been forgotten and met again meanwhile
            known.used_s = now_s
            self._programs.move_to_end(request.key)
            if request.last and complete and not known.turns:
                self.forget(request.key)
        self._pump()

    async def fenced(self, placement: Placement, epoch: int | None) -> None:
        """The replica knows of a later epoch: learn where the program lives now.

        Where the store does not know better, it has lost the move: the program stays, with an epoch above all.
        """
        key, refused = placement.request.key, placement.home
        known = self._front.home_of(key)
        if refused is None or (known is not None and known.epoch > refused.epoch):
            return  # learnt meanwhile, by another turn
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
        """The replica on which a program lives; None: on none. ``fresh``: as far as the store knows now."""
        home = self._front.home_of(key)
        if (fresh or home is None) and self._store.healthy:
            await self._look_up(key)
            home = self._front.home_of(key)
        return None if home is None else home.replica

    def forget(self, key: str) -> None:
        """The program has ended: here, and in the store."""
        home = self._front.home_of(key)
        self._drop(key)
        if home is not None:
            self._background.add(task := asyncio.create_task(self._store.forget(key, home.epoch)))
            task.add_done_callback(self._background.discard)

    # --- what is shown ------------------------------------------------------------------------------------------------

    def start_s(self) -> float | None:
        """Seconds within which a turn of a new program is expected to start; None: no replica is there."""
        return self._front.start_s(self._clock.now_s())

    @property
    def waiting(self) -> int:
        """Turns that wait to be admitted."""
        return len(self._waiting)

    @property
    def moves(self) -> int:
        """Programs that this ingress has moved."""
        return sum(count for reason, count in self.placements.items() if reason.value.startswith("moved"))

    def take_waits_s(self) -> list[float]:
        """How long each turn waited that was admitted since the last time."""
        return [self._waits_s.popleft() for _ in range(len(self._waits_s))]

    def view(self) -> dict[str, Any]:
        """For operators."""
        replicas = {
            replica: {"snapshot_age_s": age_s, **facts(self.sightings[replica])}
            for replica, age_s in self.sightings.ages_s().items()
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

    async def _asked_the_store(self, request: TurnRequest) -> bool:
        """Whether the store answers. A program that is not known here may have a home: its turns are not to wait."""
        shared = request.lone or self._store.healthy
        if not request.lone and shared and self._front.home_of(request.key) is None:
            shared = await self._look_up(request.key)
        if not shared:
            self.fallbacks[Fallback.STORE_GONE] += 1
        return shared

    async def _decide(self, turn_id: str, request: TurnRequest, shared: bool) -> Go:
        asked_s = self._clock.now_s()
        decision = self._front.turn(turn_id, request, asked_s, shared=shared)
        if isinstance(decision, Wait):
            decision = await self._admitted(turn_id)
        match decision:
            case Refuse(reason, retry_after_s):
                self.refusals[reason] += 1
                raise refusal(reason, retry_after_s)
            case Go():
                self._waits_s.append(self._clock.now_s() - asked_s)
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
        """Let those go whose wait is over."""
        for turn_id, outcome in self._front.admitted(self._clock.now_s()):
            future = self._waiting.get(turn_id)
            if future is not None and not future.done():
                future.set_result(outcome)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pump()

    def _is_there(self, home: Home, request: TurnRequest) -> bool:
        return home.replica in self.sightings and home.replica not in request.avoid

    # --- agreeing -----------------------------------------------------------------------------------------------------

    async def _look_up(self, key: str) -> bool:
        """Learn from the store where the program lives, if it does; whether the store answers."""
        return bool(await self._asking.do("get " + key, lambda: self._found(key)))

    async def _found(self, key: str) -> bool:
        answer = await self._store.get(key)
        if answer is not None and answer[0] is not None:
            self._learn(key, answer[0], stored=True)
        return answer is not None

    async def _settle(self, request: TurnRequest, go: Go) -> Home:
        """The home that the program has by agreement: where `Front` wants it, or where another ingress was faster."""
        known = self._use(request, begins=False)
        if known.stored == go.home or not self._store.healthy:
            return go.home
        held = await self._write(request.key, go, known.stored)
        if held is None:
            self.fallbacks[Fallback.STORE_GONE] += 1
        return held or go.home

    async def _write(self, key: str, go: Go, before: Home | None) -> Home | None:
        held: Home | None = await self._asking.do("set " + key, lambda: self._written(key, go, before))
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
            self._farewells.say(left, key, held.epoch, self.sightings)
        return held

    def _learn(self, key: str, home: Home, *, stored: bool) -> None:
        known = self._programs.setdefault(key, _Program(used_s=self._clock.now_s()))
        known.stored = home if stored else None
        self._front.settle(key, home, self._clock.now_s())

    # --- remembering --------------------------------------------------------------------------------------------------

    def _use(self, request: TurnRequest, *, begins: bool = True) -> _Program:
        """The program's entry; lone turns have one that nobody else sees."""
        if request.lone:
            return _Program(turns=1)
        known = self._programs.setdefault(request.key, _Program())
        known.used_s = self._clock.now_s()
        known.turns += begins
        self._programs.move_to_end(request.key)
        while len(self._programs) > self._max_programs:
            key, oldest = next(iter(self._programs.items()))
            if oldest.turns:
                break
            self._drop(key)
        return known

    def _drop(self, key: str) -> None:
        self._programs.pop(key, None)
        self._front.forget(key, self._clock.now_s())

    async def aclose(self) -> None:
        """Stop what is under way; whoever waits to be admitted is told that this process ends."""
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Overloaded("this ingress ends; retry", retry_after_s=1))
        self._farewells.stop()
        self._asking.stop()
        for task in self._background:
            task.cancel()
        await self._store.close()
