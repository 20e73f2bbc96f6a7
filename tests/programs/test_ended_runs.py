"""The memory of runs that have ended: it is bounded, and a run that was forgotten is read from the store."""

import gc
import weakref
from typing import Any

import pytest

from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import Idempotency
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, says
from tests.programs.test_runner import ended, outcome, spec
from tests.waiting import until

MAX_BYTES = "cluster.runs.ended_runs.MAX_BYTES"
LARGE = "x" * 100_000
BOUND = 350_000


def large(run_id: str, **fields: Any) -> Any:
    return spec(run_id, messages=({"role": "user", "content": LARGE},), **fields)


async def run(runner: ProgramRunner, run_id: str, *, idempotency: Idempotency | None = None, **fields: Any) -> Any:
    """The events of a large run that has ended."""
    await runner.start(large(run_id, **fields), idempotency=idempotency)
    events = await ended(runner, run_id)
    await until(lambda: not runner.open_runs)
    return events


async def test_the_memory_of_ended_runs_is_bounded_and_the_oldest_are_forgotten_first(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_BYTES, BOUND)
    runner = runners(ScriptedReplicas([says("done") for _ in range(5)]))
    events: list[Any] = []
    tasks: list[weakref.ref[Any]] = []
    for number in range(5):
        events.append(await run(runner, f"large-{number}"))
        tasks.append(weakref.ref(runner.ended.get(f"large-{number}")))
        assert runner.ended.bytes <= BOUND
    gc.collect()
    assert [task() is None for task in tasks] == [True, True, False, False, False]
    assert [await ended(runner, f"large-{number}") for number in range(5)] == events
    assert [list(await runner.load(f"large-{number}", "t") or []) for number in range(5)] == events


async def test_a_run_larger_than_the_bound_is_read_from_the_store(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_BYTES, 0)
    runner = runners(ScriptedReplicas([says("done") for _ in range(2)]))
    assert outcome(await run(runner, "above")).status == "completed"
    assert outcome(await run(runner, "above-keyed", store=False, idempotency=Idempotency("above", b""))).status
    assert (runner.ended.bytes, runner.ended.get("above"), runner.ended.get("above-keyed")) == (0, None, None)
    for name in ("above", "above-keyed"):
        assert outcome(await ended(runner, name)).status == "completed"


async def test_a_run_that_only_this_process_has_waits_for_its_caller(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_BYTES, 0)
    runner = runners(ScriptedReplicas([says("done") for _ in range(3)]))
    await runner.start(large("unstored", store=False))
    await until(lambda: not runner.open_runs)
    assert outcome(await run(runner, "other")).status == "completed"
    assert outcome(await ended(runner, "unstored")).status == "completed"
    await run(runner, "followed", store=False)
    assert (runner.ended.bytes, runner.ended.get("unstored"), runner.ended.get("followed")) == (0, None, None)


async def test_what_was_written_is_not_kept_encoded(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("done")]))
    await run(runner, "written")
    task = runner.ended.get("written")
    assert task is not None and task.journal.memory_bytes > len(LARGE)
    await until(lambda: not task.journal._encoded)


async def test_a_deleted_run_frees_its_memory(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("done")]))
    await run(runner, "deleted")
    task = weakref.ref(runner.ended.get("deleted"))
    assert await runner.delete("deleted")
    gc.collect()
    assert (task(), runner.ended.bytes) == (None, 0)


async def test_ended_runs_are_forgotten_after_a_while(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.runs.ended_runs.KEPT_S", 0.01)
    runner = runners(ScriptedReplicas([says("done")]))
    await run(runner, "kept", store=False)
    await until(lambda: runner.ended.get("kept") is None)
    assert runner.ended.bytes == 0
