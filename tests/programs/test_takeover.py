"""Timelines of a run that goes from one runner to another: what the first one leaves alone, and who ends the run."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from cluster.core.errors import Overloaded, RunStoreUnavailable
from cluster.core.tools import Outcome, ToolCall, ToolResult
from cluster.runs.events import Accepted, LateAnswer, encode
from cluster.runs.runner import ProgramRunner
from cluster.store.runs.records import NewRun, RunLog
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import ended, outcome, spec, words
from tests.waiting import until


async def late_answers(runner: ProgramRunner, tools: ScriptedTools, run_id: str) -> list[tuple[str, str]]:
    """Outcome and text of the late answers of a run, whose asynchronous call ends now, unless it was cancelled."""
    late = tools.late[f"{run_id}/1.0"]
    if not late.done():
        late.set_result(ToolResult(f"{run_id}/1.0", "slowly", Outcome.OK, "here it is"))
    events = await ended(runner, run_id)
    assert outcome(events).status == "completed"
    return [(event.answer.outcome, event.answer.text) for event in events if isinstance(event, LateAnswer)]


async def test_a_runner_that_lost_its_run_leaves_the_asynchronous_call_to_the_next_one(runners: Runners) -> None:
    tools = ScriptedTools({"slowly": lambda call: ""})
    # The first one takes nothing over while it has a run.
    first = runners(ScriptedReplicas([says("", ("slowly", "{}")), says("meanwhile")]), tools, max_open=1)
    await first.start(spec("stalled"))
    await until(lambda: words(first.written("stalled")).count("TurnResult") == 2)
    second = runners(ScriptedReplicas([says("I see", first_id=200)]), tools)
    second.attend()  # nobody renews the first one's lease
    await until(lambda: tools.resumed)
    first.attend()
    await until(lambda: first.counters["lost"])
    await first.aclose()
    assert await late_answers(second, tools, "stalled") == [(Outcome.OK, "here it is")]
    assert tools.cancelled == []


async def test_a_runner_that_lost_its_run_leaves_the_running_call_to_the_next_one(runners: Runners) -> None:
    gate = asyncio.Event()

    async def waits(call: ToolCall) -> str:
        await gate.wait()
        return "done"

    tools = ScriptedTools({"wait": waits})
    first = runners(ScriptedReplicas([says("", ("wait", "{}"))]), tools, max_open=1)
    await first.start(spec("running"))
    await until(lambda: tools.ran)
    second = runners(ScriptedReplicas([says("I see", first_id=200)]), tools)
    second.attend()  # nobody renews the first one's lease
    await until(lambda: tools.resumed)
    first.attend()
    await until(lambda: first.counters["lost"] and not first.open_runs)
    await first.aclose()
    assert tools.cancelled == []
    gate.set()
    assert outcome(await ended(second, "running")).status == "completed"
    assert tools.cancelled == []


async def test_a_runner_that_cannot_read_a_run_releases_what_it_has_claimed(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["read", "unread-1", "unread-2"]
    runners(ScriptedReplicas([]))  # its process has died: only its store is used
    dead = runners.stores[0]
    for name in names:
        await dead.create(NewRun(name, "t", "p"), [encode(Accepted(spec(name)))])
    await dead.release(names)
    replicas = ScriptedReplicas([says(name) for name in names])
    runner = runners(replicas)
    read, released = runners.stores[1].read, list[str]()

    async def fails(run_id: str, *place: int) -> RunLog | None:
        if run_id.startswith("unread"):
            raise RunStoreUnavailable("it does not answer", "timeout")
        return await read(run_id, *place)

    async def release(run_ids: Collection[str]) -> None:
        released.extend(run_ids)

    with monkeypatch.context() as broken:
        broken.setattr(runners.stores[1], "read", fails)
        broken.setattr(runners.stores[1], "release", release)
        runner.attend()
        await until(lambda: released and replicas.asked)
        assert released[:2] == ["unread-1", "unread-2"]
    for name in names:
        assert outcome(await ended(runner, name)).status == "completed"


async def test_a_runner_that_lost_a_run_that_is_not_stored_leaves_it_in_the_store(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = runners(ScriptedReplicas([[asyncio.Event()]]), max_open=1)
    deleted: list[str] = []

    async def delete(run_id: str, *, unless_keyed: bool = False) -> bool:
        deleted.append(run_id)
        return True

    monkeypatch.setattr(runners.stores[0], "delete", delete)
    await first.start(spec("unkept", store=False))
    second = runners(ScriptedReplicas([[asyncio.Event()]]))
    second.attend()
    await until(lambda: second.open_runs)
    first.attend()
    await until(lambda: first.counters["lost"] and not first.open_runs)
    await first.aclose()
    assert deleted == []


async def test_a_runner_that_closes_while_its_log_is_written_leaves_the_asynchronous_call_to_the_next_one(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ScriptedTools({"slowly": lambda call: ""})
    first = runners(ScriptedReplicas([says("", ("slowly", "{}"))]), tools)
    append, waiting = runners.stores[0].append, asyncio.Event()

    async def gated(*arguments: Any, **options: Any) -> None:
        if tools.late:
            waiting.set()
            await asyncio.Event().wait()
        await append(*arguments, **options)

    monkeypatch.setattr(runners.stores[0], "append", gated)
    await first.start(spec("closed"))
    await waiting.wait()
    await first.aclose()
    await until(lambda: first.counters["lost"])
    second = runners(ScriptedReplicas([says("meanwhile"), says("I see", first_id=200)]), tools)
    second.attend()
    await until(lambda: tools.resumed)
    assert await late_answers(second, tools, "closed") == [(Outcome.OK, "here it is")]
    assert tools.cancelled == []


async def test_a_run_that_is_cancelled_while_nobody_has_it_asks_no_turn(runners: Runners) -> None:
    runners(ScriptedReplicas([]))  # its process has died: only its store is used
    dead = runners.stores[0]
    await dead.create(NewRun("orphan", "t", "p"), [encode(Accepted(spec("orphan")))])
    assert await dead.ask_cancel("orphan")
    replicas = ScriptedReplicas([says("never")])
    runner = runners(replicas)
    runner.attend()
    events = await ended(runner, "orphan")
    assert (words(events), outcome(events).status) == (["Accepted", "TakenOver", "Ended"], "cancelled")
    assert replicas.asked == []


async def test_the_tools_of_a_run_that_is_cancelled_while_nobody_has_it_are_ended(runners: Runners) -> None:
    tools = ScriptedTools({"slowly": lambda call: "", "once": lambda call: asyncio.Event().wait()})
    calls = (("slowly", "{}"), ("once", "{}"))
    first = runners(ScriptedReplicas([says("", *calls)]), tools)
    await first.start(spec("tools"))
    await until(lambda: "ToolAnswer" in words(first.written("tools")))
    await first.aclose()
    replicas = ScriptedReplicas([says("never")])
    second = runners(replicas, tools)
    assert await second.cancel("tools")
    second.attend()
    assert outcome(await ended(second, "tools")).status == "cancelled"
    await until(lambda: not second.open_runs)
    assert (replicas.asked, tools.resumed) == ([], [])
    assert sorted(tools.cancelled) == ["tools/1.0", "tools/1.1"]


async def test_a_run_that_is_cancelled_before_it_has_begun_asks_no_turn(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("never")])
    runner = runners(replicas)
    await runner.start(spec("at-once"))
    assert await runner.cancel("at-once")  # nothing has run between the two
    events = await ended(runner, "at-once")
    assert (words(events), outcome(events).status, replicas.asked) == (["Accepted", "Ended"], "cancelled", [])


async def test_a_runner_that_has_closed_passes_a_cancellation_on(runners: Runners) -> None:
    asked_first = ScriptedReplicas([[asyncio.Event()]])
    first = runners(asked_first)
    await first.start(spec("closing"))
    await until(lambda: asked_first.asked)
    await first.aclose()
    assert not first.open_runs
    replicas = ScriptedReplicas([[asyncio.Event()]])
    second = runners(replicas)
    second.attend()
    await until(lambda: replicas.asked)
    assert await first.cancel("closing")
    assert outcome(await ended(second, "closing")).status == "cancelled"
    assert not await first.cancel("closing")  # the run has ended


async def test_a_runner_that_does_not_know_that_it_lost_a_run_passes_a_cancellation_on(runners: Runners) -> None:
    first = runners(ScriptedReplicas([[asyncio.Event()]]))
    await first.start(spec("unaware"))
    await until(lambda: len(first.written("unaware")) == 2)
    replicas = ScriptedReplicas([[asyncio.Event()]])
    second = runners(replicas)
    second.attend()  # nobody renews the first one's lease
    await until(lambda: replicas.asked)
    assert await first.cancel("unaware")
    assert outcome(await ended(second, "unaware")).status == "cancelled"
    await until(lambda: not first.open_runs)
    assert (first.counters["lost"], first.counters["cancelled"]) == (1, 0)


async def test_a_runner_that_closes_stops_its_turns_before_another_one_has_the_runs(runners: Runners) -> None:
    replicas, released = ScriptedReplicas([[*says("half")[:2], asyncio.Event()]]), list[int]()
    first = runners(replicas)
    release = runners.stores[0].release

    async def released_after(run_ids: Collection[str]) -> None:
        released.append(replicas.closed)
        await release(run_ids)

    runners.stores[0].release = released_after  # type: ignore[method-assign]
    await first.start(spec("stopped"))
    await until(lambda: replicas.asked)
    await first.aclose()
    assert (released, first.open_runs) == ([1], 0)
    second = runners(ScriptedReplicas([says("whole", first_id=200)]))
    second.attend()
    assert outcome(await ended(second, "stopped")).status == "completed"


async def test_a_run_that_the_store_accepts_while_its_runner_closes_is_given_up_too(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, gate = asyncio.Event(), asyncio.Event()
    first = runners(ScriptedReplicas([[asyncio.Event()]]))
    create = first._store.create

    async def slowly(*arguments: Any) -> Any:
        answer = await create(*arguments)
        created.set()
        await gate.wait()
        return answer

    monkeypatch.setattr(first._store, "create", slowly)
    starting = asyncio.create_task(first.start(spec("late")))
    await created.wait()
    await first.aclose()
    gate.set()
    assert (await starting).new
    assert first.open_runs == 0
    assert await first._store.redis.hget("caesura:v1:{runs}:run:late", "owner") == b""
    with pytest.raises(Overloaded):
        await first.start(spec("later"))
    second = runners(ScriptedReplicas([says("done", first_id=200)]))
    second.attend()
    assert outcome(await ended(second, "late")).status == "completed"
