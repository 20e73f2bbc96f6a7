"""The limits of open programs, of an ingress and of a tenant, for requests that arrive together."""

import asyncio
from typing import Any

import pytest

from cluster.core.errors import Overloaded, RunStoreUnavailable, TooManyRequests
from cluster.runs.runner import ProgramRunner, Started
from cluster.store.client import StoreFailure
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, says
from tests.programs.test_runner import ended, spec

TWO_OF_A_TENANT = {"t": {"tools": ["add"], "max_programs": 2}}


async def started_together(
    runners: Runners, runner: ProgramRunner, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> list[Started | BaseException]:
    """The results of three starts, each of which is asked before the store has answered another."""
    create, gate = runners.stores[-1].create, asyncio.Event()

    async def gated(*arguments: Any) -> Any:
        await gate.wait()
        return await create(*arguments)

    monkeypatch.setattr(runners.stores[-1], "create", gated)
    starts = [asyncio.create_task(runner.start(spec(f"{prefix}-{number}"))) for number in range(3)]
    await asyncio.sleep(0)
    gate.set()
    return await asyncio.gather(*starts, return_exceptions=True)


def recorded(runner: ProgramRunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The code and the model of each rejection, as they come."""
    rejected: list[tuple[str, str]] = []
    monkeypatch.setattr(runner._turns, "rejected", lambda code, model: rejected.append((code, model)))
    return rejected


def hanging() -> ScriptedReplicas:
    """Replicas whose turns do not end."""
    return ScriptedReplicas([[asyncio.Event()] for _ in range(3)])


async def test_programs_of_a_tenant_that_arrive_together_are_limited(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners(hanging(), tenants=TWO_OF_A_TENANT)
    rejected = recorded(runner, monkeypatch)
    results = await started_together(runners, runner, "tenant", monkeypatch)
    assert [type(result) for result in results] == [Started, Started, TooManyRequests]
    assert rejected == [("tenant_programs", "tiny")]
    assert runner.open_runs == 2
    assert await runner.load("tenant-2", "t") is None


async def test_programs_that_arrive_together_are_limited(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runners(hanging(), max_open=2)
    rejected = recorded(runner, monkeypatch)
    results = await started_together(runners, runner, "ingress", monkeypatch)
    assert [type(result) for result in results] == [Started, Started, Overloaded]
    assert rejected == [("overload", "tiny")]
    assert runner.open_runs == 2
    assert await runner.load("ingress-2", "t") is None


async def test_a_start_that_fails_leaves_its_place_to_the_next_one(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runners(ScriptedReplicas([says("done")]), tenants=TWO_OF_A_TENANT, max_open=1)

    async def gone(*arguments: Any) -> Any:
        raise RunStoreUnavailable("gone", StoreFailure.TIMEOUT)

    with monkeypatch.context() as broken:
        broken.setattr(runners.stores[0], "create", gone)
        with pytest.raises(Overloaded):
            await runner.start(spec("gone"))
    assert (await runner.start(spec("next"))).new
    await ended(runner, "next")
