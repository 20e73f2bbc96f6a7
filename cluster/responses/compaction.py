"""Compaction items: a summary as an opaque text that clients send back.

The text is encoded, not encrypted: it is a part of the caller's own conversation.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import ResponseUsage

from cluster.responses.output import output_item_id
from cluster.runs.compaction import kept
from cluster.runs.events import RunSpec

PREFIX = "caesura1."
UNREADABLE = "A summary that another server made is left out, because this server cannot read it."

OBJECT = "response.compaction"


def packed(summary: str) -> str:
    """Return the opaque text of a summary."""
    return PREFIX + base64.urlsafe_b64encode(summary.encode()).decode()


def unpacked(text: str) -> str | None:
    """Return the summary of an opaque text, or None if it is not a result of `packed`."""
    if not text.startswith(PREFIX):
        return None
    try:
        return base64.b64decode(text.removeprefix(PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def compaction_item(item_id: str, summary: str) -> dict[str, Any]:
    """Return the item of a summary."""
    return {"id": item_id, "type": "compaction", "encrypted_content": packed(summary)}


def compacted_response(
    spec: RunSpec, messages: Sequence[dict[str, Any]], summary: str, usage: ResponseUsage
) -> dict[str, Any]:
    """Return the answer of `/v1/responses/compact`: the messages of the user, and the summary.

    Args:
        spec: the run that made the summary.
        messages: the conversation before it.
        summary: its text.
        usage: its tokens.
    """
    instructions = spec.echo.get("instructions")
    items = list(_items(spec.id, messages[1:] if instructions is not None else messages))
    items.append(compaction_item(output_item_id("cmp", spec.id, len(items)), summary))
    return {
        "id": spec.id,
        "object": OBJECT,
        "created_at": int(spec.created_s),
        "output": items,
        "usage": usage.to_dict(mode="json"),
    }


def _items(run_id: str, messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for place, message in enumerate(kept(messages)):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield {
            "id": output_item_id("msg", run_id, place),
            "type": "message",
            "role": "developer" if message["role"] == "system" else "user",
            "status": "completed",
            "content": [_input_part(part) for part in parts],
        }


def _input_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a chat message as a part of an item."""
    if part["type"] == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
    return {"type": "input_text", "text": part["text"]}
