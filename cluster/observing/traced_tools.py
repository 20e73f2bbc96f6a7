"""Tool calls of programs that the cluster runs, each a span of its program's trace."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from cluster.observing.tracing import Moment, NoTraces, Traces, traceparent_of
from cluster.tools import Outcome, ToolCall, ToolResult

WELL = frozenset({Outcome.OK, Outcome.STARTED})
"""Outcomes that are no error."""


class Tools(Protocol):
    """`cluster.run_task.Tools`."""

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's one outcome."""
        ...

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """The answer of an asynchronous call, when it is there."""
        ...

    async def cancel(self, program: str, call_id: str) -> bool:
        """End a call."""
        ...


def traced(tools: Tools, traces: Traces | NoTraces) -> Tools:
    """The tools, with a span for each call where anything is traced."""
    return TracedTools(tools, traces) if isinstance(traces, Traces) else tools


class TracedTools:
    """Tells of each call.

    Args:
        tools: run the calls.
        traces: are told.
    """

    def __init__(self, tools: Tools, traces: Traces) -> None:
        self._tools = tools
        self._traces = traces

    async def run(
        self, call: ToolCall, definitions: Mapping[str, Any] | None = None, *, resumed: bool = False
    ) -> ToolResult:
        """The call's one outcome; what runs it is told which trace it is part of."""
        from opentelemetry.trace import StatusCode

        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "function",
        }
        began = Moment.now()
        span = self._traces.begin(
            f"execute_tool {call.name}", call.traceparent, call.program or None, attributes, at_ns=began.unix_ns
        )
        try:
            result = await self._tools.run(
                replace(call, traceparent=traceparent_of(span)), definitions, resumed=resumed
            )
            span.set_attributes(
                {
                    "caesura.tool.outcome": result.outcome.value,
                    "caesura.tool.queue_s": result.queue_s,
                    "caesura.tool.run_s": result.run_s,
                    "caesura.tool.attempts": result.attempts,
                }
            )
            if result.outcome not in WELL:
                span.set_status(StatusCode.ERROR, result.outcome.value)
            return result
        finally:
            span.end(began.later_ns())

    async def completion(self, program: str, call_id: str) -> ToolResult:
        """Passed on."""
        return await self._tools.completion(program, call_id)

    async def cancel(self, program: str, call_id: str) -> bool:
        """Passed on."""
        return await self._tools.cancel(program, call_id)
