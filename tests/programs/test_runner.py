"""Timelines of a runner over a real Redis: what is asked, what is logged, who goes on, what is never done twice."""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from time import time
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, STORE_FULL, BadRequest, IdempotencyConflict, Overloaded
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolOffer, ToolResult
from cluster.core.turn import PromptMode, TurnBegan, TurnDelta, pack_ids
from cluster.http.batch_service import BatchService
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.runs.chat_api import as_error
from cluster.runs.events import (
    Ended,
    LateAnswer,
    Limits,
    RunEvent,
    RunSpec,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    Truncated,
    TurnIntent,
)
from cluster.runs.runner import ProgramRunner
from cluster.runs.state import fold
from cluster.store.client import StoreMemory
from cluster.store.runs.records import Idempotency
from tests.programs.runners import Runners
from tests.programs.scripted_runs import Script, ScriptedReplicas, ScriptedTools, says
from tests.waiting import WITHIN_S, until

NAMES = ("add", "once", "slowly", "wait")
OFFERS = tuple(ToolOffer(name, {"name": name}, here=True, tool=ToolId.of_operator(name)) for name in NAMES)


def spec(run_id: str, **fields: Any) -> RunSpec:
    limits = Limits(turns=8, tool_calls=8, output_tokens=1000, wall_s=30.0, turn_attempts=2)
    messages = ({"role": "user", "content": "go"},)
    given: dict[str, Any] = {"limits": limits, "offers": OFFERS, "messages": messages} | fields
    identity = ProgramIdentity("p").encode()
    return RunSpec(run_id, "responses", "t", "p", identity, "tiny", time(), **given)


async def ended(runner: ProgramRunner, run_id: str) -> list[RunEvent]:
    """All events of a run, when it has ended."""
    async with asyncio.timeout(WITHIN_S):
        return [event async for batch in runner.follow(run_id) for event in batch]


def words(events: Sequence[RunEvent]) -> list[str]:
    return [type(event).__name__ for event in events if type(event).__name__ != "Generated"]


def outcome(events: Sequence[RunEvent]) -> Ended:
    last = events[-1]
    assert isinstance(last, Ended)
    return last


async def test_a_program_with_a_tool_in_one_request(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("let me", ("add", '{"a": 1}')), says("it is 2", first_id=200)])
    runner = runners(replicas, ScriptedTools({"add": lambda call: "2"}))
    assert (await runner.start(spec("r1"))).new
    events = await ended(runner, "r1")
    turns = ["TurnIntent", "TurnResult"]
    assert words(events) == ["Accepted", *turns, "ToolIntent", "ToolAnswer", *turns, "Ended"]
    assert outcome(events).status == "completed"
    assert [message["role"] for message in replicas.asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert replicas.prior == [[], [100, 101, 102]]
    assert replicas.identities[1].hints.last_tool == "add"
    assert replicas.identities[0].key == "t/p"
    assert replicas.told == []  # the tool answered at once
    assert [result.outcome for result in runners.observed] == [Outcome.OK]
    assert list(await runner.load("r1", "t") or []) == events
    assert await runner.load("r1", "somebody else") is None


async def test_the_scheduler_is_told_of_a_tool_that_takes_its_time(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("", ("wait", "{}")), says("done")])

    async def until_told(call: Any) -> str:
        await until(lambda: replicas.told)
        return "ok"

    runner = runners(replicas, ScriptedTools({"wait": until_told}))
    await runner.start(spec("r27", last=True))
    await ended(runner, "r27")
    await until(lambda: len(replicas.told) == 3)
    assert replicas.told == [("tool_started", {"tools": ["wait"]}), ("tool_finished", {}), ("end", {})]


async def test_a_run_that_its_request_calls_the_last_turn_ends_its_program_once_at_its_end(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("", ("add", "{}")), says("done", first_id=200)])
    runner = runners(replicas, ScriptedTools({"add": str}))
    await runner.start(replace(spec("r28"), identity=ProgramIdentity("p", last_turn=True).encode()))
    await ended(runner, "r28")
    await until(lambda: replicas.told)
    assert [identity.last_turn for identity in replicas.identities] == [False, False]
    assert replicas.told == [("end", {})]


