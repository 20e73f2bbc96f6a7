"""Bodies that made a server work before it could judge them. Each grows with a number; some are accepted."""

import json
from collections.abc import Callable
from typing import Any


def chat(**fields: Any) -> bytes:
    """A chat completion with these fields."""
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def schema(value: Any, *, strict: bool = False) -> bytes:
    """A chat completion whose answer has this schema."""
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": strict}}
    )


def tools(n: int, **function: Any) -> list[dict[str, Any]]:
    """As many tools."""
    return [
        {"type": "function", "function": {"name": f"t{place}", "parameters": {"type": "object"}, **function}}
        for place in range(n)
    ]


def _names(n: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"t{place}"}} for place in range(n)]


def _properties(n: int, kind: str = "string") -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{place}": {"type": kind} for place in range(n)}}


def _references(n: int) -> dict[str, Any]:
    return {"$defs": {f"d{one}": {"$ref": f"#/$defs/d{(one + 1) % n}"} for one in range(n)}, "$ref": "#/$defs/d0"}


GROWING: dict[str, Callable[[int], bytes]] = {
    "a key twice among many": lambda n: ("{" + ",".join(f'"k{place}":1' for place in range(n)) + ',"k0":2}').encode(),
    "many messages": lambda n: chat(messages=[{"role": "user", "content": "x"}] * n),
    "many parts of a message": lambda n: chat(messages=[{"role": "user", "content": [{"type": "text"}] * n}]),
    "many tools": lambda n: chat(tools=tools(n)),
    "many strict tools": lambda n: chat(tools=tools(n, strict=True)),
    "many forced tools": lambda n: chat(tools=tools(n), tool_choice="required"),
    "many allowed tools": lambda n: chat(
        tools=tools(n), tool_choice={"type": "allowed_tools", "mode": "auto", "tools": _names(n)}
    ),
    "many stop strings": lambda n: chat(stop=["x"] * n, echo=True),
    "many token ids": lambda n: json.dumps({"model": "tiny", "prompt": list(range(n))}).encode(),
    "many properties": lambda n: schema(_properties(n)),
    "many properties of a strict schema": lambda n: schema(_properties(n), strict=True),
    "a schema in a text": lambda n: chat(structured_outputs={"json": json.dumps(_properties(n))}),
    "a circle of references": lambda n: schema(_references(n), strict=True),
    "references that are long": lambda n: schema({"anyOf": [{"$ref": "#/" + "a/" * 20}] * n}, strict=True),
    "braces of a pattern": lambda n: schema({"type": "string", "pattern": "{" * n}),
    "backslashes of a pattern": lambda n: schema({"type": "string", "pattern": "\\" * n + "(?" * n}, strict=True),
    "a deep list": lambda n: b'{"a":' + b"[" * n + b"]" * n + b"}",
    "a long number": lambda n: b'{"a":' + b"1" * n + b"}",
    "escaped pairs": lambda n: b'{"a":"' + b"\\ud83d\\ude00" * n + b'"}',
    "quotes and backslashes": lambda n: b'{"a":"' + b'\\"\\\\:{' * n + b'"}',
    "many metadata": lambda n: chat(metadata={f"k{place}": "v" for place in range(n)}),
}
"""Functions from a size to a body."""
