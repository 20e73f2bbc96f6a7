"""The file format of recorded agent programs: JSON lines, gzipped or not, with one program a line.

A line has ``program_id`` and ``turns``. Each turn has ``new_prompt_tokens``, ``context_tokens``, ``output_tokens``,
``tool``, ``tool_duration_s`` and ``tool_return_tokens``, where null means "not recorded". Optional keys are
``category``, ``source``, ``split_group``, ``shared_prefix {group, tokens}``, ``arrival_s`` (seconds from the
beginning of the trace), ``incomplete`` (1: the program did not end by itself), ``parent_program_id`` with
``parent_turn`` (the program runs in the pause after this turn of its parent, counted from 0), and for each turn
``kept_output_tokens``, ``reset`` and ``tool_cmd`` (the first word of the command that the tool ran). Other keys are
ignored. Unless turn i+1 has ``reset``,
``context[i+1] = context[i] + kept_output[i] + tool_return[i] + new_prompt[i+1]`` must hold.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import TraceError
from cluster.core.program import CLASS_MARK, MAX_ID_LENGTH

MAX_TOKENS = 1 << 24
"""Maximum length in a trace (tokens). A larger value is an error in the trace."""
MAX_PAUSE_S = 7 * 24 * 3600.0
MAX_ARRIVAL_S = 100 * 365 * 24 * 3600.0
"""Maximum arrival in a trace (seconds): Unix times fit, which some traces count from."""

Row = TypeVar("Row", bound=BaseModel)
_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class RecordedTurn(_Strict):
    """One turn of a line, unchanged."""

    new_prompt_tokens: _Tokens
    context_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    output_tokens: _Tokens
    tool: str | None
    tool_duration_s: Annotated[float, Field(ge=0, le=MAX_PAUSE_S, allow_inf_nan=False)] | None
    tool_return_tokens: _Tokens | None
    tool_cmd: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None
    kept_output_tokens: _Tokens | None = None
    reset: Literal[1, 2] | None = None

    @property
    def tool_class(self) -> str | None:
        """The tool, with the class of its arguments if the trace has one; None: the tool is not recorded."""
        known = self.tool is not None and self.tool_cmd
        return f"{self.tool}{CLASS_MARK}{self.tool_cmd}"[:MAX_ID_LENGTH] if known else self.tool

    @property
    def kept(self) -> int:
        """Number of output tokens that stay in the next turn's context."""
        return self.output_tokens if self.kept_output_tokens is None else self.kept_output_tokens


class SharedPrefix(_Strict):
    """The start of the prompt, which is the same in all programs of the group. None: its length is not recorded."""

    group: str
    tokens: _Tokens | None


class RecordedProgram(_Strict):
    """One line of a trace, unchanged."""

    program_id: Annotated[str, Field(min_length=1)]
    source: str | None = None
    split_group: str | None = None
    category: str | None = None
    shared_prefix: SharedPrefix | None = None
    arrival_s: Annotated[float, Field(ge=0, le=MAX_ARRIVAL_S, allow_inf_nan=False)] | None = None
    incomplete: Literal[1] | None = None
    """1: the program failed, was cancelled or reached a limit, so that its last turn need not be its end."""
    parent_program_id: Annotated[str, Field(min_length=1)] | None = None
    parent_turn: Annotated[int, Field(ge=0)] | None = None
    """Index of the parent's turn in whose pause the program runs. None: not recorded."""
    turns: Annotated[tuple[RecordedTurn, ...], Field(min_length=1, strict=False)]


def recorded_programs(path: Path) -> Iterator[tuple[str, RecordedProgram]]:
    """Read the programs of a trace, each with its position (``file:line``). Lengths are not checked, see
    `check_lengths`.

    Raises:
        TraceError: the file cannot be read, a line is not a program, or a program occurs twice.
    """
    seen: dict[str, int] = {}
    for number, line in lines_of(path):
        where = f"{path}:{number}"
        recorded = parsed(line, where, RecordedProgram)
        if recorded.program_id in seen:
            raise TraceError(f"{where}: program_id: {recorded.program_id!r} is on line {seen[recorded.program_id]} too")
        seen[recorded.program_id] = number
        yield where, recorded


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file, gzipped (.gz) or not, with their numbers from 1. Blank lines are left out.

    Raises:
        TraceError: the file cannot be read. The message names the line.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from error


def parsed(line: bytes, where: str, schema: type[Row]) -> Row:
    """Parse a line of JSON as ``schema``.

    Raises:
        TraceError: the line does not fit. The message names the line, with ``where``, and the key.
    """
    try:
        return schema.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the line"
        raise TraceError(f"{where}: {key}: {first['msg']}") from error


def check_lengths(program: RecordedProgram, where: str) -> None:
    """Check that each turn's context is the sum of what the turn before left and what is new.

    Raises:
        TraceError: it is not. The message names the line, with ``where``, and the key.
    """
    for index, turn in enumerate(program.turns):
        key = f"{where}: turns.{index}"
        if turn.kept > turn.output_tokens:
            raise TraceError(f"{key}.kept_output_tokens: {turn.kept} of {turn.output_tokens} generated tokens")
        if index and not turn.reset:
            before = program.turns[index - 1]
            expected = before.context_tokens + before.kept + (before.tool_return_tokens or 0) + turn.new_prompt_tokens
            if turn.context_tokens != expected:
                raise TraceError(
                    f"{key}.context_tokens: {turn.context_tokens}, but the turn before it and the new prompt make "
                    f"{expected} (a turn that starts another context says so with reset)"
                )
