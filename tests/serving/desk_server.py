"""A real MCP server of the tests, over streamable HTTP on the loopback. Prints its port, and a line for each `wait`."""

import asyncio
import hashlib
import socket
from typing import Literal

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("desk")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def badge(context: Context) -> str:
    """Tell a fingerprint of the caller's authorization."""
    return hashlib.sha256((context.headers or {}).get("authorization", "").encode()).hexdigest()


@server.tool()
def paint(colour: Literal["red", "green"]) -> str:
    """Paint the desk."""
    return f"painted {colour}"


@server.tool(name="move.desk")
def move() -> str:
    """Move the desk; models cannot call it by its own name."""
    return "moved"


@server.tool()
async def rearrange(context: Context) -> str:
    """Replace the parameters of `paint`."""

    def paint(layers: Literal["one", "two"]) -> str:
        return f"painted {layers}"

    server.remove_tool("paint")
    server.add_tool(paint)
    await context.session.send_tool_list_changed()
    await context.notify_tools_changed()
    return "rearranged"


@server.tool()
async def wait() -> str:
    """Never answer."""
    print("waiting", flush=True)
    await asyncio.Event().wait()
    return "never"


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
