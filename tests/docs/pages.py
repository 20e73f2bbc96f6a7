"""The documentation's pages, and the fenced blocks in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

FENCE = re.compile(r"^(?P<before>[^\n]*)\n+```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

NOT_RUN = "*Not run here"
"""How a line begins that tells readers of the block below what it needs that is not here."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: str
    language: str
    text: str
    not_run: bool


def pages() -> list[Path]:
    """All that people write here, without what is generated."""
    return [path for path in sorted(DOCS.glob("*.md")) if path.name != "runbooks.md"]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page that are in one of these languages, in order."""
    found = FENCE.finditer(page.read_text())
    return [
        Block(page.name, one["language"], one["text"], one["before"].startswith(NOT_RUN))
        for one in found
        if one["language"] in languages
    ]
