"""Small traces as the data set has them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
"""Recorded traces; they are no part of the repository."""

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces (../shared/data) are not here")

Row = dict[str, Any]


def row(name: str, turns: Sequence[tuple[int, int, str | None, float | None, int]], **fields: Any) -> Row:
    """A program; each turn (new prompt, output, tool as `name:command`, seconds, returned), its context following."""
    context, carried, rows = 0, 0, []
    for index, (new, output, tool, seconds, returned) in enumerate(turns):
        context += carried + new
        last = index == len(turns) - 1
        named, _, command = (tool or "").partition(":")
        rows.append(
            {
                "new_prompt_tokens": new,
                "context_tokens": context,
                "output_tokens": output,
                "tool": named or None,
                "tool_duration_s": seconds,
                "tool_return_tokens": None if last else returned,
                **({"tool_cmd": command} if command else {}),
            }
        )
        carried = output + (0 if last else returned)
    return {"program_id": name, "source": "made", "split_group": f"group of {name}", "turns": rows, **fields}


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
