"""Runs that were deleted, also by another process than the one that has run them."""

from typing import Any

from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, says
from tests.programs.test_runner import ended, spec
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
