"""Drops the oldest messages of a conversation that does not fit in the model's context window."""

from collections.abc import Sequence
from typing import Any

from cluster.runs.compaction import of_user
from cluster.runs.tool_images import of_tools

ChatMessage = dict[str, Any]


def droppable(messages: Sequence[ChatMessage]) -> list[tuple[int, ...]]:
    """Return the places of the messages that may be dropped, the oldest first, in groups that belong together.

    A call and its answers, with their images, are one group. The messages of the system, the last one of the user and
    the last group stay.
    """
    groups: list[list[int]] = []
    images = of_tools(messages)
    for place, message in enumerate(messages):
        if (message["role"] == "tool" or place in images) and groups:
            groups[-1].append(place)
        else:
            groups.append([place])
    last_user = max(of_user(messages), default=-1)
    return [
        tuple(group)
        for group in groups[:-1]
        if messages[group[0]]["role"] not in ("system", "developer") and group[0] != last_user
    ]


def without_oldest(messages: Sequence[ChatMessage], groups: int) -> list[int]:
    """Return the places of the messages that stay without the first ``groups`` groups of `droppable`."""
    dropped = {place for group in droppable(messages)[:groups] for place in group}
    return [place for place in range(len(messages)) if place not in dropped]