async def test_a_notification_that_does_not_arrive_holds_nothing_up(runners: Runners) -> None:
    slow = asyncio.Event()
    replicas = ScriptedReplicas([says("", ("wait", "{}")), says("done")], stuck=frozenset({"tool_started"}))

    async def wait(call: Any) -> str:
        asyncio.get_running_loop().call_later(0.1, slow.set)  # long enough to be worth a notification
        await slow.wait()
        return "ok"

    runner = runners(replicas, ScriptedTools({"wait": wait}))
    await runner.start(spec("stuck", last=True))
    await ended(runner, "stuck")
    await until(lambda: replicas.told)
    assert replicas.told == [("end", {})]


async def test_an_asynchronous_tool_whose_runtime_fails_is_an_unknown_outcome(runners: Runners) -> None:
    class Broken(ScriptedTools):
        async def completion(self, program: str, call_id: str) -> ToolResult:
            raise ConnectionError("no such actor")

    runner = runners(ScriptedReplicas([says("", ("slowly", "{}")), says("waiting"), says("well")]),
                     Broken({"slowly": lambda call: ""}))  # fmt: skip
    await runner.start(spec("broken"))
    events = await ended(runner, "broken")
    assert outcome(events).status == "completed"
    [late] = [event.answer for event in events if isinstance(event, LateAnswer)]
    assert late.outcome == Outcome.UNKNOWN
    assert "may have taken effect" in late.text


async def test_what_a_tool_runtime_refuses_is_told_as_it_says_it(runners: Runners) -> None:
    def refuse(call: ToolCall) -> str:
        raise BadRequest("tools: nothing like it", param="tools")

    runner = runners(ScriptedReplicas([says("", ("add", "{}"))]), ScriptedTools({"add": refuse}))
    await runner.start(spec("refused"))
    fault = outcome(await ended(runner, "refused")).fault
    assert fault is not None
    assert (fault.code, fault.message) == ("invalid_prompt", "tools: nothing like it")


async def test_a_tool_is_checked_against_the_tenant_where_it_is_dispatched(runners: Runners) -> None:
    """A log may be older than the configuration: its offers do not decide what the tenant may use now."""
    replicas = ScriptedReplicas([says("", ("add", "{}"), ("once", "{}")), says("done", first_id=200)])
    tools = ScriptedTools({"add": lambda call: "2", "once": lambda call: "never"})
    runner = runners(replicas, tools, tenants={"t": {"tools": ["add"]}})
    await runner.start(spec("r60"))
    answers = {event.index: event for event in await ended(runner, "r60") if isinstance(event, ToolAnswer)}
    assert [answers[index].outcome for index in (0, 1)] == [Outcome.OK, Outcome.REFUSED]
    assert answers[1].text == "refused: this tenant may not use the tool 'once'"
    assert [call.tool for call in tools.ran] == [ToolId.of_operator("add")]


async def test_a_call_whose_tool_the_tenant_lost_meanwhile_may_have_taken_effect(runners: Runners) -> None:
    never = asyncio.Event()

    async def stuck(call: ToolCall) -> str:
        await never.wait()
        return "never"

    first = runners(ScriptedReplicas([says("", ("wait", "{}"))]), ScriptedTools({"wait": stuck}))
    await first.start(spec("r61"))
    await until(lambda: any(isinstance(event, ToolIntent) for event in first.written("r61")))
    await first.aclose()
    tools = ScriptedTools({"wait": stuck})
    second = runners(ScriptedReplicas([says("done", first_id=200)]), tools, tenants={"t": {"tools": ["add"]}})
    second.attend()
    [answer] = [event for event in await ended(second, "r61") if isinstance(event, ToolAnswer)]
    assert (answer.outcome, tools.ran, tools.resumed) == (Outcome.UNKNOWN, [], [])


async def test_a_run_works_in_no_requests_context(runners: Runners) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []

    def add(call: ToolCall) -> str:
        seen.append(request.get())
        return "2"

    runner = runners(ScriptedReplicas([says("", ("add", "{}")), says("done")]), ScriptedTools({"add": add}))
    request.set("the client's")
    await runner.start(spec("r0"))
    await ended(runner, "r0")
    assert seen == ["none"]


