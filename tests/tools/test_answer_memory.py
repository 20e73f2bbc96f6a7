"""A large answer costs a small multiple of its cap, not of its size.

Twice the cap is the aim: what came, and the text made of it. An answer that becomes an error (a command that floods) is
copied once more, and MCP's library copies what comes over HTTP several times.
"""

import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.core.tools import Outcome, ToolCall, ToolId
from tests.tools.scripted import SERVERS
from tools_runtime.host import ToolHost
from tools_runtime.partial_output import MAX_CHARS

CAP = 1 << 20
FIXED = (512 << 10) + MAX_CHARS
"""What a call costs whatever it answers: read buffers, connections, the beginning of the output while it runs."""

SIZE_MB = 12
"""Several times what any kind may use."""
SIZE = SIZE_MB * 1_000_000
SERVER = str(SERVERS / "mcp_server.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "times"),
    [("http", 2), ("command", 3.3), ("python", 2), ("mcp pipes", 2.3), ("mcp JSON", 4), ("mcp events", 10)],
)
async def test_a_large_answer_costs_its_cap(
    kind: str, times: float, open_tools: Callable[..., Awaitable[ToolHost]], serve: Any
) -> None:
    name, arguments = "t", {}
    if kind == "http":
        url = f"http://127.0.0.1:{serve('http_server.py')[1]}/big"
        tool, arguments = {"kind": "http", "url": url, "private_addresses": True}, {"mb": SIZE_MB}
    elif kind == "command":
        tool = {"kind": "command", "allow_unsandboxed": True, "argv": ["yes"]}
    elif kind == "python":
        tool, arguments = {"kind": "python", "entry": "tests.tools.python_tools:large"}, {"size": SIZE}
    else:
        name, arguments = "t__large", {"size": SIZE}
        if kind == "mcp pipes":
            tool = {"kind": "mcp", "command": [sys.executable, SERVER, "stdio"]}
        else:
            _, port = serve("mcp_server.py", "http", *(["json"] if kind == "mcp JSON" else []))
            url, protocol = f"http://127.0.0.1:{port}/mcp", "auto" if kind == "mcp JSON" else "handshake"
            tool = {"kind": "mcp", "url": url, "protocol": protocol, "private_addresses": True}
    called = ToolId.of_operator("t", "large" if name == "t__large" else "t")
    host = await open_tools({"t": {**tool, "output_cap_bytes": CAP, "deadline_s": 600}})
    small = {"size": 10} if "size" in arguments else {"mb": 0}
    await host.run(ToolCall("warm", name, small if arguments else {}, tool=called))
    tracemalloc.start()
    try:
        result = await host.run(ToolCall("a", name, arguments, tool=called))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.outcome in (Outcome.OK, Outcome.ERROR), result.text[:200]
    assert "\n[... cut" in result.text
    assert peak < times * CAP + FIXED, f"{peak / CAP:.2f} times the cap"
