"""Runs that were deleted, also by another process than the one that has run them."""

import asyncio
from typing import Any

import pytest

from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import ended, spec
from tests.store.outages import eventually
from tests.waiting import until


async def test_a_run_that_another_process_deleted_is_gone(runners: Runners) -> None:
    one, other = runners(ScriptedReplicas([says("hello"), says("unkept")])), runners(ScriptedReplicas([]))
    await one.start(spec("gone"))
    assert len(await ended(one, "gone")) == len(await one.load("gone", "t") or ())
    await until(lambda: not one.open_runs)
    assert await other.delete("gone")
    assert await one.load("gone", "t") is None
    # One that is not stored is read for as long as before, because nobody can delete it.
    forgotten: list[Any] = []
    await one.start(spec("unkept", store=False), on_end=forgotten.append)
    await until(lambda: forgotten)
    assert await other.load("unkept", "t") is None
    assert await one.load("unkept", "t")


@pytest.mark.parametrize("renews", [True, False], ids=["renewal", "write"])
async def test_a_run_that_another_runner_has_done_and_deleted_is_not_done_again(runners: Runners, renews: bool) -> None:
    """The former owner notices it at its next renewal, or when it writes what comes next."""
    gate = asyncio.Event()
    replicas = ScriptedReplicas([[gate, *says("again", ("add", "{}"))], says("twice")])
    run_id = f"done-{renews}"
    tools = ScriptedTools({"add": str})
    first = runners(replicas, tools, max_open=1)
    await first.start(spec(run_id, store=False))
    await until(lambda: replicas.asked)
    second = runners(ScriptedReplicas([says("once")]))
    second.attend()  # nobody renews the first one's lease
    store = runners.stores[1]

    async def is_deleted() -> bool | None:
        return True if await store.read(run_id) is None else None

    await eventually(is_deleted)
    assert second.counters["completed"] == 1
    if renews:
        first.attend()
        await until(lambda: not first.open_runs)
    gate.set()
    await until(lambda: not first.open_runs)
    assert first.counters["lost"] == 1
    assert await store.read(run_id) is None
    assert (len(replicas.asked), tools.ran) == (1, [])