HALF_A_CALL = [(("add", ""),), (("add", '{"a": 1}'),), (("add", "{}"), ("add", '{"a": '))]


@pytest.mark.parametrize("calls", HALF_A_CALL, ids=["no arguments yet", "closed by the parser", "after a whole one"])
@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("stop", "stop_sequence")])
async def test_no_call_of_a_turn_that_was_cut_is_run(
    runners: Runners, calls: tuple[tuple[str, str], ...], finish: str, reason: str
) -> None:
    tools = ScriptedTools({"add": lambda call: "2"})
    runner = runners(ScriptedReplicas([says("let me", *calls, finish=finish), says("done")]), tools)
    run_id = f"cut-{finish}-{len(calls)}-{len(calls[0][1])}"
    await runner.start(spec(run_id))
    events = await ended(runner, run_id)
    assert (tools.ran, words(events)) == ([], ["Accepted", "TurnIntent", "TurnResult", "Ended"])
    assert (outcome(events).status, outcome(events).reason) == ("incomplete", reason)
    state = fold(events)
    assert state is not None
    assert [call.arguments for call in state.calls] == [arguments for _, arguments in calls[:-1]]


async def test_another_process_reads_the_same_log(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("hello")]))
    await runner.start(spec("r2"))
    events = await ended(runner, "r2")
    other = runners(ScriptedReplicas([]))
    assert await ended(other, "r2") == events
    assert list(await other.load("r2", "t") or []) == events


async def test_calls_of_one_turn_overlap(runners: Runners) -> None:
    both = asyncio.Barrier(2)

    async def meet(call: Any) -> str:
        await both.wait()
        return call.arguments

    calls = (("wait", '{"n": 1}'), ("wait", '{"n": 2}'))
    runner = runners(ScriptedReplicas([says("", *calls), says("done")]), ScriptedTools({"wait": meet}))
    await runner.start(spec("r3"))
    state = fold(await ended(runner, "r3"))
    assert state is not None
    assert [m["content"] for m in state.messages if m["role"] == "tool"] == ['{"n": 1}', '{"n": 2}']


async def test_a_runner_that_dies_in_a_turn_is_followed_by_another(runners: Runners) -> None:
    hangs = [TurnBegan(PromptMode.FIRST, pack_ids([1])), TurnDelta(pack_ids([2]), "half "), asyncio.Event()]
    first = runners(ScriptedReplicas([hangs]))
    await first.start(spec("r4"))
    await until(lambda: first.open_runs and len(first.written("r4")) == 3)
    second = runners(ScriptedReplicas([says("whole")]))
    second.attend()  # nobody renews the first one's lease
    events = await ended(second, "r4")
    assert words(events) == ["Accepted", "TurnIntent", "TakenOver", "TurnIntent", "TurnResult", "Ended"]
    assert [event.attempt for event in events if isinstance(event, TurnIntent)] == [1, 2]
    assert second.counters["taken_over"] == 1


async def test_an_answer_that_does_not_fit_is_cut_alike_by_whoever_goes_on(
    runners: Runners, caplog: pytest.LogCaptureFixture
) -> None:
    """The first runner dies in the turn that reads the answer, and the second one after it."""
    long = "x" * 5000
    tools = ScriptedTools({"add": lambda call: long})
    began = TurnBegan(PromptMode.CONTINUED, pack_ids([1]), 500)
    first = runners(ScriptedReplicas([says("", ("add", "{}")), [began, asyncio.Event()]]), tools)
    await first.start(spec("long"))
    await until(lambda: first.open_runs and len(first.written("long")) == 7)
    replicas = ScriptedReplicas([says("read", ("add", "{}"), answer_chars=500), says("done", answer_chars=300)])
    second = runners(replicas, tools)
    second.attend()
    events = await ended(second, "long")
    assert [message["content"] for message in replicas.asked[0]["messages"] if message["role"] == "tool"] == [long]
    cut, whole = [message["content"] for message in replicas.asked[1]["messages"] if message["role"] == "tool"]
    assert whole == long and len(cut) < 700 and "4,500 characters of this answer were left out" in cut
    assert replicas.answers == [(2,), (4,)]
    assert [event.text for event in events if isinstance(event, ToolAnswer)] == [long, long]
    state = fold(events)
    assert state is not None and "4,700 characters" in state.messages[4]["content"]
    assert second.answers_cut == 2
    assert "turn 2 of run long: 1 tool answers were cut to 500 characters" in caplog.text


