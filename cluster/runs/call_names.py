"""Names of tool calls under which durations are learnt."""

import json
from collections.abc import Callable

from cluster.config.tools import ToolsConfig
from cluster.core.tools import ToolId, ToolSource, statistics_name

CallNaming = Callable[[str, str, ToolId | None], str]
"""Names a call, given the tool's name, the arguments as JSON text, and the tool (None: it is unknown)."""


def naming(tools: ToolsConfig) -> CallNaming:
    """Return the function that names calls as the executor does. It uses the configuration alone."""

    def known_as(name: str, arguments: str, tool: ToolId | None) -> str:
        is_defined = tool is not None and tool.source is ToolSource.OPERATOR
        entry = tools.defined.get(tool.entry) if is_defined and tool else None
        if entry is None or entry.argument_class is None:
            return name
        try:
            values = json.loads(arguments)
        except ValueError:
            return name
        return statistics_name(name, values.get(entry.argument_class) if isinstance(values, dict) else None)

    return known_as
