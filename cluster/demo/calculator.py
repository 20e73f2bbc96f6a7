"""The demo's calculator: a plain Python function as a tool."""

import operator
from collections.abc import Callable

OPERATORS: dict[str, Callable[[int, int], int]] = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "operation": {"type": "string", "enum": list(OPERATORS)},
        "b": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["a", "operation", "b"],
    "additionalProperties": False,
}
"""JSON Schema of the arguments."""


def calculate(a: int, operation: str, b: int) -> str:
    """The equation, solved."""
    return f"{a} {operation} {b} = {OPERATORS[operation](a, b)}"
