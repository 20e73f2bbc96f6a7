"""What `make clients` installed, and the examples of docs/clients.md that run on it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, FENCE, ROOT

INSTALLED = ROOT / ".cache" / "clients"
PYTHON = INSTALLED / "python" / "bin" / "python"
LITELLM = INSTALLED / "litellm" / "bin" / "litellm"
COMMANDS = INSTALLED / "node_modules" / ".bin"

OUT = ROOT / "out"
"""The folder of the tables that `make clients` shows."""

SHOWN = "http://127.0.0.1:8000"
WITHIN_S = 240


def require(command: Path) -> None:
    """Skip the test if this is not installed."""
    if not command.exists():
        pytest.skip(f"{command.name} is not installed: make clients")


def example(section: str, url: str) -> str:
    """The page's block in this section, for this test's server."""
    page = (DOCS / "clients.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    block = FENCE.search(page)
    assert block is not None, section
    return block["text"].replace(SHOWN, url)


def environment(home: Path) -> dict[str, str]:
    """All variables of a client: a home of its own, and nothing of ours."""
    return {"HOME": str(home), "PATH": f"{COMMANDS}:{os.environ['PATH']}", "DO_NOT_TRACK": "1", "CI": "1"}


def run(command: list[str], home: Path, text: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a client with this standard input."""
    return subprocess.run(
        command, cwd=home, env=environment(home), input=text, capture_output=True, text=True, timeout=WITHIN_S
    )


def write_table(name: str, heads: list[str], lines: list[list[str]]) -> None:
    """Write a table in Markdown to the folder of tables, unless all was skipped."""
    if not lines:
        return
    rows = [heads, ["---"] * len(heads), *lines]
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))
