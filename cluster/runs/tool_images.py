"""The images of tools' answers in a program: how many are kept, and which messages have them.

The log of each run has them, and each turn sends all of them to the replica. Both are therefore bounded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cluster.api.image_bounds import MAX_IMAGES
from cluster.api.images import images_of
from cluster.core.tools import IN_NEXT_MESSAGE, ToolResult, is_late_message

MAX_CHARS = 16 << 20
"""Largest number of characters of a program's images as URLs."""

LEFT_OUT = "[image left out: this program has as many images as it may]"


def kept_images(earlier: Iterable[str], result: ToolResult) -> tuple[str, tuple[str, ...]]:
    """Return the text of a tool's answer, with a note in place of each image that is not kept, and the images.

    Args:
        earlier: the images of the program's answers before.
        result: the answer.
    """
    if not result.images:
        return result.text, ()
    known = list(earlier)
    room, chars = MAX_IMAGES - len(known), MAX_CHARS - sum(map(len, known))
    kept: list[str] = []
    for image in result.images:
        chars -= len(image)
        if len(kept) >= room or chars < 0:
            break
        kept.append(image)
    pieces = result.text.split(IN_NEXT_MESSAGE)
    notes = [IN_NEXT_MESSAGE if place < len(kept) else LEFT_OUT for place in range(len(result.images))]
    notes += [IN_NEXT_MESSAGE] * (len(pieces) - 1 - len(notes))
    text = pieces[0] + "".join(note + piece for note, piece in zip(notes, pieces[1:], strict=False))
    return text, tuple(kept)


def of_tools(messages: Sequence[dict[str, Any]]) -> frozenset[int]:
    """Return the places of the messages that have the images of tools' answers.

    Each follows an answer, and has nothing but images.
    """
    places: set[int] = set()
    for place, message in enumerate(messages):
        content = message.get("content")
        if place and message.get("role") == "user" and isinstance(content, list) and content:
            earlier = messages[place - 1]
            before = earlier.get("role") == "tool" or is_late_message(earlier) or place - 1 in places
            if before and all(isinstance(part, dict) and part.get("type") == "image_url" for part in content):
                places.add(place)
    return frozenset(places)


def urls_of_tools(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the images of tools' answers in a conversation, as URLs."""
    found = images_of({"messages": [messages[place] for place in sorted(of_tools(messages))]})
    return (image.url for image in found if isinstance(image.url, str))
