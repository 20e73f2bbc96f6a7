"""Spans of what a scheduler noted (`replicas.traced`): it knows when things happened, and has no OpenTelemetry."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.clock import Clock
from cluster.observing.trace_context import TRACEPARENT
from cluster.observing.tracing import NoTraces, Traces


def replay(traces: Traces | NoTraces, notes: Sequence[Mapping[str, Any]], model: str, clock: Clock) -> None:
    """Tell what was noted of turns, each part of what its ``traceparent`` names.

    Args:
        traces: are told.
        notes: times are seconds on the machine's monotonic clock.
        model: the model's id.
        clock: that clock.
    """
    if isinstance(traces, NoTraces):
        return
    zero_ns = time.time_ns() - int(clock.now_s() * 1e9)

    def at(seconds: float) -> int:
        return zero_ns + int(seconds * 1e9)

    for note in notes:
        if note["what"] == "hold":
            ended = {"caesura.hold.end": note["how"]}
            hold = traces.begin("hold", note[TRACEPARENT], None, ended, at_ns=at(note["since_s"]))
            hold.end(at(note["until_s"]))
        else:
            _turn(traces, note, model, at)


def _turn(traces: Traces, note: Mapping[str, Any], model: str, at: Callable[[float], int]) -> None:
    admitted_s = note["ended_s"] if note["admitted_s"] is None else note["admitted_s"]
    queue = traces.begin("queue", note[TRACEPARENT], None, {}, at_ns=at(note["arrived_s"]))
    queue.end(at(admitted_s))
    if note["admitted_s"] is None:
        return
    attributes = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": note["prompt_tokens"],
        "gen_ai.usage.output_tokens": note["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": note["cached_tokens"],
        "gen_ai.response.finish_reasons": [note["outcome"]],
        "caesura.preemptions": note["preemptions"],
    }
    span = traces.begin("generate", note[TRACEPARENT], None, attributes, at_ns=at(admitted_s))
    if note["first_token_s"] is not None:
        span.add_event("first token", timestamp=at(note["first_token_s"]))
    if note["tools"]:
        decided = {"caesura.decision": note["decision"], "gen_ai.tool.name": list(note["tools"])}
        span.add_event("pause", decided, timestamp=at(note["ended_s"]))
    span.end(at(note["ended_s"]))
