"""Reads from a request what it contains about its program: the earlier turns, the new text and the offered tools.

Bodies are read before vLLM has validated them. Nothing is rejected here, and invalid parts are ignored. Lengths are in
characters. `live_history` learns how many characters a token has from requests with exact token counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.core.program import tool_key
from cluster.durations.tool_names import bounded, classed, tool_names
from predictor_service.model import HISTORY, MAX_ARGUMENTS, MAX_TEXT, NO_TOOL

MAX_OFFERED = 128
"""Offered tools that are read from a request, at most."""
MAX_READ = 1 << 16
"""Characters at the end of a turn's text in which tool calls are searched for."""
ASSISTANT = "assistant"


@dataclass(slots=True)
class ShownTurn:
    """An earlier turn, as the messages of a request show it."""

    output_chars: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Each call's key of tool statistics and its arguments."""
    texts: list[str] = field(default_factory=list)
    returned_chars: int = 0
    """Characters of the messages between this turn and the next one."""

    @property
    def tool(self) -> str:
        """The tools that the turn called, as a key of tool statistics."""
        keys = tuple(key for key, _ in self.calls) or tool_names("\n".join(self.texts)[-MAX_READ:])
        return tool_key(keys) if keys else NO_TOOL

    @property
    def arguments(self) -> str:
        """The arguments of its calls, cut to `MAX_ARGUMENTS` characters."""
        return "\n".join(arguments for _, arguments in self.calls)[:MAX_ARGUMENTS]


@dataclass(frozen=True, slots=True)
class ShownRequest:
    """A request, as far as it is needed for a prediction."""

    structured: bool = False
    """Whether the request has messages, so that earlier turns can be distinguished. Otherwise it is one prompt."""
    position: int = 0
    """Number of earlier turns in the request."""
    turns: Sequence[ShownTurn] = ()
    """The earlier turns, at most `HISTORY` of them, with the most recent one first."""
    new_chars: int = 0
    """Characters after the last turn; for a prompt, all of its characters."""
    text: str = ""
    """The end of the new text, at most `MAX_TEXT` characters."""
    offered: tuple[str, ...] = ()


def shown(body: Mapping[str, Any]) -> ShownRequest:
    """Read the body of `/v1/chat/completions`, `/v1/completions` or `/v1/responses`. This never raises."""
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
    """Return the texts of a message's content, which is a text or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts = (part.get("text", part.get("output")) for part in _dicts(content))
    return [part for part in parts if isinstance(part, str)]


def _offered(tools: object) -> tuple[str, ...]:
    """Return the tool names in a body's `tools`, which are nested in chat completions and flat in responses."""
    named = (tool.get("function", tool) for tool in _dicts(tools)[:MAX_OFFERED])
    names = (one.get("name") for one in named if isinstance(one, dict))
    return tuple(name for name in names if isinstance(name, str))


def _messages(items: object) -> list[dict[str, Any]] | None:
    """Return the `input` of a response as messages, or None if it is not one."""
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
