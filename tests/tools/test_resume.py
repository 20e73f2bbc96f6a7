"""Calls that are made again by whoever goes on with a dead caller's work. The clock moves only when a test says so."""

import asyncio
from collections.abc import Callable

import pytest

from cluster.core.tools import Outcome, ToolCall, ToolResult
from tests.tools.scripted import ManualTimers, ScriptedKind, settings, settle
from tools_runtime.executor import ToolExecutor
from tools_runtime.kind import Invocation, sleep_until

Make = Callable[..., ToolExecutor]

PAY = ToolCall("a", "pay", program="p", idempotency_key="k")


def taking(clock: ManualTimers, seconds: float) -> Callable[[Invocation], object]:
    async def step(_: Invocation) -> str:
        await sleep_until(clock, clock.now_s() + seconds)
        return "paid"

    return step


def resume(executor: ToolExecutor, call: ToolCall = PAY) -> "asyncio.Task[ToolResult]":
    return asyncio.create_task(executor.run(call, resumed=True))


async def test_the_same_call_is_taken_over_under_way_and_afterwards(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 4.0))
    ex = executor((kind, settings()))
    first = asyncio.create_task(ex.run(PAY))
    await clock.pass_s(1.0)
    assert ex.knows(PAY)
    taken_over = resume(ex)
    await clock.pass_s(3.0)
    later = await resume(ex)
    assert {first.result().text, taken_over.result().text, later.text} == {"paid"}
    assert taken_over.result().run_s == 4.0
    assert ex.knows(PAY)
    assert len(kind.started) == 1


async def test_only_the_last_who_made_a_call_can_end_it(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 4.0))
    ex = executor((kind, settings()))
    first = asyncio.create_task(ex.run(PAY))
    await settle()
    second = resume(ex)
    await settle()
    first.cancel()
    await settle()
    assert (kind.running, second.done()) == (1, False), "its work is another's now"
    third = resume(ex)
    await settle()
    third.cancel()
    await settle()
    assert (kind.running, kind.cancelled) == (0, 1)
    assert second.result().outcome is Outcome.CANCELLED
    assert (await resume(ex)).outcome is Outcome.CANCELLED, "it may have taken effect"


async def test_the_deadline_is_that_of_the_first(executor: Make, clock: ManualTimers) -> None:
    ex = executor((ScriptedKind("pay", taking(clock, 100.0)), settings(deadline_s=10.0)))
    first = asyncio.create_task(ex.run(PAY))
    await clock.pass_s(9.0)
    second = resume(ex)
    await clock.pass_s(1.0)
    assert (first.result().outcome, second.result().outcome) == (Outcome.TIMEOUT, Outcome.TIMEOUT)


async def test_what_became_of_a_call_is_lost(executor: Make, clock: ManualTimers) -> None:
    pay, look = ScriptedKind("pay", taking(clock, 0.0)), ScriptedKind("look", lambda _: "seen")
    ex = executor((pay, settings()), (look, settings(idempotent=True)))
    assert not ex.knows(PAY)
    for again in (resume(ex), resume(ex), asyncio.create_task(ex.run(PAY))):
        result = await again
        assert result.outcome is Outcome.UNKNOWN
        assert result.text.startswith("unknown: pay may have been run before")
    assert pay.started == [], "nor is it run when the first sending arrives late"
    without_key = ToolCall("b", "pay", program="p")
    assert (await resume(ex, without_key)).outcome is Outcome.UNKNOWN
    seen = await resume(ex, ToolCall("c", "look", program="p", idempotency_key="k"))
    assert (seen.outcome, seen.text) == (Outcome.OK, "seen")


async def test_a_resumed_call_is_the_same_call(executor: Make, clock: ManualTimers) -> None:
    kind = ScriptedKind("pay", taking(clock, 1.0))
    ex = executor((kind, settings()))
    first = asyncio.create_task(ex.run(PAY))
    await settle()
    others = [
        ToolCall("a", "pay", program="p", idempotency_key="another"),
        ToolCall("a", "pay", {"to": "y"}, program="p", idempotency_key="k"),
        ToolCall("a", "pay", program="p"),
    ]
    assert [(await resume(ex, other)).outcome for other in others] == [Outcome.REFUSED] * 3
    await clock.pass_s(1.0)
    assert first.result().outcome is Outcome.OK
    assert len(kind.started) == 1


@pytest.mark.parametrize("seconds", [1.0, 5.0])
async def test_an_asynchronous_call_is_resumed(executor: Make, clock: ManualTimers, seconds: float) -> None:
    kind = ScriptedKind("pay", taking(clock, 4.0))
    ex = executor((kind, settings(asynchronous=True)))
    assert (await ex.run(PAY)).outcome is Outcome.STARTED
    await clock.pass_s(seconds)
    assert ex.knows(PAY)
    assert (await resume(ex)).outcome is (Outcome.STARTED if seconds < 4 else Outcome.OK)
    await clock.pass_s(4.0)
    assert (await ex.completion("p", "a")).text == "paid"
    assert len(kind.started) == 1
