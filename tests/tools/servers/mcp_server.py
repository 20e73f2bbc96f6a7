"""A real MCP server for the tests: `stdio`, or `http [stateless] [json] [STATUS METHOD]`, which prints its port.

With a status, it answers each request of that method with this HTTP status alone.
"""

import asyncio
import base64
import os
import socket
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    ImageContent,
    InputRequests,
    InputRequiredResult,
    ListRootsRequest,
    TextContent,
)
from PIL import Image

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def large(size: int) -> str:
    """So many characters."""
    return "x" * size


@server.tool(structured_output=False)
def pictures(*, sizes: list[int], words: int = 0, broken: bool = False) -> list[Any]:
    """Squares of so many random pixels, behind a text."""
    made: list[Any] = [TextContent(type="text", text="x" * words)]
    for size in sizes:
        file = BytesIO()
        Image.frombytes("RGB", (size, size), os.urandom(3 * size * size)).save(file, "PNG")
        data = base64.b64encode(b"no image" if broken else file.getvalue()).decode()
        made.append(ImageContent(type="image", data=data, mime_type="image/png"))
    return made


@server.tool(structured_output=False)
def shot() -> list[Any]:
    """A picture that is always the same."""
    file = BytesIO()
    Image.new("RGB", (80, 60), (200, 30, 30)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return [TextContent(type="text", text="Here:"), ImageContent(type="image", data=data, mime_type="image/png")]


@server.tool()
async def slow(seconds: float, mark: str = "") -> str:
    """Sleep; write `mark` when cancelled."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if mark:
            Path(mark).write_text("cancelled")  # noqa: ASYNC240 - a few bytes
        raise
    return "slept"


@server.tool()
async def gate(file: str) -> str:
    """Write `file`.reached, and wait until `file` is there."""
    Path(f"{file}.reached").touch()  # noqa: ASYNC240 - no bytes
    while not Path(file).exists():  # noqa: ASYNC110, ASYNC240 - the test makes it
        await asyncio.sleep(0.01)
    return "open"


@server.tool()
def die(mark: str) -> str:
    """Take effect, then die."""
    Path(mark).write_text("done")
    os._exit(1)


@server.tool()
def environment() -> list[str]:
    """Names of its variables."""
    return sorted(os.environ)


@server.tool()
def fail() -> str:
    """Raise."""
    raise RuntimeError("out of order")


QUESTIONS: dict[str, InputRequests | None] = {
    "user": {
        "q": ElicitRequest(
            params=ElicitRequestFormParams(message="Sure?", requested_schema={"type": "object", "properties": {}})
        )
    },
    "roots": {"q": ListRootsRequest()},
    "nothing": None,
    "for ever": None,
}


@server.tool()
def ask(what: str, context: Context) -> str | InputRequiredResult:
    """Want input, or only the state, before the answer."""
    if context.request_state is None or what == "for ever":
        return InputRequiredResult(input_requests=QUESTIONS[what], request_state="state")
    answers = [one.action for one in (context.input_responses or {}).values() if isinstance(one, ElicitResult)]
    return f"{context.request_state} {answers}"


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


def refusing(app: Any, status: int, method: bytes) -> Any:
    """The server behind a proxy that refuses requests of a method."""

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        messages = [await receive()]
        if b'"method":"' + method not in messages[0]["body"].replace(b" ", b""):
            await app(scope, lambda: taken(messages, receive), send)
            return
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"not you"})

    return proxy


async def taken(messages: list[Any], receive: Any) -> Any:
    return messages.pop(0) if messages else await receive()


def main() -> None:
    if sys.argv[1] == "stdio":
        server.run("stdio")
        return
    app = server.streamable_http_app(stateless_http="stateless" in sys.argv, json_response="json" in sys.argv)
    if sys.argv[-2].isdigit():
        app = refusing(app, int(sys.argv[-2]), sys.argv[-1].encode())
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
