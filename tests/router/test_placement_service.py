"""The router's parts in one ingress process: their background loops are supervised."""

import asyncio
from typing import Any

import pytest

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.supervision import UNHEALTHY_AFTER
from cluster.dispatch.placement_service import PlacementService
from router.program_placer import ProgramPlacer

CONFIG = CaesuraConfig.model_validate({"redis": {"url": "redis://127.0.0.1:1"}, "metrics": {"enabled": False}})


class Handle:
    deployment_name = "ProgramServer"

    def options(self, **_: Any) -> "Handle":
        return self


async def test_a_bug_in_a_background_loop_of_the_router_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: ProgramPlacer) -> None:
        raise ValueError("a bug")

    async def at_once(seconds: float) -> None:
        await asyncio.get_running_loop().create_future() if seconds > 8 else None

    monkeypatch.setattr(ProgramPlacer, "attend", broken)
    handle: Any = Handle()
    service = PlacementService(handle, CONFIG, ManualClock())
    monkeypatch.setattr(service._tasks, "_sleep", at_once)
    service.open()
    async with asyncio.timeout(30):
        while not service.failed:  # noqa: ASYNC110 - supervision has no event
            await asyncio.sleep(0)
    assert service.failed == ("attend",)
    assert service.view()["background"]["failures"]["attend"] >= UNHEALTHY_AFTER
    await service.aclose()