async def test_a_run_that_another_ended_is_read_to_its_end_by_who_lost_it(runners: Runners) -> None:
    first = runners(ScriptedReplicas([[asyncio.Event()]]))
    await first.start(spec("lost"))
    await until(lambda: len(first.written("lost")) == 2)
    second = runners(ScriptedReplicas([says("whole")]))
    second.attend()
    events = await ended(second, "lost")
    first.attend()
    await until(lambda: not first.open_runs)
    assert list(await first.load("lost", "t") or []) == events


@pytest.mark.parametrize("jumped_s", [-3600.0, 3600.0])
async def test_a_clock_that_jumps_ends_no_run(runners: Runners, jumped_s: float) -> None:
    """It jumps while the first runner works: the second one sees another time than that of the acceptance."""
    first = runners(ScriptedReplicas([[asyncio.Event()]]))
    asked = replace(spec(f"jump{jumped_s:.0f}"), created_s=time() - jumped_s)
    await first.start(asked)
    await until(lambda: len(first.written(asked.id)) == 2)
    second = runners(ScriptedReplicas([says("whole")]))
    second.attend()
    end = outcome(await ended(second, asked.id))
    assert end.status == "completed"
    assert asked.created_s < end.at_s < asked.created_s + asked.limits.wall_s


async def test_a_call_that_may_have_been_sent_is_never_sent_anew(runners: Runners) -> None:
    """The first runner dies while its tool works; the tool may not run twice; the model is told so."""
    never = asyncio.Event()
    tools = ScriptedTools({"once": lambda call: never.wait()})
    first = runners(ScriptedReplicas([says("", ("once", "{}"))]), tools)
    await first.start(spec("r5"))
    await until(lambda: tools.ran)
    replicas = ScriptedReplicas([says("it may have happened", first_id=200)])
    second = runners(replicas, tools)
    second.attend()
    events = await ended(second, "r5")
    assert outcome(events).status == "completed"
    assert len(tools.ran) == 1 and len(tools.resumed) == 1
    assert tools.ran[0].idempotency_key == tools.resumed[0].idempotency_key == "r5/1.0"
    assert replicas.asked[0]["messages"][-1]["content"] == "unknown: it may have taken effect"
    assert [event.outcome for event in events if isinstance(event, ToolAnswer)] == ["unknown"]


async def test_the_old_runner_writes_nothing_more_once_it_was_followed(runners: Runners) -> None:
    go_on = asyncio.Event()
    first = runners(ScriptedReplicas([[TurnBegan(PromptMode.FIRST, b""), go_on, *says("late")[1:]]]))
    await first.start(spec("r6"))
    await until(lambda: first.open_runs and len(first.written("r6")) == 2)
    second = runners(ScriptedReplicas([says("whole")]))
    second.attend()
    events = await ended(second, "r6")
    go_on.set()
    await until(lambda: first.open_runs == 0)
    assert first.counters["lost"] == 1
    assert await ended(runners(ScriptedReplicas([])), "r6") == events
    assert [type(event) for event in events].count(TakenOver) == 1


async def test_a_graceful_end_hands_over_at_once(runners: Runners) -> None:
    first = runners(ScriptedReplicas([[asyncio.Event()]]), lease_s=600.0)
    await first.start(spec("r7"))
    await until(lambda: first.open_runs)
    await first.aclose()
    second = runners(ScriptedReplicas([says("whole")]), lease_s=0.3)
    second.attend()
    assert outcome(await ended(second, "r7")).status == "completed"


