"""A real MCP server for the tests: `python mcp_server.py stdio | http PORT [stateless]`."""

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def large(size: int) -> str:
    """So many characters."""
    return "x" * size


@server.tool()
async def slow(seconds: float, mark: str = "") -> str:
    """Sleep; write `mark` when cancelled."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if mark:
            Path(mark).write_text("cancelled")
        raise
    return "slept"


@server.tool()
def die(mark: str) -> str:
    """Take effect, then die."""
    Path(mark).write_text("done")
    os._exit(1)


@server.tool()
def fail() -> str:
    """Raise."""
    raise RuntimeError("out of order")


@server.tool()
async def change(context: Context) -> str:
    """Replace the parameters of `add`."""

    def add(x: int, y: int, z: int) -> int:
        return x + y + z

    server.remove_tool("add")
    server.add_tool(add)
    await context.session.send_tool_list_changed()
    await context.notify_tools_changed()
    return "changed"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]), stateless_http="stateless" in sys.argv, json_response="json" in sys.argv)
