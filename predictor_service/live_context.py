"""What a request shows of its program: the earlier turns in its messages, what is new, and the tools on offer.

Bodies are read before vLLM has checked them: nothing is refused, and what makes no sense is as if it were not there.
Lengths are characters; how many of them are a token is learnt where exact counts are known (`live_history`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.core.program import tool_key
from cluster.durations.tool_names import bounded, classed, tool_names
from predictor_service.model import HISTORY, MAX_ARGUMENTS, MAX_TEXT, NO_TOOL

MAX_OFFERED = 128
"""Tools on offer that are counted."""
MAX_READ = 1 << 16
"""Characters of one turn's text in which calls are looked for, the last ones."""
ASSISTANT = "assistant"


@dataclass(slots=True)
class ShownTurn:
    """An earlier turn."""

    output_chars: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Keys and arguments."""
    texts: list[str] = field(default_factory=list)
    returned_chars: int = 0
    """What came between it and the next turn."""

    @property
    def tool(self) -> str:
        """Which tools it called, as a key of tool statistics."""
        keys = tuple(key for key, _ in self.calls) or tool_names("\n".join(self.texts)[-MAX_READ:])
        return tool_key(keys) if keys else NO_TOOL

    @property
    def arguments(self) -> str:
        """Of its calls."""
        return "\n".join(arguments for _, arguments in self.calls)[:MAX_ARGUMENTS]


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request."""

    structured: bool = False
    """It has messages: earlier turns can be distinguished. Otherwise it is one prompt."""
    position: int = 0
    """Earlier turns that it shows."""
    turns: Sequence[ShownTurn] = ()
    """The most recent first, at most HISTORY of them."""
    new_chars: int = 0
    """What came after the last turn; of a prompt, all of it."""
    text: str = ""
    """Its end."""
    offered: tuple[str, ...] = ()


def shown(body: Mapping[str, Any]) -> ShownRequest:
    """Read a body of `/v1/chat/completions`, `/v1/completions` or `/v1/responses`. Never raises."""
    offered = _offered(body.get("tools"))
    messages = body.get("messages")
    if not isinstance(messages, list):
        messages = _messages(body.get("input"))
    if messages is None:
        prompt = body.get("prompt")
        text = prompt if isinstance(prompt, str) else ""
        return ShownRequest(new_chars=len(text), text=text[-MAX_TEXT:], offered=offered)
    said = [one if isinstance(one, dict) else {} for one in messages]
    ours = [one.get("role") == ASSISTANT for one in said]
    begins = [at for at, is_ours in enumerate(ours) if is_ours and not (at and ours[at - 1])]
    turns: list[ShownTurn] = []
    new: list[str] = []
    for at in range(begins[-HISTORY:][0] if begins else 0, len(said)):
        texts = _texts(said[at].get("content"))
        if ours[at]:
            if not ours[at - 1] or not at or not turns:
                turns.append(ShownTurn())
                new = []
            _add(turns[-1], said[at], texts)
        else:
            new += texts
            if turns:
                turns[-1].returned_chars += sum(map(len, texts))
    return ShownRequest(
        structured=True,
        position=len(begins),
        turns=turns[::-1],
        new_chars=sum(map(len, new)),
        text="\n".join(new)[-MAX_TEXT:],
        offered=offered,
    )


def _add(turn: ShownTurn, message: Mapping[str, Any], texts: Sequence[str]) -> None:
    turn.texts += texts
    turn.output_chars += sum(map(len, texts))
    for call in _dicts(message.get("tool_calls")):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(function, dict) and isinstance(name, str):
            arguments = function.get("arguments")
            key = "".join(bounded([classed(name, arguments)]))
            written = arguments if isinstance(arguments, str) else ""
            turn.calls.append((key, written))
            turn.output_chars += len(name) + len(written)


def _texts(content: object) -> list[str]:
    """Of a message's content: text, or parts of which some are."""
    if isinstance(content, str):
        return [content]
    parts = (part.get("text", part.get("output")) for part in _dicts(content))
    return [part for part in parts if isinstance(part, str)]


def _offered(tools: object) -> tuple[str, ...]:
    """The names in a body's `tools`, nested as in chat completions or flat as in responses."""
    named = (tool.get("function", tool) for tool in _dicts(tools)[:MAX_OFFERED])
    names = (one.get("name") for one in named if isinstance(one, dict))
    return tuple(name for name in names if isinstance(name, str))


def _messages(items: object) -> list[dict[str, Any]] | None:
    """The `input` of a response as messages; None: it is not one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        return None
    messages: list[dict[str, Any]] = []
    for item in _dicts(items):
        match item.get("type", "message"):
            case "function_call":
                messages.append({"role": ASSISTANT, "tool_calls": [{"function": item}]})
            case "function_call_output":
                messages.append({"role": "tool", "content": item.get("output")})
            case "message":
                messages.append(item)
    return messages


def _dicts(values: object) -> list[dict[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []
