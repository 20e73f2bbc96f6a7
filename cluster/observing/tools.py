"""What a process that runs tools records. The label ``tool`` is the configuration's name of an entry."""

from collections.abc import Iterable

from cluster import metrics
from cluster.observing.meter import Meter
from cluster.tools import Outcome, ToolResult


class ToolMetrics:
    """The metrics of one process that runs tools.

    Args:
        meter: records.
        tools: the configuration's names; what ends well is counted from 0 for each.
    """

    def __init__(self, meter: Meter, tools: Iterable[str]) -> None:
        self._meter = meter
        for tool in tools:
            meter.begin(metrics.TOOL_CALLS, tool=tool, outcome=Outcome.OK.value)

    def record(self, tool: str, result: ToolResult) -> None:
        """Count one call that ended."""
        self._meter.add(metrics.TOOL_CALLS, 1, tool=tool, outcome=result.outcome.value)
        self._meter.observe(metrics.TOOL_QUEUE_SECONDS, result.queue_s, tool=tool)
        if result.attempts:
            self._meter.observe(metrics.TOOL_SECONDS, result.run_s, tool=tool)
