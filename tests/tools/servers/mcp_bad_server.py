"""An MCP server over stdin and stdout that does what it should not; written by hand, because no library would."""

import json
import sys
import time
from typing import Any

CIRCULAR = {"type": "object", "properties": {"a": {"$ref": "#"}}}
DEEP: dict[str, Any] = {}
for _ in range(50):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
SLOW_PATTERN = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}

TOOLS: list[dict[str, Any]] = [
    {"name": "good", "inputSchema": {"type": "object"}},
    {"name": "circular", "inputSchema": CIRCULAR},
    {"name": "deep", "inputSchema": DEEP},
    {"name": "n" * 100, "inputSchema": {"type": "object"}},
    {"name": "dots.and/strokes", "inputSchema": {"type": "object"}},
    {"name": "dots/and/strokes", "inputSchema": {"type": "object"}},
    {"name": "slow_output", "inputSchema": {"type": "object"}, "outputSchema": SLOW_PATTERN},
    {"name": "id_last", "inputSchema": {"type": "object"}},
    {"name": "no_id", "inputSchema": {"type": "object"}},
    {"name": "garbage", "inputSchema": {"type": "object"}},
    {"name": "wrong", "inputSchema": {"type": "object"}},
    {"name": "too_deep", "inputSchema": {"type": "object"}},
    {"name": "silent", "inputSchema": {"type": "object"}},
    {"name": "odd_ids", "inputSchema": {"type": "object"}},
    {"name": "break_listing", "inputSchema": {"type": "object"}},
    {"name": "silence_listing", "inputSchema": {"type": "object"}},
]

LONG = {"type": "text", "text": "x" * 2_000_000}
PAGES = int(sys.argv[1]) if len(sys.argv) > 1 else 0
"""Pages of 100 small tools that are listed before the other tools."""
failures: list[str] = []
"""What the next listings answer instead of the tools; empty: nothing."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def called(id: object, name: str) -> None:
    text = {"type": "text", "text": "x" * 1_000_000}
    if name == "slow_output":
        content = [{"type": "text", "text": "t"}]
        result: Any = {"content": content, "structuredContent": {"x": "a" * 1000 + "b"}}
    elif name == "id_last":
        say(json.dumps({"jsonrpc": "2.0", "result": {"content": [text]}, "id": id}))
        return
    elif name == "no_id":
        say(
            json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": text}})
        )
        result = {"content": [{"type": "text", "text": "after a long notification"}]}
    elif name == "garbage":
        say("this is not JSON")
        say("[" * 100_000)
        say("\x00\xff")
        result = {"content": [{"type": "text", "text": "after garbage"}]}
    elif name == "wrong":
        result = {"content": "not a list"}
    elif name == "too_deep":
        say(f'{{"jsonrpc": "2.0", "id": {id}, "result": ' + '{"a":' * 5000 + "1" + "}" * 5001)
        return
    elif name == "odd_ids":
        for odd in (True, 1.5, [1], {}):
            say(json.dumps({"jsonrpc": "2.0", "id": odd, "result": {"content": [LONG]}}))
        result = {"content": [{"type": "text", "text": "after odd ids"}]}
    elif name in ("break_listing", "silence_listing"):
        failures.append("out of order" if name == "break_listing" else "")
        TOOLS.append({"name": "new", "inputSchema": {"type": "object"}})
        result = {"content": [{"type": "text", "text": "the next listing fails"}]}
    elif name == "silent":
        time.sleep(1000)
        return
    else:
        result = {"content": [{"type": "text", "text": "good"}]}
    say(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}))


for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message["method"]
    if method == "initialize":
        result = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "bad", "version": "1"},
        }
        say(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}))
    elif method == "tools/list" and failures:
        if failure := failures.pop():
            say(json.dumps({"jsonrpc": "2.0", "id": id, "error": {"code": -32000, "message": failure}}))
    elif method == "tools/list":
        stateless = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}  # of no effect before 2026-07-28
        page = int((message.get("params") or {}).get("cursor") or 0)
        if page < PAGES:
            tools = [{"name": f"t{100 * page + n}", "inputSchema": {"type": "object"}} for n in range(100)]
            listed: dict[str, Any] = {"tools": tools, "nextCursor": str(page + 1)}
        else:
            listed = {"tools": TOOLS}
        say(json.dumps({"jsonrpc": "2.0", "id": id, "result": {**listed, **stateless}}))
    elif method == "tools/call":
        called(id, message["params"]["name"])
    elif id is not None:
        say(json.dumps({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no such method"}}))
