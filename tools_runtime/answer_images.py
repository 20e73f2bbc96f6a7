"""The images of one answer of a tool: checked, bounded, and each with its place in the text."""

import asyncio

from cluster.api.image_bounds import ImageRefused, check_pixels, content_of
from cluster.core.tools import IN_NEXT_MESSAGE

MAX_IMAGES = 8
"""Largest number of images of an answer."""
IMAGE_CHARS = 4 << 20
"""Largest number of characters of all images of an answer in base64, which are 3 MiB of images."""


class AnswerImages:
    """Collects images.

    Args:
        kept: whether the caller can use images. Otherwise each becomes a note.
    """

    def __init__(self, *, kept: bool) -> None:
        self._kept = kept
        self._room = IMAGE_CHARS
        self.urls: list[str] = []
        """The images as `data:` URLs."""

    async def place(self, media_type: str, data: str) -> str:
        """Take an image, and return what the text has in its place: a reference, or why it is left out.

        Args:
            media_type: its type, such as `image/png`.
            data: its content in base64.
        """
        if not self._kept:
            return "[image, not shown]"
        if len(self.urls) == MAX_IMAGES:
            return f"[image left out: an answer has at most {MAX_IMAGES} images]"
        if len(data) > self._room:
            return f"[image left out: the images of an answer have at most {IMAGE_CHARS} characters in base64]"
        url = f"data:{media_type};base64,{data}"
        try:
            await asyncio.to_thread(_check, url)
        except ImageRefused as error:
            return f"[image left out: {error}]"
        self._room -= len(data)
        self.urls.append(url)
        return IN_NEXT_MESSAGE


def _check(url: str) -> None:
    check_pixels(content_of(url))
