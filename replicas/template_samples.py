"""Sample conversations of every shape that a program takes, to see what a chat template does with them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "kestrel"
"""The last word of each sample's last known message."""

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {what}.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name, what in (("weather", "weather"), ("clock", "time"))
)

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation; ``messages`` makes it anew, as what reads it may change it."""

    name: str
    messages: Callable[[], Messages]
    known: int
    """How many of the messages have been seen; the last of these is the assistant's."""
    tools: tuple[dict[str, Any], ...] = TOOLS


def _user(text: str = "What is the weather like?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def _calls(*places: str, **more: Any) -> dict[str, Any]:
    # Nine letters and digits: Mistral's templates take no other call id.
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": TOOLS[number % 2]["function"]["name"], "arguments": json.dumps({"place": place})},
        }
        for number, place in enumerate(places)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _result(number: int = 0) -> dict[str, Any]:
    name = TOOLS[number % 2]["function"]["name"]
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": "Sunny,\n 21 °C. "}


def _system() -> dict[str, Any]:
    return {"role": "system", "content": "You are helpful."}


def _answer() -> dict[str, Any]:
    return {"role": "assistant", "content": f"It says: {MARK}"}


SAMPLES = (
    Sample("question", lambda: [_user(), _answer(), _user("Sure?")], 2, ()),
    Sample("system", lambda: [_system(), _user(), _answer(), _user("Sure?")], 3, ()),
    Sample("unused tools", lambda: [_system(), _user(), _answer(), _user("Sure?")], 3),
    Sample("tool call", lambda: [_user(), _calls(MARK), _result()], 2),
    Sample("tool call, system", lambda: [_system(), _user(), _calls(MARK), _result()], 3),
    Sample("tool calls", lambda: [_user(), _calls("Ulm", MARK), _result(), _result(1)], 2),
    Sample("content and call", lambda: [_user(), _calls(MARK, content="I look."), _result()], 2),
    Sample("rounds", lambda: [_user(), _calls("Ulm"), _result(), _calls(MARK), _result()], 4),
    Sample(
        "rounds, reasoning",
        lambda: [_user(), _calls("Ulm", reasoning="Hm."), _result(), _calls(MARK, reasoning="So."), _result()],
        4,
    ),
)
