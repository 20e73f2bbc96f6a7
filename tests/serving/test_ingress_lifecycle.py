"""An ingress closes everything that it opened, also where its start failed, and reports loops that keep failing."""

import pytest

from cluster.dispatch.replica_clients import ReplicaClients
from cluster.http.ingress import ProgramIngress
from cluster.http.services import ProgramService


class Part:
    def __init__(self, closed: list[str], name: str, error: Exception | None = None) -> None:
        self._closed = closed
        self._name = name
        self._error = error
        self.failed: tuple[str, ...] = ()

    async def aclose(self) -> None:
        self._closed.append(self._name)
        if self._error is not None:
            raise self._error

    close = aclose


async def test_an_ingress_whose_start_failed_can_be_closed() -> None:
    await ProgramIngress.__new__(ProgramIngress).__del__()


async def test_a_part_that_fails_to_close_does_not_keep_the_others_open() -> None:
    closed: list[str] = []
    ingress = ProgramIngress.__new__(ProgramIngress)
    for part in (Part(closed, "a"), Part(closed, "b", RuntimeError("store gone")), Part(closed, "c")):
        ingress._adopt(part)
    with pytest.raises(RuntimeError, match="store gone"):
        await ingress.__del__()
    assert closed == ["c", "b", "a"]
    await ingress.__del__()
    assert closed == ["c", "b", "a"]


async def test_a_loop_that_keeps_failing_makes_the_ingress_unhealthy() -> None:
    ingress, part = ProgramIngress.__new__(ProgramIngress), Part([], "turns")
    ingress._adopt(part)
    await ingress.check_health()
    part.failed = ("judge programs",)
    with pytest.raises(RuntimeError, match="judge programs"):
        await ingress.check_health()


async def test_predictions_that_fail_to_close_leave_no_router_open() -> None:
    closed: list[str] = []
    fleet = ReplicaClients.__new__(ReplicaClients)
    fleet.__dict__["_predictions"] = Part(closed, "predictions", RuntimeError("store gone"))
    fleet.__dict__["_placements"] = {"m": Part(closed, "router m", RuntimeError("gone")), "n": Part(closed, "router n")}
    fleet.__dict__["_homes"] = Part(closed, "homes")
    fleet.__dict__["_tasks"] = Part(closed, "loops")
    fleet.__dict__["_turns"] = Part(closed, "connections")
    fleet.__dict__["recordings"] = Part(closed, "recordings")
    with pytest.raises(RuntimeError):
        await fleet.aclose()
    assert sorted(closed) == ["connections", "homes", "loops", "predictions", "recordings", "router m", "router n"]


async def test_a_runner_that_fails_to_close_leaves_no_tools_open() -> None:
    closed: list[str] = []
    service = ProgramService.__new__(ProgramService)
    service.__dict__["_loops"] = Part(closed, "loops")
    service.__dict__["runner"] = Part(closed, "runner", RuntimeError("store gone"))
    service.__dict__["tools"] = Part(closed, "tools")
    service.__dict__["conversations"] = Part(closed, "conversations")
    service.__dict__["usage"] = Part(closed, "usage")
    with pytest.raises(RuntimeError, match="store gone"):
        await service.aclose()
    assert sorted(closed) == ["conversations", "loops", "runner", "tools", "usage"]
