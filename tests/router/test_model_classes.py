"""Classes of models: what a request names, what its program is led to, and that all ingresses agree on it."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import BadRequest
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.replica_snapshot import Home
from cluster.dispatch.model_selection import ModelSelection
from cluster.dispatch.predictions import NullPredictions
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.observing.trace_context import NullTraces
from cluster.store.client import quoted
from cluster.store.placements import PlacementStore
from router.model_choice import Chosen
from tests.waiting import WITHIN_S

CONFIG = CaesuraConfig.model_validate(
    {
        "model": {"id": "org/small model"},
        "models": {"big": {}},
        "model_routing": {
            "coding": [{"model": "big", "tools": ["bash"], "max_start_s": 1.0}, {"model": "org/small model"}]
        },
    }
)
SMALL, BIG = "org/small model", "big"
CHAT_BASH = [{"type": "function", "function": {"name": "bash"}}]
RESPONSES_BASH = [{"type": "function", "name": "bash"}]


class Loads:
    """How soon a turn starts on each model, as a test has it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {SMALL: 0.0, BIG: 0.0}

    def start_s(self) -> Mapping[str, float | None]:
        return self.seconds


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def classes(url: str, loads: Loads) -> ModelSelection:
    return ModelSelection(CONFIG, loads, store_of(url))


def store_of(url: str) -> PlacementStore:
    return PlacementStore(url, model="//classes", timeout_s=2.0, expiry_s=60.0, clock=MonotonicClock())


def coding(tools: Any = None) -> dict[str, Any]:
    return {"model": "auto:coding", "messages": [], **({"tools": tools} if tools is not None else {})}


def program(name: str, **hints: Any) -> ProgramIdentity:
    return ProgramIdentity(program_id=name, hints=Hints(**hints))


@pytest.mark.parametrize("model", ["auto:", "auto:nothing", "coding", "", "auto:big"])
def test_what_is_not_served_is_not_found(redis: EmbeddedRedis, model: str) -> None:
    with pytest.raises(BadRequest) as refused:
        classes(redis.url, Loads()).check(model)
    assert (refused.value.status, refused.value.param) == (404, "model")


async def test_a_model_that_is_named_is_meant(redis: EmbeddedRedis) -> None:
    one = classes(redis.url, Loads())
    assert await one.model_of({"model": BIG}, None) == BIG
    assert await one.model_of({}, program("p")) == SMALL


@pytest.mark.parametrize("tools", [CHAT_BASH, RESPONSES_BASH])
async def test_rules_see_the_tools_that_are_offered(redis: EmbeddedRedis, tools: Any) -> None:
    one = classes(redis.url, Loads())
    assert await one.model_of(coding(tools), None) == BIG
    assert await one.model_of(coding([]), None) == SMALL


@pytest.mark.parametrize("tools", [5, "bash", [None, 5, {}, {"function": 5}, {"function": {"name": 5}}]])
async def test_tools_that_make_no_sense_match_nothing(redis: EmbeddedRedis, tools: Any) -> None:
    assert await classes(redis.url, Loads()).model_of(coding(tools), None) == SMALL


async def test_rules_see_the_tool_whose_result_is_brought(redis: EmbeddedRedis) -> None:
    one = classes(redis.url, Loads())
    assert await one.model_of(coding(), program("brings", last_tool="bash")) == BIG


async def test_a_program_stays_with_its_model_on_every_ingress(redis: EmbeddedRedis) -> None:
    loads = Loads()
    here, there = classes(redis.url, loads), classes(redis.url, loads)
    assert await here.model_of(coding(CHAT_BASH), program("stays")) == BIG
    loads.seconds = {SMALL: 0.0, BIG: 60.0}
    assert await here.model_of(coding(), program("stays")) == BIG
    assert await there.model_of(coding(), program("stays")) == BIG
    assert await there.model_of(coding(CHAT_BASH), program("another")) == SMALL


