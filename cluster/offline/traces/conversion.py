"""Converts and checks files of traces."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from cluster.core.errors import ConfigError, TraceError
from cluster.core.recorded_turn import RecordedProgram, check_lengths
from cluster.core.registry import TRACE_FORMATS
from cluster.offline.traces.format import Options, TraceFormat
from cluster.offline.traces.losses import Losses

COMPRESSION = 6
"""gzip's own default."""


@dataclass(slots=True)
class Counts:
    """What a trace has."""

    programs: int = 0
    turns: int = 0
    unrecorded_durations: int = 0
    """Tools before a program's last turn whose duration is not recorded."""

    def line(self) -> str:
        """Return the counts as a line of text."""
        return f"{self.programs} programs, {self.turns} turns, {self.unrecorded_durations} tool durations not recorded"


def convert(source: Path, from_: str, target: Path, to: str, options: Options) -> tuple[Counts, Losses]:
    """Write the programs of ``source`` into ``target``, which appears when all of it is written.

    Args:
        source: the file that is read; ``.gz`` is decompressed.
        from_: the name of its format.
        target: the file that is written; ``.gz`` is compressed.
        to: the name of its format.
        options: what the files lack.

    Raises:
        ConfigError: a format is unknown, or ``target`` cannot be written.
        TraceError: ``source`` cannot be used. The message names the file, the line and the field.
    """
    losses, counts = Losses(), Counts()
    reader, writer = format_of(from_), format_of(to)
    part = target.with_name(target.name + ".part")
    try:
        with _opened(part, target) as file:
            writer.write(_programs(reader, source, options, losses, counts), file, options, losses)
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return counts, losses


def check(source: Path, from_: str, options: Options) -> tuple[Counts, Losses]:
    """Read all of ``source``, and count what it has and what a conversion would lose of it.

    Raises:
        ConfigError: the format is unknown.
        TraceError: ``source`` cannot be used. The message names the file, the line and the field.
    """
    losses, counts = Losses(), Counts()
    for _ in _programs(format_of(from_), source, options, losses, counts):
        pass
    return counts, losses


def format_of(name: str) -> TraceFormat:
    """Return the format of this name.

    Raises:
        ConfigError: there is none.
    """
    return cast(TraceFormat, TRACE_FORMATS.load(name))


def _programs(
    reader: TraceFormat, source: Path, options: Options, losses: Losses, counts: Counts
) -> Iterator[RecordedProgram]:
    for where, program in reader.read(source, options, losses):
        check_lengths(program, where)
        counts.programs += 1
        counts.turns += len(program.turns)
        paused = program.turns[:-1]
        counts.unrecorded_durations += sum(t.tool is not None and t.tool_duration_s is None for t in paused)
        yield program
    if not counts.programs:
        raise TraceError(f"{source}: no programs in it")


def _opened(part: Path, target: Path) -> BinaryIO:
    if target.suffix == ".gz":
        return cast(BinaryIO, gzip.open(part, "wb", compresslevel=COMPRESSION))
    return part.open("wb")
