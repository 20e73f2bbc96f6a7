"""Makes the messages of a chat completion from a Messages request's system prompt and messages."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.api.anthropic.blocks import (
    AnyMessage,
    AssistantBlock,
    AssistantMessage,
    BlocksOfDocument,
    CompactionBlock,
    DocumentBlock,
    ImageBlock,
    InlineData,
    PlainText,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from cluster.api.anthropic.tools import CLUSTER_SERVER
from cluster.core.errors import BadRequest
from cluster.core.tools import IN_NEXT_MESSAGE, late_message, sent_back, server_tool_name

BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block that Claude Code changes with each request. It stands before the whole prompt, so
that no prefix would ever be found again."""

MCP_RESULT = "mcp_tool_result"
ERROR = "Error: "
"""The beginning of a tool's answer that is an error."""

ChatMessage = dict[str, Any]


def chat_messages(system: str | Sequence[TextBlock] | None, messages: Sequence[AnyMessage]) -> list[ChatMessage]:
    """Return the messages of a chat completion.

    Raises:
        BadRequest: an id of a tool call is used twice, a call has no answer, an answer has no call, or the last message
            is the assistant's and does not end with a tool's answer. ``param`` is the path of the block.
    """
    made = _Conversation()
    if text := system_text(system):
        made.system(text)
    answer: list[tuple[str, AssistantBlock]] = []
    for place, message in enumerate(messages):
        path = f"messages.{place}"
        if isinstance(message, AssistantMessage):
            answer += _blocks(message, path)
            # Messages of the model that follow each other are one: clients send the blocks of an answer one by one.
            if place + 1 == len(messages) or not isinstance(messages[place + 1], AssistantMessage):
                made.assistant(answer)
                answer = []
            continue
        match message:
            case SystemMessage():
                made.system(_joined(message.content))
            case UserMessage():
                made.user(message, path)
    made.check_answered()
    last = len(messages) - 1
    # A program that has paused ends with the answers of its tools, and goes on from there.
    if isinstance(messages[last], AssistantMessage) and made.messages[-1]["role"] == "assistant":
        raise _bad(f"messages.{last}", "the last message must be the user's; an answer cannot be continued")
    return made.messages


def _blocks(message: AssistantMessage, path: str) -> list[tuple[str, AssistantBlock]]:
    """Return the blocks of a message of the model, each with its path."""
    if isinstance(message.content, str):
        return [(f"{path}.content", TextBlock(type="text", text=message.content))]
    return [(f"{path}.content.{place}", block) for place, block in enumerate(message.content)]


def system_text(system: str | Sequence[TextBlock] | None) -> str:
    """Return the system prompt without what changes with each request."""
    if system is None:
        return ""
    if isinstance(system, str):
        return system.partition("\n")[2].lstrip("\n") if system.startswith(BILLING) else system
    return "\n\n".join(block.text for block in system if block.text and not block.text.startswith(BILLING))


def _joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