async def test_cancelling_stops_the_turn_and_the_tools(runners: Runners) -> None:
    replicas = ScriptedReplicas([[TurnBegan(PromptMode.FIRST, b""), asyncio.Event()]])
    runner = runners(replicas)
    await runner.start(spec("r8"))
    await until(lambda: replicas.asked)
    assert await runner.cancel("r8")
    assert outcome(await ended(runner, "r8")).status == "cancelled"
    assert replicas.closed == 1
    tools = ScriptedTools({"wait": lambda call: asyncio.Event().wait()})
    replicas = ScriptedReplicas([says("", ("wait", "{}"))])
    runner = runners(replicas, tools)
    await runner.start(spec("r9"))
    await until(lambda: tools.ran)
    other = runners(ScriptedReplicas([]))
    runner.attend()
    assert await other.cancel("r9")  # another ingress than the one that works on it
    assert outcome(await ended(runner, "r9")).status == "cancelled"
    assert tools.cancelled == ["r9/1.0"]
    await until(lambda: ("release", {}) in replicas.told)
    assert not await other.cancel("r9")


async def test_the_wall_time_is_a_bound(runners: Runners) -> None:
    limits = Limits(turns=8, tool_calls=8, output_tokens=1000, wall_s=0.2, turn_attempts=2)
    replicas = ScriptedReplicas([[asyncio.Event()]])
    runner = runners(replicas)
    await runner.start(spec("r10", limits=limits))
    end = outcome(await ended(runner, "r10"))
    assert (end.status, end.reason) == ("incomplete", "max_wall_time")
    assert replicas.closed == 1


async def test_a_turn_whose_replica_fails_is_asked_again_and_a_bad_request_is_not(runners: Runners) -> None:
    from cluster.core.errors import UpstreamFailed

    runner = runners(ScriptedReplicas([[UpstreamFailed("it died")], says("whole")]))
    await runner.start(spec("r11"))
    assert outcome(await ended(runner, "r11")).status == "completed"
    runner = runners(ScriptedReplicas([[UpstreamFailed("it died")], [UpstreamFailed("again")]]))
    await runner.start(spec("r12"))
    end = outcome(await ended(runner, "r12"))
    assert end.fault is not None and end.fault.message == "turn 1 was lost 2 times"
    runner = runners(ScriptedReplicas([[BadRequest("too long", param="messages")]]))
    await runner.start(spec("r13"))
    fault = outcome(await ended(runner, "r13")).fault
    assert fault is not None and (fault.status, fault.message, fault.param) == (400, "too long", "messages")


async def test_a_conversation_that_does_not_fit_loses_its_oldest_messages_if_the_caller_wants_it(
    runners: Runners,
) -> None:
    def too_long() -> Script:
        return [BadRequest("too long", param="messages", code=CONTEXT_LENGTH_EXCEEDED)]

    told = tuple({"role": "user" if n % 2 == 0 else "assistant", "content": str(n)} for n in range(5))
    replicas = ScriptedReplicas([too_long(), too_long(), says("whole")])
    runner = runners(replicas)
    await runner.start(spec("cut-1", messages=told, truncate=True))
    events = await ended(runner, "cut-1")
    assert outcome(events).status == "completed"
    assert [event.groups for event in events if isinstance(event, Truncated)] == [2, 1]
    sent = [[message["content"] for message in asked["messages"]] for asked in replicas.asked]
    assert sent == [["0", "1", "2", "3", "4"], ["2", "3", "4"], ["3", "4"]]
    runner = runners(ScriptedReplicas([too_long()]))
    await runner.start(spec("cut-2", messages=told))
    fault = outcome(await ended(runner, "cut-2")).fault
    assert fault is not None and fault.code == CONTEXT_LENGTH_EXCEEDED


async def test_a_full_queue_is_waited_for_and_costs_no_attempt(runners: Runners) -> None:
    full = [Overloaded("full", retry_after_s=0)]
    runner = runners(ScriptedReplicas([list(full), list(full), list(full), says("whole")]))
    await runner.start(spec("r14"))
    events = await ended(runner, "r14")
    assert outcome(events).status == "completed"
    assert words(events).count("TurnIntent") == 1


async def test_a_full_record_is_not_waited_for(runners: Runners) -> None:
    replicas = ScriptedReplicas([[Overloaded("the record is full", code=STORE_FULL, retry_after_s=0)], says("whole")])
    runner = runners(replicas)
    await runner.start(spec("full-record"))
    end = outcome(await ended(runner, "full-record"))
    assert end.status == "failed" and len(replicas.asked) == 1
    error = as_error(end.fault)
    assert isinstance(error, Overloaded) and (error.status, error.code) == (503, "store_full")
    assert error.message == "the record is full" and error.retry_after_s is not None


