"""Markdown that GitHub and mkdocs read alike."""

from collections.abc import Iterable, Sequence

NOTE = "<!-- Written by `make docs`; change the code that it describes instead. -->"


def page(title: str, *blocks: str) -> str:
    """A generated page, with a note that it is one."""
    return "\n\n".join((f"# {title}", NOTE, *(block for block in blocks if block))) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; what stands in a cell is Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text on one line, without a bar that would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: str) -> str:
    """As code. Quotes stay as they are."""
    return f"`{value}`"


def anchor(heading: str) -> str:
    """The fragment under which GitHub and mkdocs find a heading of letters, digits, dots, colons and spaces."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "_- ")
    return "#" + kept.replace(" ", "-")
