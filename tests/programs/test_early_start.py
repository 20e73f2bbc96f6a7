"""Calls that start while their turn goes on: those of tools that are idempotent or read-only."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.core.errors import HttpError
from cluster.core.tools import Outcome, ToolCall
from cluster.core.turn import CallDelta, PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids
from cluster.runs.events import (
    Accepted,
    Call,
    EarlyEnd,
    EarlyIntent,
    RunEvent,
    TakenOver,
    ToolAnswer,
    TurnIntent,
    TurnResult,
)
from cluster.runs.state import fold
from cluster.runs.turn_text import TurnText
from tests.programs.runners import Runners
from tests.programs.scripted_runs import Script, ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import OFFERS, ended, outcome, spec, words
from tests.waiting import until

EARLY = tuple(replace(offer, starts_early=offer.name == "add") for offer in OFFERS)


def call(index: int, arguments: str, name: str | None = "add", id: int = 10) -> TurnDelta:
    return TurnDelta(pack_ids([id]), "", calls=(CallDelta(index, f"call{index}" if name else None, name, arguments),))


def turn(*pieces: Any, finish: str = "tool_calls") -> Script:
    return [TurnBegan(PromptMode.CONTINUED, pack_ids([1])), *pieces, TurnDone(finish, 10, 8, 2)]


def more(text: str = " and") -> TurnDelta:
    return TurnDelta(pack_ids([20]), text)


class Adds(ScriptedTools):
    """The tool `add`, which answers when the test says so, and the others at once."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        super().__init__({"add": self._add, "once": lambda call: "once"})

    async def _add(self, call: ToolCall) -> str:
        await self.end.wait()
        return f"2 of {call.arguments}"


async def test_a_call_runs_while_its_turn_goes_on(runners: Runners) -> None:
    goes_on = asyncio.Event()
    replicas = ScriptedReplicas([turn(call(0, '{"a": '), call(0, "1}", None), more(), goes_on, more()), says("done")])
    tools = Adds()
    runner = runners(replicas, tools)
    await runner.start(spec("early", offers=EARLY))
    await until(lambda: tools.ran)
    # Its intent was in the log before it ran.
    log = list(runner.written("early"))
    assert [event.call.arguments for event in log if isinstance(event, EarlyIntent)] == ['{"a": 1}']
    tools.end.set()
    await until(lambda: "add" in tools.ended)
    goes_on.set()
    events = await ended(runner, "early")
    turns = ["TurnIntent", "TurnResult"]
    expected = ["Accepted", "TurnIntent", "EarlyIntent", "TurnResult", "ToolIntent", "ToolAnswer", *turns, "Ended"]
    assert (words(events), len(tools.ran)) == (expected, 1)
    [answer] = [event for event in events if isinstance(event, ToolAnswer)]
    assert (answer.place, answer.text) == ((1, 0), '2 of {"a": 1}')
    state = fold(events)
    assert state is not None and state.unexplained == () and state.tool_calls == 1


async def test_a_call_that_runs_longer_than_its_turn_is_awaited(runners: Runners) -> None:
    replicas = ScriptedReplicas([turn(call(0, "{}"), more(), call(1, "{}", "once"), more()), says("done")])
    tools = Adds()
    runner = runners(replicas, tools)
    await runner.start(spec("longer", offers=EARLY))
    await until(lambda: len(tools.ran) == 2)
    assert [one.name for one in tools.ran] == ["add", "once"]  # the other one waited for the end of the turn
    assert [one.id for one in tools.ran] == ["longer/1.0/early-1", "longer/1.1"]
    tools.end.set()
    events = await ended(runner, "longer")
    assert [event.place for event in events if isinstance(event, ToolAnswer)] == [(1, 1), (1, 0)]
    [tool_messages] = [[m["content"] for m in replicas.asked[1]["messages"] if m["role"] == "tool"]]
    assert tool_messages == ["2 of {}", "once"]


async def test_other_tools_and_calls_that_need_consent_wait_for_the_end_of_the_turn(runners: Runners) -> None:
    consent = tuple(replace(offer, approval=True) for offer in EARLY)
    theirs = tuple(replace(offer, here=False) for offer in EARLY)
    for name, offers, tool in (("plain", EARLY, "once"), ("consent", consent, "add"), ("theirs", theirs, "add")):
        goes_on = asyncio.Event()
        replicas = ScriptedReplicas([turn(call(0, "{}", tool), more(), goes_on), says("done")])
        tools = Adds()
        runner = runners(replicas, tools)
        await runner.start(spec(name, offers=offers))
        await until(lambda: replicas.asked)  # noqa: B023
        await asyncio.sleep(0.05)
        assert tools.ran == [], name
        goes_on.set()
        events = await ended(runner, name)
        assert not any(isinstance(event, EarlyIntent) for event in events), name