async def test_ingresses_that_choose_at_once_agree(redis: EmbeddedRedis) -> None:
    busy, idle = Loads(), Loads()
    busy.seconds = {SMALL: 0.0, BIG: 60.0}
    ingresses = [classes(redis.url, busy), classes(redis.url, idle)]
    for number in range(20):
        turns = [one.model_of(coding(CHAT_BASH), program(f"race-{number}")) for one in ingresses for _ in range(3)]
        assert len(set(await asyncio.gather(*turns))) == 1


async def stored(redis: EmbeddedRedis, key: str) -> Home | None:
    answer = await store_of(redis.url).get(key)
    assert answer is not None
    return answer[0]


async def test_the_choice_of_a_program_in_use_does_not_expire(redis: EmbeddedRedis) -> None:
    one = classes(redis.url, Loads())
    for name in ("used", "ended"):
        await one.model_of(coding(CHAT_BASH), program(name))
    await one.sweep()
    raw = store_of(redis.url).redis
    used, ended = [f"coding/{program(name).key}" for name in ("used", "ended")]
    keys = {key: next(found for found in await raw.keys("*") if quoted(key).encode() in found) for key in (used, ended)}
    for key in keys.values():
        await raw.pexpire(key, 5_000)
    await one.model_of(coding(), program("used"))
    await one.sweep()
    await one.sweep()
    assert await raw.pttl(keys[used]) > 30_000
    assert await raw.pttl(keys[ended]) <= 5_000


async def test_a_choice_that_the_store_lost_is_written_again_and_another_one_is_taken(redis: EmbeddedRedis) -> None:
    one = classes(redis.url, Loads())
    lost, other = f"coding/{program('lost').key}", f"coding/{program('other').key}"
    for name in ("lost", "other"):
        assert await one.model_of(coding(CHAT_BASH), program(name)) == BIG
    store = store_of(redis.url)
    await store.forget(lost, 1)
    await store.forget(other, 1)
    await store.claim(other, Home(quote(SMALL, safe=""), 1))
    await one.sweep()
    assert await stored(redis, lost) == Home(BIG, 1)
    assert await one.model_of(coding(), program("other")) == SMALL


async def test_choices_are_renewed_when_the_store_is_back(redis: EmbeddedRedis, monkeypatch: Any) -> None:
    one = classes(redis.url, Loads())
    await one.model_of(coding(CHAT_BASH), program("later"))
    touch = one._homes.touch
    touched: list[str] = []

    async def gone(homes: Mapping[str, Home]) -> None:
        return None

    async def noted(homes: Mapping[str, Home]) -> frozenset[str] | None:
        touched.extend(homes)
        return await touch(homes)

    monkeypatch.setattr(one._homes, "touch", gone)
    await one.sweep()
    monkeypatch.setattr(one._homes, "touch", noted)
    await one.sweep()
    assert touched == [f"coding/{program('later').key}"]


async def test_an_ingress_renews_choices_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    began, over = asyncio.Event(), asyncio.Event()

    async def attend(self: ModelSelection) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    monkeypatch.setattr(ModelSelection, "attend", attend)
    config = CaesuraConfig.model_validate({**CONFIG.model_dump(), "redis": {"url": "redis://127.0.0.1:1"}})
    fleet = ReplicaClients(
        {}, config, MonotonicClock(), "ingress", NullPredictions(), NullTraces(), lambda model: (0, 0)
    )
    fleet.open()
    await asyncio.wait_for(began.wait(), WITHIN_S)
    await fleet.aclose()
    assert over.is_set()


async def test_without_the_store_the_choice_is_made_here() -> None:
    one = classes("redis://127.0.0.1:1", Loads())
    assert await one.model_of(coding(CHAT_BASH), program("alone")) == BIG
    assert one.counters[Chosen.RULE] == 1
    assert await one.model_of(coding(), program("alone")) == BIG
    assert one.counters[Chosen.RULE] == 1, "the choice is remembered"
