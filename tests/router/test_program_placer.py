"""The placer: one home per program whoever races, no turn lost, with a real Redis that may be gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import ControlTimeout, Overloaded, ReplicaGone, TooManyRequests
from cluster.core.supervision import SupervisedTasks
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.placements import PlacementStore
from router.cold_start import ColdStart
from router.decisions import Go, Home, Placed, Refuse, Refused, TurnRequest, Wait
from router.placement import Fallback
from router.program_placer import ProgramPlacer
from tests.router.router_views import snapshot
from tests.router.scripted_engine import ScriptedEngine, at
from tests.waiting import WITHIN_S, until

KEY = "default/program"
REPLICAS = ("r0", "r1", "r2")


class Ingress:
    """A placer with its parts."""

    def __init__(self, url: str, choose: Any) -> None:
        self.engine = ScriptedEngine(choose)
        self.clock = ManualClock()
        self.told: list[tuple[str, str, int]] = []
        self.failures: list[Exception] = []
        self.cold_start: ColdStart | None = None
        self.store = PlacementStore(url, model="tiny", timeout_s=10.0, expiry_s=100.0, clock=self.clock)
        self.tasks = SupervisedTasks("ingress", self.clock)
        self.placer = self.make_placer()
        self.see(*REPLICAS)

    def make_placer(self) -> ProgramPlacer:
        limits: dict[str, Any] = {"idle_s": 100.0, "max_programs": 1000, "cold_start": self.cold_start}
        return ProgramPlacer(self.engine, self.store, self.clock, tasks=self.tasks, moved_away=self._tell, **limits)

    async def aclose(self) -> None:
        await self.tasks.aclose()
        await self.placer.aclose()

    async def _tell(self, replica: str, key: str, epoch: int) -> None:
        if self.failures:
            raise self.failures.pop()
        self.told.append((replica, key, epoch))

    def see(self, *replicas: str) -> None:
        self.placer.observe(dict.fromkeys(replicas))

    async def turn(self, key: str = KEY, **more: Any) -> Home:
        """One turn, placed and ended."""
        with await self.placer.place(request(key, **more)) as placement:
            assert placement.home is not None
            return placement.home


def request(key: str = KEY, **more: Any) -> TurnRequest:
    return TurnRequest(key=key, tenant="default", prompt_tokens=10, **more)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as embedded:
        yield embedded


@pytest.fixture
async def ingress(server: EmbeddedRedis) -> AsyncIterator[Callable[..., Ingress]]:
    made: list[Ingress] = []

    def make(choose: Any = None) -> Ingress:
        made.append(Ingress(server.url, choose or at("r0")))
        return made[-1]

    yield make
    for one in made:
        assert not one.engine.in_flight, "every turn is ended once"
        await one.aclose()


async def never_called(*arguments: object) -> None:
    raise AssertionError(arguments)


async def probed(one: Ingress) -> None:
    """What `attend` does until the store answers again."""
    async with asyncio.timeout(60):
        while await one.store.touch({}) is None:
            pass
    await one.placer.sweep(everything=True)


# --- agreeing ---------------------------------------------------------------------------------------------------------


async def test_first_turns_that_race_on_many_ingresses_land_together(ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [ingress(at(replica)) for replica in REPLICAS]
    all_have_chosen = asyncio.Barrier(len(several))

    def after_the_others(claim):
        async def claimed(key: str, home: Home) -> Home | None:
            await all_have_chosen.wait()
            return await claim(key, home)

        return claimed

    for one in several:
        monkeypatch.setattr(one.store, "claim", after_the_others(one.store.claim))
    homes = await asyncio.gather(*(one.turn() for one in several * 10))
    assert len(set(homes)) == 1
    assert {one.engine.home_of(KEY) for one in several} == set(homes)
    joined = sum(one.placer.placements[Placed.JOINED] for one in several)
    assert joined >= 2, "two of the three had wanted another replica"


async def test_a_program_that_is_known_costs_no_call(ingress, server) -> None:
    a = ingress()
    home = await a.turn()
    server.stop()
    assert [await a.turn() for _ in range(3)] == [home] * 3
    assert a.store.healthy


async def test_a_later_turn_on_another_ingress_finds_the_home_and_does_not_wait(ingress) -> None:
    a, b = ingress(at("r1")), ingress(lambda request: Wait())
    home = await a.turn()
    assert await b.turn() == home
    assert b.placer.placements == {Placed.STAYED: 1}


async def test_a_first_turn_is_not_looked_up(ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    a = ingress()
    monkeypatch.setattr(a.store, "get", never_called)
    assert await a.turn(first=True) == Home("r0", 1)
    assert a.placer.placements == {Placed.NEW: 1}


async def test_a_turn_that_only_seems_to_be_the_first_goes_where_its_program_lives(ingress) -> None:
    a, b = ingress(at("r1")), ingress(at("r2"))
    home = await a.turn()
    assert await b.turn(first=True) == home
    assert b.placer.placements == {Placed.JOINED: 1}


async def test_such_a_turn_does_not_wait_for_admission(ingress) -> None:
    a, b = ingress(at("r1")), ingress(lambda request: Wait())
    home = await a.turn()
    async with asyncio.timeout(WITHIN_S):
        assert await b.turn(first=True) == home
    assert b.placer.placements == {Placed.JOINED: 1}


async def test_such_a_turn_is_not_refused_as_a_new_program(ingress) -> None:
    a, b = ingress(at("r1")), ingress(lambda request: Refuse(Refused.LOAD_SHED, 1.0))
    home = await a.turn()
    assert await b.turn(first=True) == home
    assert not b.placer.refusals
    with pytest.raises(Overloaded):
        await b.turn("default/new", first=True)


async def test_concurrent_first_turns_share_one_claim(ingress, monkeypatch: pytest.MonkeyPatch) -> None:
    a, claims = ingress(), []
    claim = a.store.claim

    async def counted(key: str, home: Home) -> Home | None:
        claims.append(key)
        return await claim(key, home)

    monkeypatch.setattr(a.store, "claim", counted)
    assert len(set(await asyncio.gather(*(a.turn() for _ in range(20))))) == 1
    assert claims == [KEY]


async def test_a_client_that_goes_does_not_stop_the_claim_that_others_wait_for(ingress) -> None:
    a = ingress()
    first, second = asyncio.create_task(a.turn()), asyncio.create_task(a.turn())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == Home("r0", 1)
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_lone_turns_need_no_store(ingress, server) -> None:
    server.stop()
    a = ingress()
    with await a.placer.place(request("single_turn", single_turn=True)) as placement:
        assert (placement.session, placement.epoch) == ("r0", None)
    assert a.store.healthy


async def test_a_process_that_has_just_begun_waits_for_the_first_news_of_replicas(ingress) -> None:
    new = ingress()
    new.placer = new.make_placer()
    turn = asyncio.create_task(new.turn())
    await asyncio.sleep(0)
    new.see()
    await asyncio.sleep(0)
    assert not new.engine.asked
    new.see("r0")
    assert await turn == Home("r0", 1)


# --- moves ------------------------------------------------------------------------------------------------------------


async def test_a_replica_that_failed_a_turn_is_left_and_told(ingress) -> None:
    a, b = ingress(), ingress()
    await a.turn()
    assert await a.turn(avoid=frozenset({"r0"})) == Home("r1", 2)
    await until(lambda: a.told)
    assert a.told == [("r0", KEY, 2)]
    assert await b.turn() == Home("r1", 2)


async def test_a_turn_that_is_first_and_last_leaves_the_replica_that_failed_it(ingress) -> None:
    """The engine has forgotten the program with the attempt that failed; the store has not."""
    a = ingress(lambda request: Go(Home("r1" if "r0" in request.avoid else "r0", 1), Placed.NEW))
    only: dict[str, Any] = {"first": True, "last": True}
    assert await a.turn(**only) == Home("r0", 1)
    assert await a.turn(**only, avoid=frozenset({"r0"})) == Home("r1", 2)
    assert await a.store.get(KEY) == (Home("r1", 2),)


async def test_a_turn_that_waited_is_not_sent_to_the_replica_that_failed_it(ingress) -> None:
    """Another ingress has placed its program there meanwhile."""
    a, b = ingress(), ingress(lambda request: Wait())
    failed = frozenset({"r0"})
    turn = asyncio.create_task(b.turn(avoid=failed))
    await until(lambda: b.placer.waiting)
    await a.turn()
    assert await b.placer.session_of(KEY, fresh=True) == "r0"
    assert await turn == Home("r1", 2)


async def test_a_replica_that_is_gone_is_not_told(ingress) -> None:
    a = ingress()
    await a.turn()
    a.see("r1", "r2")
    assert await a.turn() == Home("r1", 2)
    await a.turn()
    assert not a.told


async def test_a_move_is_announced_until_the_replica_acknowledges_it(ingress) -> None:
    a = ingress()
    await a.turn()
    a.failures = [ReplicaGone("not now"), ControlTimeout("not now")]
    await a.turn(avoid=frozenset({"r0"}))
    async with asyncio.timeout(60):
        while not a.told:
            await asyncio.sleep(0)
            a.clock.advance(1.0)
            a.see(*REPLICAS)
    assert a.told == [("r0", KEY, 2)]
    assert a.placer.fallbacks[Fallback.MOVE_UNACKNOWLEDGED] == 2


async def test_a_program_that_comes_back_is_not_said_to_have_left(ingress) -> None:
    """The replica would give up what it has of the program."""
    a, b = ingress(), ingress()
    await a.turn()
    a.see("r1", "r2")
    b.see("r0")
    assert (await a.turn(), await b.turn()) == (Home("r1", 2), Home("r0", 3))
    assert await a.placer.session_of(KEY, fresh=True) == "r0"
    a.see(*REPLICAS)
    await until(lambda: not a.tasks.pending_jobs)
    assert not a.told


async def test_a_replica_that_only_one_ingress_sees_is_told_when_the_other_does(ingress) -> None:
    a, b = ingress(), ingress()
    await a.turn()
    await b.turn()
    a.see("r1", "r2")
    b.see("r2")
    assert (await a.turn(), await b.turn()) == (Home("r1", 2), Home("r2", 3))
    assert not b.told, "b cannot reach r1 yet"
    b.see("r1", "r2")
    await until(lambda: b.told)
    assert b.told == [("r1", KEY, 3)]
    placement = await a.placer.place(request())
    await a.placer.fenced(placement, 3)
    placement.end()
    assert (await a.turn(), await b.turn()) == (Home("r2", 3), Home("r2", 3))


async def test_of_two_ingresses_that_race_to_move_a_program_one_wins(ingress) -> None:
    a, b = ingress(), ingress()
    await a.turn()
    await b.turn()
    b.engine.pick = max
    failed = frozenset({"r0"})
    moved = await asyncio.gather(*(one.turn(avoid=failed) for one in (a, b) * 5))
    assert {home.epoch for home in moved} == {2}
    assert len(set(moved)) == 1


async def test_a_replica_that_knows_better_sends_the_turn_to_the_store(ingress) -> None:
    a, b = ingress(), ingress()
    await a.turn()
    await b.turn()
    await a.turn(avoid=frozenset({"r0"}))
    placement = await b.placer.place(request())
    assert placement.home == Home("r0", 1)
    await b.placer.fenced(placement, 2)
    placement.end()
    assert await b.turn() == Home("r1", 2)
    assert b.placer.fallbacks == {Fallback.FENCED: 1}


async def test_where_a_program_lives_is_asked_of_the_store_where_that_matters(ingress, server) -> None:
    a, b = ingress(), ingress()
    assert await b.placer.session_of(KEY) is None
    await a.turn()
    assert await b.placer.session_of(KEY) == "r0"
    await a.turn(avoid=frozenset({"r0"}))
    assert await b.placer.session_of(KEY) == "r0"
    assert await b.placer.session_of(KEY, fresh=True) == "r1"
    server.stop()
    assert await b.placer.session_of(KEY, fresh=True) == "r1"


@pytest.mark.parametrize("lost", ["the home", "the store"])
async def test_a_replica_that_knows_better_than_the_store_gets_a_later_epoch(ingress, server, lost) -> None:
    a = ingress()
    await a.turn()
    if lost == "the store":
        server.stop()
    placements = [await a.placer.place(request()) for _ in range(3)]
    for placement in placements:
        await a.placer.fenced(placement, 7)
        placement.end()
    assert await a.turn() == Home("r0", 8)
    assert a.placer.fallbacks[Fallback.FENCED] == 1


# --- waiting and refusing ---------------------------------------------------------------------------------------------


async def test_a_turn_waits_until_it_is_admitted(ingress) -> None:
    a = ingress(lambda request: Wait())
    turn = asyncio.create_task(a.turn())
    await until(lambda: a.placer.waiting)
    (turn_id,) = a.engine.in_flight
    a.clock.advance(2.0)
    a.engine.outcomes = [
        ("a turn that is gone", Go(Home("r0", 1), Placed.NEW)),
        (turn_id, Go(Home("r2", 1), Placed.NEW)),
    ]
    a.see(*REPLICAS)
    assert await turn == Home("r2", 1)
    assert await a.store.get(KEY) == (Home("r2", 1),)
    assert a.placer.waiting == 0
    assert [a.placer.take_waits_s(), a.placer.take_waits_s()] == [[2.0], []]


async def test_an_end_and_a_timer_admit_too(ingress) -> None:
    a = ingress(lambda request: Wait() if request.key == KEY else Go(Home("r0", 1), Placed.NEW))
    for admit in ("end", "timer"):
        other = await a.placer.place(request("default/other"))
        turn = asyncio.create_task(a.turn())
        await until(lambda: a.placer.waiting)
        (turn_id,) = a.engine.in_flight.keys() - {other.turn_id}
        a.engine.outcomes = [(turn_id, Go(Home("r2", 1), Placed.NEW))]
        if admit == "end":
            other.end()
        assert await turn == Home("r2", 1)
        other.end()
        a.placer.forget(KEY)
        await until(lambda: not a.tasks.pending_jobs)


async def test_a_client_that_goes_away_waits_no_longer(ingress) -> None:
    a = ingress(lambda request: Wait())
    turn = asyncio.create_task(a.turn())
    await until(lambda: a.placer.waiting)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert a.placer.waiting == 0 and not a.engine.in_flight


@pytest.mark.parametrize(
    ("reason", "kind", "status"),
    [
        (Refused.NO_REPLICA, Overloaded, 503),
        (Refused.QUEUE_TIMEOUT, Overloaded, 503),
        (Refused.QUEUE_FULL, Overloaded, 503),
        (Refused.TENANT_SHARE, TooManyRequests, 429),
    ],
)
@pytest.mark.parametrize("after_a_wait", [False, True])
async def test_a_refusal_says_when_to_come_again(ingress, reason, kind, status, after_a_wait) -> None:
    refused = Refuse(reason, 2.4)
    a = ingress(lambda request: Wait() if after_a_wait else refused)
    turn = asyncio.create_task(a.turn())
    if after_a_wait:
        await until(lambda: a.placer.waiting)
        a.engine.outcomes = [(turn_id, refused) for turn_id in a.engine.in_flight]
    with pytest.raises(kind) as told:
        await turn
    assert (told.value.status, told.value.code, told.value.retry_after_s) == (status, reason.value, 3)
    assert a.placer.refusals == {reason: 1}


# --- ends -------------------------------------------------------------------------------------------------------------


async def test_the_last_turn_ends_the_program_here_and_in_the_store(ingress) -> None:
    a = ingress()
    placement = await a.placer.place(request(last=True))
    placement.end(complete=True, context_tokens=5)
    placement.end()
    assert len(a.engine.over) == 1
    assert a.engine.forgotten == [KEY]
    await until(lambda: not a.tasks.pending_jobs)
    assert await a.store.get(KEY) == (None,)


async def test_a_last_turn_that_failed_leaves_the_program(ingress) -> None:
    a = ingress()
    await a.turn(last=True)
    assert await a.turn() == Home("r0", 1)
    assert a.engine.forgotten == []


async def test_idle_programs_are_forgotten_and_used_ones_touched(ingress, server) -> None:
    a = ingress()
    await a.turn("default/idle")
    await a.turn("default/used")
    a.clock.advance(99.0)
    await a.turn("default/used")
    a.clock.advance(2.0)
    await a.placer.sweep()
    assert a.engine.forgotten == ["default/idle"]
    assert a.engine.home_of("default/used") == Home("r0", 1)


async def test_a_long_turn_keeps_no_idle_program_from_being_forgotten(ingress) -> None:
    a = ingress()
    with await a.placer.place(request("default/long")):
        await a.turn("default/idle")
        a.clock.advance(101.0)
        await a.placer.sweep()
        assert a.engine.forgotten == ["default/idle"]


async def test_a_long_turn_keeps_no_program_that_is_one_too_many(ingress) -> None:
    a = ingress()
    a.placer._max_programs = 3
    with await a.placer.place(request("default/long")):
        for number in range(10):
            await a.turn(f"default/{number}")
        assert a.placer.view()["programs"] == 3
        assert "default/long" not in a.engine.forgotten


# --- without the store ------------------------------------------------------------------------------------------------


async def test_without_the_store_the_front_decides_alone_and_afterwards_the_homes_are_written(ingress, server) -> None:
    a, b = ingress(), ingress()
    server.stop()
    assert await a.turn() == Home("r0", 1)
    assert await a.turn("default/other") == Home("r0", 1)
    assert [store_available for _, store_available in a.engine.asked] == [False, False]
    assert a.placer.fallbacks[Fallback.STORE_GONE] == 2
    server.start()
    await probed(a)
    b.engine.choose = at("r2")
    assert await b.turn() == Home("r0", 1), "it is written before its next turn"
    assert await a.turn() == Home("r0", 1)
    assert a.engine.asked[-1] == (KEY, True)


async def test_a_store_that_is_gone_is_waited_for_by_one_turn_only(
    ingress, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, calls = ingress(), []
    server.stop()
    await a.turn("default/0")
    monkeypatch.setattr(a.store, "get", lambda key: calls.append(key))
    for n in range(20):
        await a.turn(f"default/{n}")
    assert not calls


async def test_ingresses_that_differed_without_the_store_agree_when_it_is_back(ingress, server) -> None:
    a, b = ingress(at("r1")), ingress(at("r2"))
    server.stop()
    assert (await a.turn(), await b.turn()) == (Home("r1", 1), Home("r2", 1))
    server.start()
    await probed(a)
    await probed(b)
    assert len(set(await asyncio.gather(*(one.turn() for one in (a, b) * 3)))) == 1


async def test_homes_that_redis_has_lost_are_written_again(ingress, server) -> None:
    a = ingress()
    await a.turn()
    server.stop()
    server.start()
    await probed(a)
    await a.turn()
    assert await a.store.get(KEY) == (Home("r0", 1),)


async def test_homes_are_written_also_where_another_call_finds_the_store_back(ingress, server, monkeypatch) -> None:
    a = ingress()
    server.stop()
    await a.turn()
    server.start()
    async with asyncio.timeout(WITHIN_S):
        while await a.store.forget("default/another", 1) is None:
            pass
    assert a.store.healthy
    monkeypatch.setattr("router.program_placer.PROBE_S", 0.001)
    a.tasks.start("attend", a.placer.attend)
    async with asyncio.timeout(WITHIN_S):
        while await a.store.get(KEY) != (Home("r0", 1),):
            pass


async def test_homes_are_written_again_where_the_store_fails_meanwhile(ingress, server, monkeypatch) -> None:
    a, swept = ingress(), []
    server.stop()
    await a.turn()
    server.start()

    async def sweep(*, everything: bool = False) -> None:
        swept.append(everything)
        if len(swept) < 3:
            a.store.count(TimeoutError())
            await a.store.touch({})

    monkeypatch.setattr(a.placer, "sweep", sweep)
    monkeypatch.setattr("router.program_placer.PROBE_S", 0.001)
    a.tasks.start("attend", a.placer.attend)
    await until(lambda: len(swept) >= 3)
    await asyncio.sleep(0.02)
    assert swept == [True] * 3


async def test_those_who_wait_are_told_when_the_ingress_ends(ingress) -> None:
    a = ingress(lambda request: Wait())
    turn = asyncio.create_task(a.turn())
    await until(lambda: a.placer.waiting)
    await a.placer.aclose()
    with pytest.raises(Overloaded):
        await turn


async def test_turns_of_a_model_without_replicas_wait_for_the_first_one(ingress: Callable[..., Ingress]) -> None:
    """Scaled to zero: the program's home is gone too. Its turn goes on where the next replica starts."""
    asked = asyncio.Event()

    async def wake() -> None:
        asked.set()

    one = ingress(at("r0"))
    one.cold_start = ColdStart(wake, one.clock, one.tasks, limit_s=60.0, max_waiting=10)
    one.placer = one.make_placer()
    one.see()
    turn = asyncio.create_task(one.turn())
    await asyncio.wait_for(asked.wait(), WITHIN_S)
    assert (turn.done(), one.placer.waiting) == (False, 1)
    one.see("r0")
    assert (await turn).replica == "r0"
    assert (await one.turn()).replica == "r0"


async def test_a_start_that_a_replica_reports_is_what_clients_are_asked_to_wait(
    ingress: Callable[..., Ingress],
) -> None:
    async def wake() -> None:
        await asyncio.Event().wait()

    one = ingress(at("r0"))
    one.cold_start = ColdStart(wake, one.clock, one.tasks, limit_s=0.01, max_waiting=10)
    one.placer = one.make_placer()
    one.placer.observe({"r0": snapshot("r0", start_s=33.0)})
    one.see()
    with pytest.raises(Overloaded) as refused:
        await one.turn()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "no_replica", 33)
