"""The router's parts in one ingress process: their background loops are supervised."""

import asyncio
from typing import Any

import pytest

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ReplicaGone
from cluster.core.scaling_report import Demand
from cluster.core.supervision import UNHEALTHY_AFTER
from cluster.dispatch.placement_service import PlacementService
from cluster.observing.catalogue import REPLICAS_MIN
from router.program_placer import ProgramPlacer
from router.snapshots import HUB
from tests.observing.recorded import recording
from tests.waiting import until

CONFIG = CaesuraConfig.model_validate({"redis": {"url": "redis://127.0.0.1:1"}, "metrics": {"enabled": False}})


class Handle:
    """Replicas that record what is asked of them; ``fails`` is raised."""

    deployment_name = "ProgramServer"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails: Exception | None = None
        self.hangs = "none"
        self._to = ""

    def options(self, **options: Any) -> "Handle":
        self._to = options.get("session_id", "")
        return self

    @property
    def demand(self) -> "Handle":
        return self

    async def remote(self, *arguments: Any) -> None:
        self.calls.append((self._to, arguments))
        if self.fails is not None:
            raise self.fails
        if self._to == self.hangs:
            await asyncio.Event().wait()


async def reported(
    replicas: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    fails: Exception | None = None,
    *,
    reports: int = 2,
    hangs: str = "none",
) -> Handle:
    """A model's handle after ``reports`` reports of its ingress, which sees two replicas, and time for more."""
    monkeypatch.setattr("cluster.dispatch.placement_service.DEMAND_PERIOD_S", 0.001)
    config = CaesuraConfig.model_validate({**CONFIG.model_dump(), "replicas": replicas})
    handle = Handle()
    handle.fails, handle.hangs = fails, hangs
    made: Any = handle
    service = PlacementService(made, config, ManualClock(), "ingress", lambda: (7, 2))
    service.open()
    HUB.publish(Handle.deployment_name, [("r2", None), ("r1", None)])
    await until(lambda: len(handle.calls) >= reports)
    await asyncio.sleep(0.02)
    await service.aclose()
    HUB.publish(Handle.deployment_name, [])
    return handle


async def test_the_demand_for_an_elastic_model_goes_to_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = await reported({"max": 3}, monkeypatch)
    assert len(handle.calls) > 1
    assert {replica for replica, _ in handle.calls} == {"r1"}
    name, demand = handle.calls[0][1]
    assert name == "ingress" and Demand.of(demand) == Demand(turns=7, missed=2)


async def test_a_report_that_fails_is_followed_by_the_next_to_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = await reported({"max": 3}, monkeypatch, fails=ReplicaGone("gone"))
    assert [replica for replica, _ in handle.calls[:2]] == ["r1", "r2"]


async def test_a_replica_that_hangs_gets_no_further_reports_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.dispatch.placement_service.DEMAND_TIMEOUT_S", 0.001)
    handle = await reported({"max": 3}, monkeypatch, reports=5, hangs="r1")
    assert [replica for replica, _ in handle.calls[:5]] == ["r1", *["r2"] * 4]


async def test_a_fixed_number_of_replicas_needs_no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await reported({"count": 2}, monkeypatch, reports=0)).calls == []


@pytest.mark.parametrize(
    ("router", "replicas", "least"), [("caesura", {"min": 0, "max": 3}, 0), ("power_of_two", {"count": 2}, 2)]
)
async def test_an_ingress_exports_how_many_replicas_each_model_has_at_least(
    router: str, replicas: dict[str, int], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = recording(monkeypatch)
    values = {"redis": CONFIG.redis.model_dump(), "router": {"name": router}, "replicas": replicas}
    handle: Any = Handle()
    service = PlacementService(handle, CaesuraConfig.model_validate(values), ManualClock(), "ingress", lambda: (0, 0))
    service.open()
    await until(lambda: recorded.series(REPLICAS_MIN))
    await service.aclose()
    assert recorded.series(REPLICAS_MIN) == {("tiny",): least}


async def test_a_bug_in_a_background_loop_of_the_router_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: ProgramPlacer) -> None:
        raise ValueError("a bug")

    async def at_once(seconds: float) -> None:
        await asyncio.get_running_loop().create_future() if seconds > 8 else None

    monkeypatch.setattr(ProgramPlacer, "attend", broken)
    handle: Any = Handle()
    service = PlacementService(handle, CONFIG, ManualClock(), "ingress", lambda: (0, 0))
    monkeypatch.setattr(service._tasks, "_sleep", at_once)
    service.open()
    async with asyncio.timeout(30):
        while not service.failed:  # noqa: ASYNC110 - supervision has no event
            await asyncio.sleep(0)
    assert service.failed == ("attend",)
    assert service.view()["background"]["failures"]["attend"] >= UNHEALTHY_AFTER
    await service.aclose()
