"""Digests of a conversation: one for each message, each over all messages up to it.

Two requests of one conversation have the same digests as far as their messages are the same. What clients change in
old messages without changing the conversation is left out: reasoning, which most of them drop, Anthropic's
`cache_control`, which moves to the newest message, and the ids of a response's items.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

DIGEST_BYTES = 16
"""Length of a digest. With 128 bits, two conversations of a cluster do not get the same one by chance."""

_IGNORED_KEYS = frozenset({"cache_control", "reasoning", "reasoning_content", "reasoning_details"})
_IGNORED_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_IGNORED_OF_PARTS = frozenset({"annotations", "logprobs"})
_TEXT_PARTS = frozenset({"input_text", "output_text"})
_CLIENTS_ITEMS = ("_output", "_approval_response")
"""Ends of the types of items that the client makes. Other items without a role are the model's."""
_SYSTEM_ROLES = frozenset({"system", "developer"})
_NEVER_OMITTED = frozenset({"role", "content"})
_NOT_ENCODED = (TypeError, ValueError, OverflowError, RecursionError)
"""What the encoder raises for values that JSON has and MessagePack has not, and for lone surrogates."""

_encode = msgspec.msgpack.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class MessageChain:
    """The digests of a request's messages. It is never empty."""

    digests: tuple[bytes, ...]
    """One for each message, over the tenant, the model, the system prompt and all messages up to this one."""
    is_answer: tuple[bool, ...]
    """Whether each message is the model's."""
    begins: int
    """Number of messages before the model's first, at least 1."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a request begins, with which a program's main line is recognised."""

    system: bytes
    """Digest of the system prompt."""
    first: bytes
    """Digest of the first message that is no system prompt."""
    has_tools: bool
    is_answered: bool
    """Whether the model has answered before."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    api: str
    system: Any
    messages: Sequence[Mapping[str, Any]]


def messages_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the messages of a chat completion or of an Anthropic message. None: it has none, or they are invalid."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    return messages


def _conversation_of(body: Mapping[str, Any]) -> _Conversation | None:
    if (messages := messages_of(body)) is not None:
        return _Conversation("messages", body.get("system"), messages)
    if (messages := _items_of(body)) is not None:
        return _Conversation("responses", body.get("instructions"), messages)
    return None


def _items_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the items of a response's input as messages. None: there are none, or a stored history precedes them."""
    items = body.get("input")
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        return None
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return None
    return [_message_of(item) for item in items if item.get("type") not in _IGNORED_PARTS] or None


def _message_of(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "item_reference":
        return {"role": "assistant", **item}
    message = dict(item)
    message.pop("id", None)
    message.pop("status", None)
    if kind == "message":
        message.pop("type", None)
        if isinstance(item.get("content"), list):
            message["content"] = [_part_of(part) for part in item["content"]]
    elif "role" not in item:
        message["role"] = "user" if str(kind).endswith(_CLIENTS_ITEMS) else "assistant"
    return message


def _part_of(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if name not in _IGNORED_OF_PARTS}
    return {**kept, "type": "text"} if part.get("type") in _TEXT_PARTS else kept


def chain_of(tenant: str, body: Mapping[str, Any]) -> MessageChain | None:
    """Return the digests of a request's messages. None: it has no messages, or they cannot be encoded.

    The tools are left out, since a client may offer others in a later turn. ``tenant`` and the body's `model` are part
    of all digests, so that programs of different tenants or models have nothing in common.
    """
    try:
        if (conversation := _conversation_of(body)) is None:
            return None
        messages = conversation.messages
        digest = _digest(_encode([conversation.api, tenant, body.get("model"), _stable_value(conversation.system)]))
        digests = [digest := _digest(digest + _encode(_stable(message))) for message in messages]
    except _NOT_ENCODED:  # vLLM rejects such a body, and names its field
        return None
    is_answer = tuple(message.get("role") == "assistant" for message in messages)
    begins = is_answer.index(True) if True in is_answer else len(messages)
    return MessageChain(tuple(digests), is_answer, max(1, begins))


def opening_of(body: Mapping[str, Any]) -> Opening | None:
    """Return how a request begins. None: it has no messages, or they cannot be encoded."""
    try:
        if (conversation := _conversation_of(body)) is None:
            return None
        messages = conversation.messages
        roles = [message.get("role") for message in messages]
        first = next((place for place, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(messages))
        system = _encode([_stable_value(conversation.system), *(_stable(message) for message in messages[:first])])
        begin = b"".join(_encode(_stable(message)) for message in messages[first : first + 1])
    except _NOT_ENCODED:
        return None
    return Opening(_digest(system), _digest(begin), bool(body.get("tools")), "assistant" in roles)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def _stable(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _stable_value(value) if key == "content" else value
        for key, value in message.items()
        if key not in _IGNORED_KEYS and (value or key in _NEVER_OMITTED)
    }


def _stable_value(content: Any) -> Any:
    """Return a message's content in the form that is the same in all turns. One part of text equals its text."""
    if not isinstance(content, list):
        return content
    parts = [_stable_part(part) for part in content if not _is_ignored(part)]
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"type", "text"}:
        return parts[0]["text"]
    return parts


def _stable_part(part: Any) -> Any:
    return {key: value for key, value in part.items() if key not in _IGNORED_KEYS} if isinstance(part, dict) else part


def _is_ignored(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _IGNORED_PARTS
