"""What a run sends to its program's replica while its tools still run."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.core.tools import Outcome, ToolCall, ToolOffer
from cluster.core.turn import pack_ids
from cluster.runs.events import Accepted, Call, Compaction, ToolAnswer, TurnIntent, TurnResult
from cluster.runs.state import RunState, begin, step
from cluster.runs.turn_request import known_body
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas, ScriptedTools, says
from tests.programs.test_runner import OFFERS, ended, outcome, spec
from tests.waiting import until

TWO = (("wait", '{"n": 1}'), ("once", '{"n": 2}'))


def answers(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"] if message["role"] == "tool"]


class Tools(ScriptedTools):
    """Tools that write what the test says, and answer with it when the test says so."""

    def __init__(self, *names: str) -> None:
        self.ends = {name: asyncio.Event() for name in names}
        super().__init__({name: self._running(name) for name in names})

    def _running(self, name: str) -> Callable[[ToolCall], Coroutine[Any, Any, str]]:
        async def run(call: ToolCall) -> str:
            await self.ends[name].wait()
            return self.written[name]

        return run

    def write(self, name: str, text: str) -> None:
        self.written[name] = self.written.get(name, "") + text


async def test_output_is_sent_as_it_comes_and_the_final_text_is_the_turns(runners: Runners) -> None:
    replicas, tools = ScriptedReplicas([says("", ("wait", "{}")), says("done")]), Tools("wait")
    runner = runners(replicas, tools)
    await runner.start(spec("early"))
    tools.write("wait", "first ")
    await until(lambda: replicas.extended)
    tools.write("wait", "second ")
    await until(lambda: len(replicas.extended) == 2)
    tools.write("wait", "third")
    tools.ends["wait"].set()
    assert outcome(await ended(runner, "early")).status == "completed"
    assert [answers(body) for body, _ in replicas.extended[:2]] == [["first "], ["first second "]]
    # It continues from the same ids, and the messages before are the same, as those of the next turn.
    (body, prior), turn = replicas.extended[1], replicas.asked[1]
    assert (prior, body["messages"][:-1]) == (replicas.prior[1], turn["messages"][:-1])
    assert {**body, "messages": []} == {**turn, "messages": []}
    assert answers(turn) == ["first second third"]


async def test_parallel_results_are_sent_in_the_order_of_the_calls(runners: Runners) -> None:
    replicas, tools = ScriptedReplicas([says("", *TWO), says("done")]), Tools("wait", "once")
    runner = runners(replicas, tools)
    await runner.start(spec("parallel"))
    tools.write("once", "of the second ")
    tools.ends["once"].set()  # the second call ends first: its answer has to wait for the first
    await until(lambda: "once" in tools.ended)
    tools.write("wait", "of the first ")
    await until(lambda: replicas.extended)
    assert [answers(body) for body, _ in replicas.extended] == [["of the first "]]
    tools.ends["wait"].set()
    await ended(runner, "parallel")
    assert answers(replicas.asked[1]) == ["of the first ", "of the second "]


async def test_a_complete_result_is_sent_while_a_later_call_runs(runners: Runners) -> None:
    replicas, tools = ScriptedReplicas([says("", *TWO), says("done")]), Tools("wait", "once")
    runner = runners(replicas, tools)
    await runner.start(spec("complete"))
    await until(lambda: len(tools.ran) == 2)
    tools.write("wait", "first")
    await until(lambda: replicas.extended)
    tools.write("wait", " and last")
    tools.ends["wait"].set()
    await until(lambda: len(replicas.extended) >= 2 and answers(replicas.extended[-1][0])[:1] == ["first and last"])
    assert answers(replicas.extended[-1][0]) == ["first and last", ""]
    tools.write("once", "more")
    await until(lambda: answers(replicas.extended[-1][0]) == ["first and last", "more"])
    tools.ends["once"].set()
    await ended(runner, "complete")


async def test_nothing_more_is_sent_once_the_replica_computes_no_more(runners: Runners) -> None:
    replicas = ScriptedReplicas([says("", *TWO), says("done")], extend_ends=["not_held"])
    tools = Tools("wait", "once")
    runner = runners(replicas, tools)
    await runner.start(spec("stopped"))
    tools.write("wait", "first ")
    await until(lambda: replicas.extended)
    tools.write("wait", "second ")
    await asyncio.sleep(0.3)  # three intervals
    for end in tools.ends.values():
        end.set()
    tools.write("once", "x")
    assert outcome(await ended(runner, "stopped")).status == "completed"
    assert len(replicas.extended) == 1


async def test_a_replica_that_fails_does_not_delay_the_run(runners: Runners) -> None:
    class Broken(ScriptedReplicas):
        async def extend(self, *arguments: Any) -> str | None:
            raise ConnectionError("gone")

    tools = Tools("wait")
    runner = runners(Broken([says("", ("wait", "{}")), says("done")]), tools)
    await runner.start(spec("broken"))
    tools.write("wait", "text")
    await asyncio.sleep(0.1)
    tools.ends["wait"].set()
    assert outcome(await ended(runner, "broken")).status == "completed"


# --- which prompts are known ------------------------------------------------------------------------------------------


def after_turn(names: tuple[str, ...], **fields: Any) -> RunState:
    """A run whose first turn has called tools."""
    calls = tuple(Call(1, index, f"c{index}", name, "{}") for index, name in enumerate(names))
    state = begin(Accepted(spec("r", **fields)))
    state = step(state, TurnIntent(1))
    ids = (pack_ids([1, 2]), pack_ids([3]))
    return step(state, TurnResult(1, True, "first", *ids, "tool_calls", 2, 0, 1, 0.0, 1.0, calls=calls))


def test_the_body_has_the_answers_up_to_the_running_call() -> None:
    state = after_turn(("add", "wait", "once"))
    second = state.calls[1]
    state = step(state, ToolAnswer(1, 0, Outcome.OK, "2"))
    body = known_body(state, second, "so far")
    assert body is not None and answers(dict(body)) == ["2", "so far"]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize(
    ("names", "fields"),
    [
        (("add", "theirs"), {"offers": (*OFFERS, ToolOffer("theirs", {"name": "theirs"}, here=False))}),
        (("add",), {"compaction": Compaction(threshold=1)}),
        (("add",), {"generate": False}),
    ],
    ids=["the client answers a call", "the conversation is summarised next", "no turn follows"],
)
def test_no_prompt_is_known_where_another_turn_or_none_may_follow(names: tuple[str, ...], fields: Any) -> None:
    state = after_turn(names, **fields)
    assert known_body(state, state.calls[0], "text") is None
