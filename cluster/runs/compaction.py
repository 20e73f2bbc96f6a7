"""Replaces the middle of a conversation with a summary, which a turn of the same program writes.

The messages of the system and of the user stay as they are. What the model and the tools said between them is replaced,
late answers of asynchronous tools included.
"""

from collections.abc import Sequence
from typing import Any

from cluster.core.tools import is_late_message
from cluster.runs.tool_images import of_tools

MAX_SUMMARY_TOKENS = 2048
"""Largest number of tokens of a summary."""

MIN_SUMMARY_TOKENS = 256
"""A response does not summarise its conversation by itself if the summary may have fewer tokens."""

CUT = "[The summary was cut here.]"
"""The last line of a summary that was cut and is used."""

HEAD = "[Summary of the conversation so far]"
"""The first line of the message with a summary."""

REQUEST = {
    "role": "user",
    "content": "Write a summary of our conversation so far, in place of which you will read it from now on. State what "
    "was asked, what was done and found with exact names, numbers and paths, what was decided and why, and what is "
    "still to be done. Do not call a tool, and do not answer anything else.",
}
"""The last message of the turn that writes a summary."""

ChatMessage = dict[str, Any]


def summary_message(summary: str) -> ChatMessage:
    """Return the message with which the model reads a summary."""
    return {"role": "user", "content": f"{HEAD}\n{summary}"}


def is_summary(message: ChatMessage) -> bool:
    """Return whether a message is a result of `summary_message`."""
    content = message["content"]
    return message["role"] == "user" and isinstance(content, str) and content.startswith(HEAD)


def of_user(messages: Sequence[ChatMessage]) -> frozenset[int]:
    """Return the places of the user's own messages: no summary, no late answer, and no images of answers."""
    images = of_tools(messages)
    return frozenset(
        place
        for place, message in enumerate(messages)
        if message["role"] == "user"
        and place not in images
        and not is_summary(message)
        and not is_late_message(message)
    )


def kept(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages that a summary does not replace. An earlier summary is replaced."""
    users = of_user(messages)
    return tuple(message for place, message in enumerate(messages) if message["role"] == "system" or place in users)


def compacted(messages: Sequence[ChatMessage], summary: str) -> tuple[ChatMessage, ...]:
    """Return the conversation with a summary in place of what it replaces."""
    return (*kept(messages), summary_message(summary))
