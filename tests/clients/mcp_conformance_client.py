"""The program that MCP's conformance harness starts: a client that is our kind of tool and nothing else.

The harness appends the URL of the scenario's server, and names the scenario in the environment. The tools are listed
and called as the cluster does it: by a `ToolHost` with one entry of the kind `mcp` in its default protocol.
"""

import asyncio
import json
import os
import sys
from typing import Any

from cluster.config.tools import ToolsConfig
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolOffer
from replicas.tiny.tool_arguments import arguments_of
from tools_runtime.host import ToolHost

ENTRY = "conformance"
DEADLINE_S = 20.0


def calls(offers: dict[str, ToolOffer]) -> list[tuple[str, dict[str, Any]]]:
    """The tools to call, by their names at the server, and their arguments."""
    named = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")).get("toolCalls")
    if named is not None:
        # One scenario has a null for an optional boolean, which its own schema forbids: it is left out.
        return [
            (call["name"], {key: value for key, value in call["arguments"].items() if value is not None})
            for call in named
        ]
    schemas = {name: offer.function["parameters"] for name, offer in offers.items() if offer.unusable is None}
    if "json_schema_echo" in schemas:  # the scenario compares the schema with the one that it listed
        return [("json_schema_echo", {"schema": schemas.get("json_schema_2020_12_tool")})]
    return [(name, arguments_of(schema, 0)) for name, schema in schemas.items()]


async def main(url: str) -> bool:
    """List the tools of the server and call them. Return whether all calls were answered."""
    tool = {"kind": "mcp", "url": url, "private_addresses": True, "deadline_s": DEADLINE_S}
    host = ToolHost(ToolsConfig.model_validate({"defined": {ENTRY: tool}}))
    await host.open()
    try:
        offers = {offer.server_tool or offer.name: offer for offer in await host.offers()}
        print("offered:", *offers)
        outcomes = []
        for number, (name, arguments) in enumerate(calls(offers)):
            result = await host.run(
                ToolCall(f"call-{number}", f"{ENTRY}__{name}", arguments, tool=ToolId.of_operator(ENTRY, name))
            )
            print(f"{name}: {result.outcome}: {result.text}")
            outcomes.append(result.outcome)
        return all(outcome is Outcome.OK for outcome in outcomes)
    finally:
        await host.aclose()


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(sys.argv[1])) else 1)
