"""One trace a program, as a real OTLP receiver gets it."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolCall, ToolResult
from cluster.dispatch.predictions import NullPrediction
from cluster.observing.spans import OpenTelemetryTraces, TracedTools
from cluster.observing.trace_context import NullTraces, TraceContext, is_sampled, parent_of, with_trace
from cluster.observing.tracing import traces
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import Shape, VirtualEngine, write_config_only_model
from tests.otlp_receiver import Receiver, tree

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def exporting(receiver: Receiver, part: str = "ingress", **options: Any) -> OpenTelemetryTraces:
    return OpenTelemetryTraces(OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces"), part=part, **options)


async def turn_of(there: OpenTelemetryTraces, identity: ProgramIdentity, *, tokens: int | None = 5) -> ProgramIdentity:
    """A whole turn; its identity as the replica sees it."""
    turn = there.turn(NullPrediction(identity), "chat", "tiny", identity)
    seen = await turn.identity()
    turn.placed("replica-1", "resident")
    turn.over(output_tokens=tokens, prompt_tokens=9)
    turn.over(output_tokens=None)
    return seen


class Bench:
    """A tool that notes how it was called."""

    def __init__(self, outcome: Outcome) -> None:
        self.calls: list[ToolCall] = []
        self._outcome = outcome

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        self.calls.append(call)
        return ToolResult(call.id, call.name, self._outcome, "text", queue_s=0.5, run_s=1.5, attempts=1)

    async def completion(self, program: str, call_id: str) -> ToolResult:
        raise AssertionError("not asked for")

    async def cancel(self, program: str, call_id: str) -> bool:
        return False

    async def output(self, program: str, call_id: str, known: int) -> str | None:
        raise AssertionError("not asked for")


async def test_a_program_is_one_trace_though_no_process_sees_all_of_it(receiver: Receiver) -> None:
    first, second = exporting(receiver), exporting(receiver)
    seen = await turn_of(first, ProgramIdentity(program_id="a/b"))
    tools = Bench(Outcome.ERROR)
    await TracedTools(tools, second).run(ToolCall("c1", "ls", program="default/a/b"))
    await turn_of(second, ProgramIdentity(program_id="a/b", last_turn=True), tokens=None)
    first.program_ended("default/a/b")
    second.program_ended("default/a/b")  # exported already, with its last turn
    first.close()
    second.close()
    spans = receiver.wait_for("a/b", "chat tiny", "chat tiny", "execute_tool ls", "invoke_agent tiny")
    assert len({span.trace for span in spans}) == 1
    turns = [span for span in spans if span.name == "chat tiny"]
    roots = {(span.id, span.parent) for span in spans if span.name == "invoke_agent tiny"}
    # Two ingresses export it, as the same span.
    assert roots == {(TraceContext.of_program("default/a/b", 1.0).span_id.to_bytes(8).hex(), "")}
    assert {span.parent for span in [*turns, *(s for s in spans if s.name == "execute_tool ls")]} == {
        span_id for span_id, _ in roots
    }
    done, broken = turns
    assert (done.failed, broken.failed) == (False, True)
    assert done.attributes["gen_ai.operation.name"] == "chat"
    assert done.attributes["gen_ai.request.model"] == "tiny"
    assert (done.attributes["gen_ai.usage.input_tokens"], done.attributes["gen_ai.usage.output_tokens"]) == (9, 5)
    assert done.events["placed"] == {"caesura.replica": "replica-1", "caesura.reason": "resident"}
    assert seen.traceparent == f"00-{done.trace}-{done.id}-01"
    [tool] = [span for span in spans if span.name == "execute_tool ls"]
    assert (tool.failed, tool.attributes["caesura.tool.outcome"], tool.attributes["gen_ai.tool.name"]) == (
        True,
        "error",
        "ls",
    )
    assert tools.calls[0].traceparent == f"00-{tool.trace}-{tool.id}-01"


async def test_a_client_that_brings_a_trace_gets_its_turns_there_linked_to_the_program(receiver: Receiver) -> None:
    there = exporting(receiver)
    seen = await turn_of(there, ProgramIdentity(program_id="p", traceparent=CLIENTS))
    there.close()
    [turn] = [span for span in receiver.wait_for("p", "chat tiny") if span.name == "chat tiny"]
    assert (turn.trace, turn.parent) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    root = TraceContext.of_program("default/p", 1.0)
    assert turn.links == ((f"{root.trace_id:032x}", f"{root.span_id:016x}"),)
    assert seen.traceparent is not None and seen.traceparent.startswith(f"00-{turn.trace}-{turn.id}")
    assert with_trace({"traceparent": CLIENTS, "x": "y"}, seen) == {"traceparent": seen.traceparent, "x": "y"}


async def test_a_program_that_is_not_sampled_leaves_no_span_anywhere(receiver: Receiver) -> None:
    there = exporting(receiver, sample_ratio=0.0)
    assert (await turn_of(there, ProgramIdentity(program_id="p", last_turn=True))).traceparent is None
    unwanted = CLIENTS.removesuffix("01") + "00"
    assert (await turn_of(there, ProgramIdentity(program_id="q", traceparent=unwanted))).traceparent is None
    wanted = await turn_of(there, ProgramIdentity(program_id="r", traceparent=CLIENTS))
    assert wanted.traceparent is not None, "its client decides"
    there.close()
    assert {span.attributes["gen_ai.conversation.id"] for span in receiver.wait_for("r", "chat tiny")} == {"r"}


async def test_an_idle_program_is_exported_when_another_arrives(receiver: Receiver) -> None:
    there = exporting(receiver, idle_s=0.0)
    await turn_of(there, ProgramIdentity(program_id="idle"))
    await turn_of(there, ProgramIdentity(program_id="next"))
    assert list(there._programs) == ["default/next"]
    there.close()


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_a_clock_that_jumps_makes_no_span_strange(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    there, identity = exporting(receiver, idle_s=1800.0), ProgramIdentity(program_id="j")
    turn = there.turn(NullPrediction(identity), "chat", "tiny", identity)
    real_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + jump_s * 10**9)
    turn.over(output_tokens=1)
    await turn_of(there, ProgramIdentity(program_id="another"))
    assert set(there._programs) == {"default/j", "default/another"}, "it ended before its time"
    there.close()
    for span in receiver.wait_for("j", "chat tiny", "invoke_agent tiny"):
        assert 0 <= span.ended_s - span.began_s < 1800


async def test_what_a_scheduler_saw_is_below_the_turn(receiver: Receiver, tmp_path: Any) -> None:
    model = write_config_only_model(tmp_path, 1024)
    engine = VirtualEngine(AgentScheduler, model, Shape(max_model_len=1024))
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    dispatch(scheduler, "set_policy", {"name": "continuum"})
    there = exporting(receiver, "replica")
    turns, prompt = [], list(range(1000, 1100))
    for last in (False, True):
        identity = ProgramIdentity(program_id="p", last_turn=last)
        turn = there.turn(NullPrediction(identity), "chat", "tiny", identity)
        request = engine.submit(f"turn-{last}", prompt, 3, await turn.identity())
        engine.run()
        prompt = list(request.all_token_ids) + [7] * 10
        turn.over(output_tokens=3)
        turns.append(turn)
    assert dispatch(scheduler, "exchange", {})["traced"]["notes"] == [], "nobody asked for them"
    traced = dispatch(scheduler, "exchange", {"noted": 0})["traced"]
    assert traced["number"] == 3
    there.replay(traced["notes"], "tiny", MonotonicClock())
    there.close()
    spans = receiver.wait_for("p", "hold", "invoke_agent tiny")
    below = ["queue", "generate"]
    assert tree(spans) == [("invoke_agent tiny", [("chat tiny", [*below, "hold"]), ("chat tiny", below)])]
    generate = [span for span in spans if span.name == "generate"]
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in generate] == [3, 3]
    assert [span.attributes["gen_ai.usage.cache_read.input_tokens"] for span in generate] == [0, 96]
    pause = generate[0].events["pause"]
    assert (pause["gen_ai.tool.name"], pause["caesura.decision"].startswith("held")) == (["user_reply"], True)
    assert "first token" in generate[0].events
    [hold] = [span for span in spans if span.name == "hold"]
    assert hold.attributes == {"caesura.hold.end": "used"}
    for span in spans:
        assert span.began_s <= span.ended_s


def test_the_header_is_read_as_the_standard_says() -> None:
    context = TraceContext.read(CLIENTS)
    assert context is not None and str(context) == CLIENTS
    assert TraceContext.read("cc" + CLIENTS[2:] + "-what-will-be-in-the-year-2030") is not None
    bad = (
        *(None, "", "00", CLIENTS + "-more", "ff" + CLIENTS[2:], CLIENTS.upper(), CLIENTS.replace("4bf9", "xyz9")),
        *("00-" + "0" * 32 + CLIENTS[35:], CLIENTS[:36] + "0" * 16 + "-01", "x" * 10_000),
    )
    assert [TraceContext.read(header) for header in bad] == [None] * len(bad)
    assert parent_of("nonsense", None, 1.0) is None


def test_the_part_that_is_sampled_is_the_same_everywhere_and_as_large_as_was_asked() -> None:
    contexts = [TraceContext.of_program(f"default/{number}", 0.25) for number in range(4000)]
    assert 0.22 < sum(context.sampled for context in contexts) / len(contexts) < 0.28
    assert len({context.trace_id for context in contexts}) == len(contexts)
    assert all(is_sampled(context.trace_id, 1.0) and not is_sampled(context.trace_id, 0.0) for context in contexts)


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert isinstance(nothing := traces(CaesuraConfig(), "ingress"), NullTraces)
    tools = Bench(Outcome.OK)
    assert nothing.tools(tools) is tools
