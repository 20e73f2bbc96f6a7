"""Images in the bodies of chat completions, responses and conversations: where they are, and their URLs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

DATA = "data:"
_LISTS = {"messages": ("content",), "input": ("content", "output"), "items": ("content", "output")}
"""The fields of a body that have content, and the fields of their items in which the parts are."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a body."""

    path: str
    """The place of its URL in the body, such as `messages.0.content.1.image_url.url`."""
    part: dict[str, Any]

    @property
    def url(self) -> Any:
        """Its URL. What is no text is no URL, which the validation of the body reports."""
        named = self.part["image_url"]
        return named.get("url") if isinstance(named, Mapping) else named

    def set_url(self, url: str) -> None:
        """Replace the URL in the body."""
        named = self.part["image_url"]
        self.part["image_url"] = {**named, "url": url} if isinstance(named, Mapping) else url


def images_of(body: Mapping[str, Any]) -> Iterator[ImagePart]:
    """Yield the images of a body that have a URL, in their order."""
    for field, names in _LISTS.items():
        items = body.get(field)
        for place, item in enumerate(items if isinstance(items, list) else ()):
            for name in names:
                parts = item.get(name) if isinstance(item, Mapping) else None
                for number, part in enumerate(parts if isinstance(parts, list) else ()):
                    if isinstance(part, dict) and part.get("image_url") is not None:
                        inner = ".url" if isinstance(part["image_url"], Mapping) else ""
                        yield ImagePart(f"{field}.{place}.{name}.{number}.image_url{inner}", part)
