"""Caesura's own format of traces: see `cluster.core.recorded_turn`. Nothing of a recorded program is lost."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cluster.core.recorded_turn import RecordedProgram, RecordedTurn, check_lengths, recorded_programs
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses

_WRITTEN = frozenset(name for name, field in RecordedTurn.model_fields.items() if field.is_required())
"""Keys of a turn that a trace always has; null means "not recorded"."""


def read(path: Path, _options: Options, _losses: Losses) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the programs of a file, line by line."""
    for where, recorded in recorded_programs(path):
        check_lengths(recorded, where)
        yield where, recorded


def write(programs: Iterable[RecordedProgram], file: BinaryIO, _options: Options, _losses: Losses) -> None:
    """Write programs line by line."""
    for program in programs:
        file.write(json.dumps(_fields(program), ensure_ascii=False).encode() + b"\n")


def _fields(program: RecordedProgram) -> dict[str, Any]:
    fields = program.model_dump(exclude_none=True)
    if program.shared_prefix is not None:
        fields["shared_prefix"] = program.shared_prefix.model_dump()
    turns = [turn.model_dump() for turn in program.turns]
    fields["turns"] = [
        {name: value for name, value in turn.items() if value is not None or name in _WRITTEN} for turn in turns
    ]
    return fields


FORMAT = TraceFormat("everything of a program", read, write)
