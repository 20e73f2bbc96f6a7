"""Reads recorded agent programs: JSON lines, gzipped or not, one program a line.

A line has ``program_id`` and ``turns``; each turn ``new_prompt_tokens``, ``context_tokens``, ``output_tokens``,
``tool``, ``tool_duration_s`` and ``tool_return_tokens``, where null means "not recorded". Optional: ``category``,
``source``, ``split_group``, ``shared_prefix {group, tokens}``, and per turn ``kept_output_tokens``, ``reset`` and
``tool_cmd`` (the word of the command that the tool ran). Other keys are ignored. Unless turn i+1 has ``reset``,
``context[i+1] = context[i] + kept_output[i] + tool_return[i] + new_prompt[i+1]`` must hold.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.bench.workload import MIN_OUTPUT_TOKENS, PlannedProgram, PlannedTurn, Workload, prefix_notes
from cluster.errors import TraceError
from cluster.program import CLASS_MARK, MAX_ID_LENGTH

MAX_TOKENS = 1 << 24
"""A recorded length beyond this is a mistake in the trace."""
MAX_PAUSE_S = 7 * 24 * 3600.0

Row = TypeVar("Row", bound=BaseModel)
_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class RecordedTurn(_Strict):
    """One turn of a line, as it stands there."""

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
        """The tool with the class of its arguments, where the trace says one."""
        known = self.tool is not None and self.tool_cmd
        return f"{self.tool}{CLASS_MARK}{self.tool_cmd}"[:MAX_ID_LENGTH] if known else self.tool

    @property
    def kept(self) -> int:
        """Of the output, tokens that stay in the next turn's context."""
        return self.output_tokens if self.kept_output_tokens is None else self.kept_output_tokens


class _Prefix(_Strict):
    group: str
    tokens: _Tokens | None


class RecordedProgram(_Strict):
    """One line, as it stands there."""

    program_id: Annotated[str, Field(min_length=1)]
    source: str | None = None
    split_group: str | None = None
    category: str | None = None
    shared_prefix: _Prefix | None = None
    turns: Annotated[tuple[RecordedTurn, ...], Field(min_length=1, strict=False)]


def programs_from_trace(path: Path, missing_tool_s: float | None = None, only_recorded: bool = False) -> Workload:
    """All programs of ``path`` (.jsonl or .jsonl.gz), in the file's order.

    ``missing_tool_s`` stands for every tool duration that was not recorded. Without it such a line is refused, or with
    ``only_recorded`` left out. What comes after a turn without a tool follows at once; the tool of a program's last
    turn is not replayed.

    Raises:
        TraceError: unreadable, empty, or a line that cannot be used; names the file, the line and the key.
    """
    programs: list[PlannedProgram] = []
    empty_outputs = left_out = 0
    for where, recorded in recorded_programs(path):
        if only_recorded and _first_missing(recorded) is not None:
            left_out += 1
            continue
        _check_durations(recorded, where, missing_tool_s)
        check_lengths(recorded, where)
        empty_outputs += sum(turn.output_tokens < MIN_OUTPUT_TOKENS for turn in recorded.turns)
        programs.append(_planned(recorded, missing_tool_s))
    if not programs:
        raise TraceError(f"{path}: no programs in it" + (f", {left_out} left out" if left_out else ""))
    notes = prefix_notes(programs)
    if left_out:
        notes += (f"{left_out} programs with a tool duration that was not recorded are left out",)
    if empty_outputs:
        notes += (f"{empty_outputs} turns were recorded without output: they generate {MIN_OUTPUT_TOKENS} token",)
    return Workload(name=path.name.removesuffix(".gz").removesuffix(".jsonl"), programs=tuple(programs), notes=notes)


def recorded_programs(path: Path) -> Iterator[tuple[str, RecordedProgram]]:
    """The programs of ``path``, each with where it stands (``file:line``); their lengths may not add up.

    Raises:
        TraceError: unreadable, a line that is no program, or one that is there twice.
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
    """The lines of a file, gzipped (.gz) or not, that are not blank, with their numbers from 1.

    Raises:
        TraceError: it cannot be read; names the line.
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
    """A line of JSON as ``schema``.

    Raises:
        TraceError: it is none; names the line and the key.
    """
    try:
        return schema.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the line"
        raise TraceError(f"{where}: {key}: {first['msg']}") from error


def _first_missing(program: RecordedProgram) -> int | None:
    """The first turn whose tool, if it is replayed, has no duration."""
    turns = enumerate(program.turns[:-1])
    return next((i for i, turn in turns if turn.tool is not None and turn.tool_duration_s is None), None)


def _check_durations(program: RecordedProgram, where: str, missing_tool_s: float | None) -> None:
    missing = _first_missing(program)
    if missing is not None and missing_tool_s is None:
        raise TraceError(
            f"{where}: turns.{missing}.tool_duration_s: not recorded (null); choose what it shall be with "
            "--missing-tool-s SECONDS, or leave such programs out with --only-recorded"
        )


def check_lengths(program: RecordedProgram, where: str) -> None:
    """Each turn's context is what the turn before left and what is new.

    Raises:
        TraceError: it is not; names the line and the key.
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


def _planned(program: RecordedProgram, missing_tool_s: float | None) -> PlannedProgram:
    planned: list[PlannedTurn] = []
    kept_context = 0
    for index, turn in enumerate(program.turns):
        last = index == len(program.turns) - 1
        starts = index == 0 or turn.reset is not None
        pause_s = turn.tool_duration_s
        if pause_s is None:
            pause_s = missing_tool_s if turn.tool is not None and missing_tool_s is not None else 0.0
        planned.append(
            PlannedTurn(
                fresh_tokens=turn.context_tokens - (0 if starts else kept_context),
                output_tokens=max(MIN_OUTPUT_TOKENS, turn.output_tokens),
                kept_tokens=turn.kept,
                tool=None if last else turn.tool_class,
                pause_s=0.0 if last else pause_s,
                reset=index > 0 and turn.reset is not None,
            )
        )
        kept_context = turn.context_tokens + turn.kept
    prefix = program.shared_prefix
    return PlannedProgram(
        program_id=program.program_id,
        kind=program.category or "",
        turns=tuple(planned),
        prefix_group=prefix.group if prefix else None,
        prefix_tokens=(prefix.tokens or 0) if prefix else 0,
    )
