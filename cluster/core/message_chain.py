"""Digests of a conversation: one for each message, each over all messages up to it.

Two requests of one conversation have the same digests as far as their messages are the same. What clients change in
old messages without changing the conversation is left out: reasoning, which most of them drop, and Anthropic's
`cache_control`, which moves to the newest message.
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


def messages_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Return the messages of a chat completion or of an Anthropic message. None: it has none, or they are invalid."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        return None
    return messages


def chain_of(tenant: str, body: Mapping[str, Any]) -> MessageChain | None:
    """Return the digests of a request's messages. None: it has no messages, or they cannot be encoded.

    The tools are left out, since a client may offer others in a later turn. ``tenant`` and the body's `model` are part
    of all digests, so that programs of different tenants or models have nothing in common.
    """
    messages = messages_of(body)
    if messages is None:
        return None
    try:
        digest = _digest(_encode([tenant, body.get("model"), _stable_value(body.get("system"))]))
        digests = [digest := _digest(digest + _encode(_stable(message))) for message in messages]
    except _NOT_ENCODED:  # vLLM rejects such a body, and names its field
        return None
    is_answer = tuple(message.get("role") == "assistant" for message in messages)
    begins = is_answer.index(True) if True in is_answer else len(messages)
    return MessageChain(tuple(digests), is_answer, max(1, begins))


def opening_of(body: Mapping[str, Any]) -> Opening | None:
    """Return how a request begins. None: it has no messages, or they cannot be encoded."""
    messages = messages_of(body)
    if messages is None:
        return None
    first = next((n for n, message in enumerate(messages) if message.get("role") not in _SYSTEM_ROLES), len(messages))
    try:
        system = _encode([_stable_value(body.get("system")), *(_stable(message) for message in messages[:first])])
        begin = b"".join(_encode(_stable(message)) for message in messages[first : first + 1])
    except _NOT_ENCODED:
        return None
    return Opening(_digest(system), _digest(begin), bool(body.get("tools")))


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
