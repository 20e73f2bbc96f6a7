"""Recorded programs of any shape, and conversions of them in a folder that lasts as long as the conversion."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import strategies as st

from cluster.core.recorded_turn import RecordedProgram, RecordedTurn, recorded_programs
from cluster.offline.traces.conversion import convert
from cluster.offline.traces.format import Options

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the recorded traces (../shared/data) are not here")

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SECONDS = st.none() | st.integers(0, 90_000).map(lambda ms: ms / 1000)


@st.composite
def turns(draw: st.DrawFn, least_context: int = 1) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 6))):
        output = draw(st.integers(0, 700))
        reset = draw(st.sampled_from([None, None, None, 1, 2])) if index else None
        new = draw(st.integers(0, 1500))
        if index == 0 or reset is not None:
            new = context = draw(st.integers(least_context, 6000))
        else:
            before = made[-1]
            kept = before.get("kept_output_tokens")
            kept = before["output_tokens"] if kept is None else kept
            context = before["context_tokens"] + kept + (before["tool_return_tokens"] or 0) + new
        made.append(
            {
                "new_prompt_tokens": new,
                "context_tokens": context,
                "output_tokens": output,
                "tool": draw(st.none() | NAMES),
                "tool_duration_s": draw(SECONDS),
                "tool_return_tokens": draw(st.none() | st.integers(0, 900)),
                "tool_cmd": draw(st.none() | NAMES),
                "kept_output_tokens": draw(st.none() | st.integers(0, output)),
                "reset": reset,
            }
        )
    return made


@st.composite
def programs(draw: st.DrawFn, least_context: int = 1, prefixes: bool = True) -> list[RecordedProgram]:
    """A trace: programs with different ids."""
    prefix = st.fixed_dictionaries({"group": NAMES, "tokens": st.none() | st.integers(0, 3000)})
    return [
        RecordedProgram(
            program_id=name,
            source=draw(st.none() | NAMES),
            split_group=draw(st.none() | NAMES),
            category=draw(st.none() | NAMES),
            shared_prefix=draw(st.none() | prefix) if prefixes else None,
            arrival_s=draw(SECONDS),
            incomplete=draw(st.sampled_from([None, 1])),
            parent_program_id=draw(st.none() | NAMES),
            parent_turn=draw(st.none() | st.integers(0, 9)),
            turns=tuple(RecordedTurn(**turn) for turn in draw(turns(least_context))),
        )
        for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    ]


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    """Write JSON lines."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def there_and_back(trace: Sequence[RecordedProgram], name: str) -> tuple[list[RecordedProgram], dict[str, int]]:
    """Convert a trace of ours into a format and back; what came back, and what the way there lost."""
    options = Options()
    with TemporaryDirectory() as folder:
        ours, theirs, back = (Path(folder) / f"{one}.jsonl" for one in ("ours", "theirs", "back"))
        lines = [program.model_dump_json() for program in trace]
        written(ours, *lines)
        _, losses = convert(ours, "caesura", theirs, name, options)
        convert(theirs, name, back, "caesura", options)
        return [program for _, program in recorded_programs(back)], losses.counts()


def contexts(trace: Sequence[RecordedProgram]) -> list[list[int]]:
    """The prompt tokens of each turn of each program."""
    return [[turn.context_tokens for turn in program.turns] for program in trace]
