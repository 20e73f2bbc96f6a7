"""The weights that replicas should have, in a real Redis, and the routes that set them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import BadRequest, ControlTimeout, Overloaded, UpstreamFailed
from cluster.http.weights import WeightRoutes
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.client import StoreUnavailable
from cluster.store.weights import WeightsStore, WeightsTarget
from tests.store.outages import kill

PATIENT_S = 60.0
UPDATE = {"version": "step-1", "path": "/weights/step-1"}


class Fleet:
    """The replicas r1 and r2 of each model; a test says what they answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.checks: list[Any] = [None, None]
        self.failure: Exception | None = None
        self.silent: str | None = None
        """A model whose replicas do not all answer."""

    async def broadcast_to(self, model: str, method: str, *arguments: Any, within_s: float | None = None) -> list[Any]:
        self.calls.append((model, method, *arguments))
        if model == self.silent:
            raise ControlTimeout(f"{method}: not all replicas answered within 5 s")
        if method == "check_weights":
            return self.checks
        return [{"replica": "r1"}, self.failure or {"replica": "r2"}]


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[WeightsStore]:
    made = WeightsStore(server.url, model="tiny", timeout_s=PATIENT_S, clock=ManualClock())
    yield made
    await made.close()


def routes_of(server: EmbeddedRedis, fleet: Fleet, **sections: Any) -> WeightRoutes:
    redis = {"url": server.url, "timeout_s": PATIENT_S}
    config = CaesuraConfig.model_validate({"model": {"id": "tiny"}, "redis": redis, **sections})
    return WeightRoutes(fleet, config, ManualClock())  # type: ignore[arg-type]


async def test_the_target_is_kept(store: WeightsStore) -> None:
    assert await store.read() == WeightsTarget("default", None, paused=False)
    await store.set_weights("step-1", "/weights/ä")
    await store.set_paused(True)
    assert await store.read() == WeightsTarget("step-1", "/weights/ä", paused=True)
    await store.set_paused(False)
    assert await store.read() == WeightsTarget("step-1", "/weights/ä")


async def test_an_update_is_checked_then_stored_then_done(server: EmbeddedRedis, store: WeightsStore) -> None:
    fleet = Fleet()
    routes = routes_of(server, fleet)
    answer = json.loads((await routes.update(UPDATE)).body)
    target = WeightsTarget("step-1", "/weights/step-1")
    assert fleet.calls == [("tiny", "check_weights", "/weights/step-1"), ("tiny", "follow_weights", target)]
    assert (answer["version"], answer["replicas"]) == ("step-1", [{"replica": "r1"}, {"replica": "r2"}])
    assert await store.read() == target
    await routes.set_paused({}, paused=True)
    assert fleet.calls[-1] == ("tiny", "follow_weights", WeightsTarget("step-1", "/weights/step-1", paused=True))
    await routes.aclose()


async def test_what_no_replica_may_load_changes_nothing(server: EmbeddedRedis, store: WeightsStore) -> None:
    fleet = Fleet()
    fleet.checks = [None, BadRequest("path: no folder", param="path")]
    with pytest.raises(BadRequest, match="no folder"):
        await routes_of(server, fleet).update(UPDATE)
    assert [call[1] for call in fleet.calls] == ["check_weights"]
    assert (await store.read()).path is None


async def test_a_replica_that_fails_is_named(server: EmbeddedRedis, store: WeightsStore) -> None:
    fleet = Fleet()
    fleet.failure = UpstreamFailed("replica r2: the weights could not be loaded")
    with pytest.raises(UpstreamFailed, match="1 of 2 replicas failed: replica r2") as caught:
        await routes_of(server, fleet).update(UPDATE)
    assert (caught.value.status, caught.value.code) == (502, "replica_failed")
    assert (await store.read()).version == "step-1", "r2 is replaced, and then has them"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "version"),
        ({"version": "", "path": "/w"}, "version"),
        ({"version": "a\nb", "path": "/w"}, "version"),
        ({"version": "a"}, "path"),
        ({**UPDATE, "model": "other"}, "model"),
        ({**UPDATE, "mode": "keep"}, "mode"),
    ],
)
async def test_a_wrong_body_is_refused(server: EmbeddedRedis, body: dict[str, Any], param: str) -> None:
    fleet = Fleet()
    with pytest.raises(BadRequest) as caught:
        await routes_of(server, fleet).update(body)
    assert caught.value.param == param
    assert not fleet.calls


@pytest.mark.parametrize(
    "kv_store", [{"name": "lmcache", "address": "h:1"}, {"name": "mooncake", "config_file": "/m.json"}]
)
async def test_weights_are_not_changed_where_a_kv_store_would_give_kv_of_the_old_ones(
    server: EmbeddedRedis, store: WeightsStore, kv_store: dict[str, str]
) -> None:
    fleet = Fleet()
    routes = routes_of(server, fleet, replicas={"accelerator": "gpu", "kv_store": kv_store}, models={"large": {}})
    with pytest.raises(BadRequest, match=f"replicas.kv_store.*{kv_store['name']}") as caught:
        await routes.update({**UPDATE, "model": "tiny"})
    assert caught.value.param == "model"
    assert not fleet.calls
    assert (await store.read()).path is None
    await routes.update({**UPDATE, "model": "large"})
    await routes.set_paused({"model": "tiny"}, paused=True)
    assert fleet.calls[-1] == ("tiny", "follow_weights", WeightsTarget("default", None, paused=True))


async def test_several_models_need_a_name(server: EmbeddedRedis) -> None:
    routes = routes_of(server, Fleet(), models={"large": {}})
    with pytest.raises(BadRequest, match="tiny, large"):
        await routes.update(UPDATE)
    answer = json.loads((await routes.set_paused({"model": "large"}, paused=True)).body)
    assert [one["model"] for one in answer["models"]] == ["large"]
    shown = json.loads((await routes.show()).body)
    assert {one["model"]: one["paused"] for one in shown["models"]} == {"tiny": False, "large": True}


@pytest.mark.parametrize("fails", ["a replica", "a model that is silent"])
async def test_a_model_that_fails_keeps_no_other_from_its_pause(server: EmbeddedRedis, fails: str) -> None:
    fleet = Fleet()
    routes = routes_of(server, fleet, models={"large": {}, "small": {}})
    if fails == "a replica":
        fleet.failure = UpstreamFailed("replica r2: it is gone")
        told = "3 of 6 replicas failed: replica r2: it is gone; replica r2"
    else:
        fleet.silent = "tiny"
        told = "1 of 5 replicas failed: tiny: follow_weights: not all replicas answered"
    with pytest.raises(UpstreamFailed, match=told) as caught:
        await routes.set_paused({}, paused=True)
    assert (caught.value.status, caught.value.code) == (502, "replica_failed")
    assert [call[0] for call in fleet.calls] == ["tiny", "large", "small"]
    fleet.silent = fleet.failure = None
    shown = json.loads((await routes.show()).body)
    assert [one["paused"] for one in shown["models"]] == [True, True, True]
    await routes.set_paused({}, paused=False)
    await routes.aclose()


async def test_without_the_store_nothing_is_done(server: EmbeddedRedis, store: WeightsStore) -> None:
    fleet = Fleet()
    routes = routes_of(server, fleet)
    kill(server)
    for call in (routes.set_paused({}, paused=True), routes.update(UPDATE), routes.show()):
        with pytest.raises(Overloaded) as caught:
            await call
        assert caught.value.code == "store_unavailable"
    assert [call[1] for call in fleet.calls] == ["check_weights"]
    with pytest.raises(StoreUnavailable):
        await store.read()
