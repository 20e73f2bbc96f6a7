"""The demo's MCP server, which keeps notes in memory. It serves streamable HTTP on loopback, and prints its port.

python -m cluster.offline.demo.notes_server
"""

import asyncio
import socket
import sys
from collections import Counter
from typing import Literal

import uvicorn
from mcp.server.mcpserver import MCPServer

Topic = Literal["weather", "traffic", "prices", "sports"]

server = MCPServer("notes", log_level="ERROR")
notes: Counter[str] = Counter()


@server.tool()
def add(topic: Topic) -> str:
    """Make a note on a topic."""
    notes[topic] += 1
    return f"note {sum(notes.values())}: the {notes[topic]}. on {topic}"


@server.tool()
def count() -> int:
    """How many notes were made."""
    return sum(notes.values())


async def serve() -> None:
    """Serve until the process ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        app = server.streamable_http_app()
        await uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listener])


if __name__ == "__main__":
    asyncio.run(serve())
