"""What a tool call is called where durations are learnt."""

import json
from collections.abc import Callable

from cluster.run_events import Call
from cluster.tool_config import ToolsConfig, owner_of
from cluster.tools import statistics_name


def naming(tools: ToolsConfig) -> Callable[[Call], str]:
    """Under which name a call's duration is learnt: as the executor names it, from the configuration alone."""

    def known_as(call: Call) -> str:
        owner = owner_of(call.name, lambda name: tools.defined[name].kind if name in tools.defined else None)
        argument = None if owner is None else tools.defined[owner].argument_class
        if argument is None:
            return call.name
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            return call.name
        return statistics_name(call.name, arguments.get(argument) if isinstance(arguments, dict) else None)

    return known_as
