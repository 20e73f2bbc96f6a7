"""The tools of the demo as a configuration: a Python function, a sandboxed shell, and a local MCP server."""

import operator
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
"""JSON Schema of the arguments of `calculate`."""


def calculate(a: int, operation: str, b: int) -> str:
    """Return the equation with its result."""
    return f"{a} {operation} {b} = {OPERATORS[operation](a, b)}"


COMMANDS = ("seq 1 5 | paste -sd+", "echo caesura | tr a-z A-Z", "id -u", "ls / | wc -l")
"""Commands that the shell tool accepts. The demo's model is random, so it must not choose commands freely."""

STOP_TIMEOUT_S = 5.0


@contextmanager
def notes_server() -> Iterator[str]:
    """Run a real MCP server as a child process, and yield its URL."""
    command = [sys.executable, "-m", "cluster.offline.demo.notes_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def sandboxed() -> bool:
    """Return whether bubblewrap is installed."""
    return shutil.which("bwrap") is not None


def tools(notes_url: str) -> dict[str, Any]:
    """Return the `tools` section of the configuration."""
    shell_parameters = {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": list(COMMANDS)}},
        "required": ["command"],
        "additionalProperties": False,
    }
    return {
        "defined": {
            "calculator": {
                "kind": "python",
                "description": "Solve an equation.",
                "entry": "cluster.offline.demo.tools:calculate",
                "parameters": PARAMETERS,
                "idempotent": True,
            },
            "shell": {
                "kind": "command",
                "description": "Run a shell command.",
                "shell": True,
                "parameters": shell_parameters,
                "argument_class": "command",
                # Without bubblewrap these few harmless commands run with limits only, and the demo prints a note.
                "allow_unsandboxed": not sandboxed(),
            },
            "notes": {"kind": "mcp", "url": notes_url, "private_addresses": True},
        }
    }
