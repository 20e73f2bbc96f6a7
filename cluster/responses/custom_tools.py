"""Custom tools: the model calls a function with one string, and the client gets the string alone."""

import json
import re
from typing import Any

from cluster.core.tools import function_object
from cluster.responses.tools import CustomTool, Grammar

FIELD = "input"
"""The function's only parameter."""

_BEGIN = re.compile(rf'\s*\{{\s*"{FIELD}"\s*:\s*"')
_STRING = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_MAX_HEAD = 256
"""Number of characters within which the input begins."""
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def function_of(tool: CustomTool) -> dict[str, Any]:
    """Return the function object that the model is offered."""
    parts = [tool.description] if tool.description else []
    if isinstance(tool.format, Grammar):
        parts.append(f"The {FIELD} must match this {tool.format.syntax} grammar:\n{tool.format.definition}")
    parameters = {
        "type": "object",
        "properties": {FIELD: {"type": "string"}},
        "required": [FIELD],
        "additionalProperties": False,
    }
    return function_object(tool.name, "\n\n".join(parts) or None, parameters)


def arguments_of(text: str) -> str:
    """Return the arguments of a call, as JSON text, whose input is ``text``."""
    return json.dumps({FIELD: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the input of a complete call. If the arguments have another form, they are the input themselves."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(FIELD) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class InputReader:
    """Reads the input of a call while its arguments arrive in pieces."""

    def __init__(self) -> None:
        self._rest = ""
        """What came after the last character that was read."""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """Return what a piece of the arguments adds to the input."""
        rest, begin = self._rest + arguments, 0
        if not self._begun:
            head = _BEGIN.match(rest)
            self._begun = head is not None
            if head is None:
                self._rest = rest[:_MAX_HEAD]
                return ""
            begin = head.end()
        text = _STRING.match(rest, begin)
        assert text is not None  # it matches the empty text
        whole = _HIGH_SURROGATE.sub("", text.group())  # the other half of the pair has not come yet
        self._rest = rest[begin + len(whole) :]
        return str(json.loads(f'"{whole}"', strict=False))