async def test_an_asynchronous_tool(runners: Runners) -> None:
    tools = ScriptedTools({"slowly": lambda call: ""})
    replicas = ScriptedReplicas([says("", ("slowly", "{}")), says("meanwhile"), says("I see")])
    runner = runners(replicas, tools)
    await runner.start(spec("r15"))
    await until(lambda: len(replicas.asked) == 2)
    tools.late["r15/1.0"].set_result(ToolResult("r15/1.0", "slowly", Outcome.OK, "here it is"))
    events = await ended(runner, "r15")
    assert outcome(events).status == "completed"
    assert replicas.asked[2]["messages"][-1]["content"].endswith("here it is")
    assert [result.text for result in runners.observed] == ["here it is"]


async def test_the_same_idempotency_key_is_the_same_run(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("once")]))
    assert (await runner.start(spec("r16"), idempotency=Idempotency("key", b"body"))).new
    again = await runner.start(spec("r17"), idempotency=Idempotency("key", b"body"))
    assert (again.run_id, again.new) == ("r16", False)
    with pytest.raises(IdempotencyConflict):
        await runner.start(spec("r18"), idempotency=Idempotency("key", b"another body"))


async def test_more_runs_than_allowed_are_refused_before_anything_is_kept(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([[asyncio.Event()]]), max_open=1)
    await runner.start(spec("r19"))
    with pytest.raises(Overloaded) as refusal:
        await runner.start(spec("r20"))
    assert refusal.value.retry_after_s is not None
    assert await runner.load("r20", "t") is None


async def test_no_run_is_accepted_while_the_store_is_full(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("there is room")]))
    runner.memory.memory = StoreMemory(95, 100)
    with pytest.raises(Overloaded) as refusal:
        await runner.start(spec("r23"))
    assert (refusal.value.code, refusal.value.status) == ("store_full", 503)
    assert refusal.value.retry_after_s is not None and await runner.load("r23", "t") is None
    runner.memory.memory = StoreMemory(50, 100)
    await runner.start(spec("r23"))
    assert outcome(await ended(runner, "r23")).status == "completed"


async def test_what_nobody_wanted_kept_is_gone_afterwards(runners: Runners) -> None:
    runner = runners(ScriptedReplicas([says("secret")]))
    await runner.start(spec("r21", store=False, last=True))
    assert outcome(await ended(runner, "r21")).status == "completed"
    other = runners(ScriptedReplicas([]))
    await until(lambda: runner.open_runs == 0)
    await asyncio.sleep(0.05)
    assert await other.load("r21", "t") is None


async def test_intents_are_in_the_log_before_anything_is_done(runners: Runners) -> None:
    runner: ProgramRunner
    seen: list[list[str]] = []

    async def look(call: Any) -> str:
        seen.append(words(list(await runner.load("r22", "t") or [])))
        return "ok"

    runner = runners(ScriptedReplicas([says("", ("add", "{}")), says("done")]), ScriptedTools({"add": look}))
    await runner.start(spec("r22"))
    await ended(runner, "r22")
    assert seen == [["Accepted", "TurnIntent", "TurnResult", ToolIntent.__name__]]


async def test_a_line_of_a_batch_finds_its_run_by_its_key(runners: Runners, redis: EmbeddedRedis) -> None:
    gate = asyncio.Event()
    runner = runners(ScriptedReplicas([says("done"), [gate, *says("late")]]))
    config = CaesuraConfig.model_validate({"redis": {"url": redis.url}})
    service = BatchService(config, MonotonicClock(), "batches", runner, {})
    await runner.start(spec("r40", store=False), idempotency=Idempotency("batch_1-1", b"body"))
    await ended(runner, "r40")
    await until(lambda: not runner.open_runs)
    await service._forget_line("another", "batch_1-1")
    assert await runner.keyed("t", "batch_1-1") == "r40"
    await service._forget_line("t", "batch_1-1")
    assert await runner.keyed("t", "batch_1-1") is None
    await runner.start(spec("r41"), idempotency=Idempotency("batch_1-2", b"body"))
    await service._cancel_line("t", "batch_1-2")
    assert outcome(await ended(runner, "r41")).status == "cancelled"
    await service.aclose()
