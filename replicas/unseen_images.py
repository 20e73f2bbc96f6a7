"""Replaces images in messages for a model that sees none, so that a history with an image can be continued."""

from collections.abc import Mapping
from typing import Any

IMAGE_PARTS = ("image_url", "input_image", "image")
UNSEEN = "[image: this model cannot see it]"


def without_images(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat body in which each image is a short text. The body is returned as it is if it has no image."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not any(map(_has_image, messages)):
        return body
    return {**body, "messages": [_without(message) if _has_image(message) else message for message in messages]}


def _has_image(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(map(_is_image, content))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _without(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": UNSEEN} if _is_image(part) else part for part in message["content"]]
    return {**message, "content": parts}