CHANGES: dict[str, tuple[list[Any], str]] = {
    "other arguments": ([call(0, " ", None)], "tool_calls"),
    "the turn is cut": ([], "length"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_call_that_the_turn_does_not_make_is_ended_and_named(runners: Runners, name: str) -> None:
    goes_on, (rest, finish) = asyncio.Event(), CHANGES[name]
    script = turn(call(0, "{}"), more(), goes_on, *rest, finish=finish)
    replicas, tools = ScriptedReplicas([script, says("done")]), Adds()
    runner = runners(replicas, tools)
    run_id = name.replace(" ", "-")
    await runner.start(spec(run_id, offers=EARLY))
    await until(lambda: tools.ran)
    goes_on.set()
    await until(lambda: tools.cancelled)
    tools.end.set()
    events = await ended(runner, run_id)
    [end] = [event for event in events if isinstance(event, EarlyEnd)]
    assert (end.place, end.attempt, end.outcome) == ((1, 0), 1, Outcome.CANCELLED)
    assert tools.cancelled == [f"{run_id}/1.0/early-1"]
    state = fold(events)
    assert state is not None and state.unexplained == ()
    answers = [event.text for event in events if isinstance(event, ToolAnswer)]
    assert answers == (["2 of {} "] if name == "other arguments" else [])
    assert state.tool_calls == len(answers) + 1


async def test_a_turn_that_fails_leaves_no_call_unexplained(runners: Runners) -> None:
    """The next attempt may make another call at the same place, which is another call for the tools."""
    fails = asyncio.Event()
    failing: Script = [*turn(call(0, '{"a": 1}'), more())[:-1], fails, HttpError("lost", status=502)]
    replicas = ScriptedReplicas([failing, turn(call(0, '{"a": 2}'), more()), says("done")])
    tools = Adds()
    runner = runners(replicas, tools)
    await runner.start(spec("fails", offers=EARLY))
    await until(lambda: tools.ran)
    fails.set()
    await until(lambda: len(tools.ran) == 2)
    tools.end.set()
    events = await ended(runner, "fails")
    names = [w for w in words(events) if w in ("TurnIntent", "EarlyIntent", "EarlyEnd", "ToolAnswer")]
    assert names == ["TurnIntent", "EarlyIntent", "EarlyEnd", "TurnIntent", "EarlyIntent", "ToolAnswer", "TurnIntent"]
    assert [one.id for one in tools.ran] == ["fails/1.0/early-1", "fails/1.0/early-2"]
    assert [event.text for event in events if isinstance(event, ToolAnswer)] == ['2 of {"a": 2}']


@pytest.mark.parametrize("status", ["failed", "cancelled", "incomplete"])
async def test_whatever_ends_the_run_explains_its_early_calls(runners: Runners, status: str) -> None:
    never = asyncio.Event()
    pieces = turn(call(0, "{}"), more())[:-1]
    script: Script = [*pieces, HttpError("no", status=400)] if status == "failed" else [*pieces, never]
    if status == "failed":
        script.insert(-1, started := asyncio.Event())
    tools = Adds()
    runner = runners(ScriptedReplicas([script]), tools)
    limits = replace(spec("x").limits, wall_s=1.0) if status == "incomplete" else spec("x").limits
    await runner.start(spec(status, offers=EARLY, limits=limits))
    await until(lambda: tools.ran)
    if status == "failed":
        started.set()
    elif status == "cancelled":
        await runner.cancel(status)
    events = await ended(runner, status)
    assert outcome(events).status == status
    assert [type(event).__name__ for event in events[-2:]] == ["EarlyEnd", "Ended"]
    await until(lambda: tools.cancelled)


async def test_the_limit_of_calls_holds_for_early_ones(runners: Runners) -> None:
    script = turn(call(0, "{}"), more(), call(1, "{}"), more(), call(2, "{}"), more())
    tools = Adds()
    tools.end.set()
    runner = runners(ScriptedReplicas([script, says("done")]), tools)
    await runner.start(spec("limit", offers=EARLY, limits=replace(spec("x").limits, tool_calls=2)))
    events = await ended(runner, "limit")
    assert len(tools.ran) == 2
    answers = [event for event in events if isinstance(event, ToolAnswer)]
    assert sorted((answer.index, answer.outcome) for answer in answers) == [(0, "ok"), (1, "ok"), (2, "refused")]


def test_another_runner_takes_over_what_was_started_early() -> None:
    """After the turn's end the call counts as sent: it is resumed. Before it, its turn is asked again."""
    base = fold([*_log(), TakenOver("other")])
    assert base is not None
    assert (base.sent, base.unexplained) == (frozenset({(1, 0)}), ())
    cut = fold([*_log()[:-1], TakenOver("other")])
    assert cut is not None
    assert (cut.sent, [early.call.place for early in cut.unexplained]) == (frozenset(), [(1, 0)])


def _log() -> Sequence[RunEvent]:
    one = Call(1, 0, "c", "add", "{}")
    ids = (pack_ids([1, 2]), pack_ids([3]))
    result = TurnResult(1, True, "first", *ids, "tool_calls", 2, 0, 1, 0.0, 1.0, calls=(one,))
    return [Accepted(spec("r", offers=EARLY)), TurnIntent(1), EarlyIntent(one, 1), result]


def test_when_a_call_is_complete() -> None:
    text = TurnText(1)
    text.take(TurnBegan(PromptMode.CONTINUED, pack_ids([1])))

    def complete(piece: Any) -> list[str]:
        text.take(piece)
        return [one.arguments for one in text.new_calls()]

    assert complete(call(0, '{"a": 1')) == []
    assert complete(more()) == []  # its object is open
    assert complete(call(0, "}", None)) == []  # the parser may have closed it, at the end of the turn
    assert complete(more()) == ['{"a": 1}']
    assert complete(more()) == []  # once
    assert complete(call(1, "[]")) == complete(more()) == []  # no object
    assert complete(call(2, "{}")) == []
    assert complete(TurnDone("length", 1, 1, 1)) == []  # the turn was cut in it