@dataclass(slots=True)
class _Answer:
    """An assistant's message that is being made: what the model wrote, and the calls that a server has answered."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)
    late: list[ChatMessage] = field(default_factory=list)
    """Second answers of earlier calls, see `late_message`."""

    def messages(self) -> list[ChatMessage]:
        message: ChatMessage = {"role": "assistant", "content": "".join(self.text)}
        if self.thinking:
            message["reasoning"] = "".join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        # The blocks stand in the order in which the tools have answered, and the prompt had that of the calls.
        places = {call["id"]: place for place, call in enumerate(self.calls)}
        results = sorted(self.results, key=lambda result: places[result["tool_call_id"]])
        return [message, *results, *self.late]


class _Conversation:
    """The messages so far, and the tool calls in them."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._open: dict[str, str] = {}
        """Paths of the calls without an answer, by the id of the call."""
        self._names: dict[str, str] = {}
        """Names of the called tools, by the id of the call."""

    def system(self, text: str) -> None:
        """Add a message of the system. Those at the beginning are one, because many chat templates reject a second."""
        if [message["role"] for message in self.messages] == ["system"]:
            text = f"{self.messages.pop()['content']}\n\n{text}"
        self.messages.append({"role": "system", "content": text})

    def check_answered(self) -> None:
        """Check that every call has an answer.

        Raises:
            BadRequest: a call has none.
        """
        for call_id, path in self._open.items():
            raise _bad(path, f"the tool_use {call_id!r} has no tool_result in the next message")

    def assistant(self, blocks: Sequence[tuple[str, AssistantBlock]]) -> None:
        """Add a message of the model, from its blocks and their paths."""
        self.check_answered()
        answer = _Answer()
        for here, block in blocks:
            if (answer.results or answer.late) and not isinstance(block, ServerToolResultBlock):
                self.messages += answer.messages()
                answer = _Answer()
            match block:
                case TextBlock():
                    answer.text.append(block.text)
                case ThinkingBlock():
                    answer.thinking.append(block.thinking)
                case CompactionBlock():
                    answer.text.append(block.content or "")
                case ToolUseBlock() | ServerToolUseBlock():
                    self._called(block, here)
                    answer.calls.append(_call(block))
                case ServerToolResultBlock():
                    self._served(block, answer, here)
        self.messages += answer.messages()

    def _served(self, block: ServerToolResultBlock, answer: _Answer, path: str) -> None:
        """Add the answer of a tool that a server ran. The second answer of a call is that of an asynchronous tool."""
        call_id, text = block.tool_use_id, sent_back(_result_text(block.content))
        if block.type == MCP_RESULT and call_id in self._names and call_id not in self._open:
            answer.late.append(late_message(self._names[call_id], text))
            return
        self._answered(call_id, path)
        # The cluster's own errors say that they are errors.
        answer.results.append(_tool_message(call_id, text, block.is_error and block.type != MCP_RESULT))

    def user(self, message: UserMessage, path: str) -> None:
        """Add a message of the user. Answers of tools stand before everything else, as chat templates expect."""
        if isinstance(message.content, str):
            self.messages.append({"role": "user", "content": message.content})
            return
        parts: list[dict[str, Any]] = []
        for place, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self._answered(block.tool_use_id, f"{path}.content.{place}")
                text, images = _tool_answer(block)
                self.messages.append(_tool_message(block.tool_use_id, text, block.is_error))
                parts += images
            else:
                parts += _parts(block)
        if parts:
            self.messages.append({"role": "user", "content": _plain(parts)})

    def _called(self, block: ToolUseBlock | ServerToolUseBlock, path: str) -> None:
        if block.id in self._names:
            raise _bad(f"{path}.id", f"the id {block.id!r} is used twice; ids of tool calls must be unique")
        self._names[block.id] = called_as(block)
        self._open[block.id] = path

    def _answered(self, call_id: str, path: str) -> None:
        if self._open.pop(call_id, None) is None:
            raise _bad(f"{path}.tool_use_id", f"there is no open tool_use {call_id[:200]!r} in the message before")


def called_as(block: ToolUseBlock | ServerToolUseBlock) -> str:
    """Return the name by which the model has called a tool, see `cluster.api.anthropic.tools.shown_as`."""
    if isinstance(block, ToolUseBlock) or block.server_name in (None, CLUSTER_SERVER):
        return block.name
    return server_tool_name(block.server_name, block.name)


def _call(block: ToolUseBlock | ServerToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": called_as(block), "arguments": arguments}}


def _tool_message(call_id: str, text: str, is_error: bool | None) -> ChatMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": ERROR + text if is_error else text}


def _result_text(content: Any) -> str:
    """Return the text of a server's answer, whose form depends on the server."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        return "\n".join(one["text"] for one in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def _tool_answer(block: ToolResultBlock) -> tuple[str, list[dict[str, Any]]]:
    """Return a tool's answer as text, and its images, which no chat template takes in a tool's message."""
    if block.content is None or isinstance(block.content, str):
        return block.content or "", []
    parts: list[dict[str, Any]] = []
    for one in block.content:
        parts += [_text(f"[tool: {one.tool_name}]")] if isinstance(one, ToolReference) else _parts(one)
    images = [part for part in parts if part["type"] != "text"]
    texts = [part["text"] if part["type"] == "text" else IN_NEXT_MESSAGE for part in parts]
    return "\n".join(texts), images


def _parts(block: TextBlock | ImageBlock | DocumentBlock | SearchResultBlock) -> list[dict[str, Any]]:
    """Return the parts of a chat message that a block makes."""
    match block:
        case TextBlock():
            return [_text(block.text)]
        case ImageBlock():
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, InlineData) else source.url
            return [{"type": "image_url", "image_url": {"url": url}}]
        case SearchResultBlock():
            return [_text("\n".join((f"{block.title} ({block.source})", *(one.text for one in block.content))))]
    return _document(block)


def _document(block: DocumentBlock) -> list[dict[str, Any]]:
    head = "\n".join(one for one in (block.title, block.context) if one)
    source = block.source
    match source:
        case PlainText():
            body = [_text(source.data)]
        case BlocksOfDocument():
            content = source.content
            body = [_text(content)] if isinstance(content, str) else [part for one in content for part in _parts(one)]
        case InlineData():
            body = [_text(f"[document of type {source.media_type[:100]}: only text can be read here]")]
        case _:
            body = [_text(f"[document at {source.url[:1000]}: it was not fetched]")]
    return [_text(head), *body] if head else body


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return only texts as one text, since not every chat template takes parts."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
