"""What a format of traces has to provide, and the options of a conversion."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cluster.core.recorded_turn import RecordedProgram
from cluster.offline.traces.losses import Losses

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's public traces and of AIPerf's datasets."""


@dataclass(frozen=True, slots=True)
class Options:
    """Values that a file lacks. Each format uses those that it needs."""

    block_tokens: int = BLOCK_TOKENS
    """Tokens that one of ``hash_ids`` stands for."""
    every_s: float = 1.0
    """Seconds between the arrivals of programs whose arrival is not recorded, in formats of absolute times."""
    output_tokens: int | None = None
    """Output tokens of a turn that has no output length. None: such a turn is an error."""
    tokenizer: Path | None = None
    """A ``tokenizer.json`` that counts the tokens of texts. None: a text without a length is an error."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format: how its files are read and written as recorded programs."""

    carries: str
    """What a file of this format has of a program, for readers of a conversion's output."""
    read: Callable[[Path, Options, Losses], Iterator[tuple[str, RecordedProgram]]]
    """Yields the programs of a file, each with its position (``file:line``), and counts what it cannot keep. Raises
    TraceError, whose message names the file, the line and the field."""
    write: Callable[[Iterable[RecordedProgram], BinaryIO, Options, Losses], None]
    """Writes programs to a file that is open for writing, and counts what it cannot write."""
