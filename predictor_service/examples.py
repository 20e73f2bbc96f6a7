"""Reads recorded programs as examples: the inputs of models and their outcomes, for training and evaluation.

Programs are lines of trace files (`cluster.core.recorded_turn`). Texts are lines of other files, joined by program and
turn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram, RecordedTurn, check_lengths, lines_of, parsed, recorded_programs
from predictor_service.model import (
    HISTORY,
    MAX_ARGUMENTS,
    MAX_TEXT,
    NO_TOOL,
    Learner,
    PauseContext,
    PauseOutcome,
    TurnContext,
    TurnOutcome,
)

TEST_SHARE = 0.3
"""Share of the groups of programs that are used for the test. Programs of one group have the same task."""


@dataclass(frozen=True, slots=True)
class TurnExample:
    """One turn with its outcome, and the work and the pause after it."""

    context: TurnContext
    outcome: TurnOutcome
    remaining: tuple[int, int]
    """Tokens of prompts and outputs that later turns need computed, and the number of later turns."""
    pause: PauseContext | None = None
    """The pause after the turn; None if the turn called no tool or was the last one."""
    pause_outcome: PauseOutcome | None = None
    """The outcome of the pause; None if there was no pause or nothing of it was recorded."""


@dataclass(frozen=True, slots=True)
class ProgramExample:
    """A recorded program, with what a forecaster would have seen at each turn and what came of it."""

    program_id: str
    source: str
    split_group: str
    """Group of programs with the same task. All programs of a group are on the same side of a split."""
    turns: tuple[TurnExample, ...]


@dataclass(frozen=True, slots=True)
class TurnText:
    """The texts of a turn, cut like `TurnContext.text` and `PauseContext.arguments`."""

    prompt: str = ""
    arguments: str = ""


class _TextRow(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    program_id: Annotated[str, Field(min_length=1)]
    turn: Annotated[int, Field(ge=0)]
    prompt_text: str
    output_text: str


Texts = Mapping[tuple[str, int], TurnText]
"""Texts by program id and index of the turn."""


def read_programs(traces: Sequence[Path], texts: Sequence[Path] = ()) -> list[ProgramExample]:
    """Read the complete programs of ``traces`` in the order of the files, with the texts of their turns from ``texts``.

    Of the others it is not known what was left of them after each turn.

    Raises:
        TraceError: a file cannot be read, a line cannot be used, a program occurs twice, no program is complete, or a
            file of texts contains none of these programs; the message names the file, the line and the key.
    """
    rows: dict[str, tuple[Path, str, RecordedProgram]] = {}
    for path in traces:
        for where, row in recorded_programs(path):
            if row.program_id in rows:
                raise TraceError(f"{where}: program_id: {row.program_id!r} is in {rows[row.program_id][1]} too")
            check_lengths(row, where)
            rows[row.program_id] = (path, where, row)
    rows = {name: found for name, found in rows.items() if found[2].incomplete is None}
    if not rows:
        raise TraceError(f"{', '.join(map(str, traces)) or 'no files'}: no complete programs in it")
    known = {(name, turn) for name, (_, _, row) in rows.items() for turn in range(len(row.turns))}
    turn_texts: dict[tuple[str, int], TurnText] = {}
    for path in texts:
        before = len(turn_texts)
        turn_texts.update(row for row in _texts(path) if row[0] in known)
        if len(turn_texts) == before:
            raise TraceError(f"{path}:1: program_id: none of the traces' programs has a text here")
    return [program_example(row, row.source or _stem(path), turn_texts) for path, _, row in rows.values()]


def program_example(row: RecordedProgram, source: str, texts: Texts) -> ProgramExample:
    """Make the example of one program, whose lengths have been checked."""
    new = [_new_tokens(row, index) for index in range(len(row.turns))]
    contexts = _contexts(row, source, texts, new)
    work = [_computed_tokens(row, index) for index in range(len(row.turns))]
    turns = []
    for index, (turn, context) in enumerate(zip(row.turns, contexts, strict=True)):
        last = index == len(row.turns) - 1
        arguments = texts.get((row.program_id, index), TurnText()).arguments
        tool = turn.tool_class or NO_TOOL
        pause = None if last or tool == NO_TOOL else PauseContext(context, tool, turn.output_tokens, arguments)
        turns.append(
            TurnExample(
                context=context,
                outcome=TurnOutcome(turn.output_tokens, tool, arguments, last),
                remaining=(sum(work[index + 1 :]), len(row.turns) - 1 - index),
                pause=pause,
                pause_outcome=None if pause is None else _pause_outcome(turn, _returned(row, index, new)),
            )
        )
    return ProgramExample(row.program_id, source, row.split_group or row.program_id, tuple(turns))


def teach(learner: Learner, program: ProgramExample) -> None:
    """Let a learner learn from a whole program, in the order of its turns."""
    for turn in program.turns:
        teach_turn(learner, turn)
    teach_end(learner, program)


def teach_turn(learner: Learner, turn: TurnExample) -> None:
    """Let a learner learn from a turn and the pause after it."""
    learner.turn_ended(turn.context, turn.outcome)
    if turn.pause is not None and turn.pause_outcome is not None:
        learner.pause_ended(turn.pause, turn.pause_outcome)


def teach_end(learner: Learner, program: ProgramExample) -> None:
    """Let a learner learn from the end of a program: the work that was left after each of its turns."""
    learner.program_ended([turn.context for turn in program.turns], [turn.remaining for turn in program.turns])


def arguments_of(output: str) -> str:
    """Return the text of a reply's tool calls: the part after the first call, else the last fenced block, else ""."""
    if call := _CALL.search(output):
        return output[call.end() :][:MAX_ARGUMENTS]
    blocks = _BLOCK.findall(output)
    return str(blocks[-1])[:MAX_ARGUMENTS] if blocks else ""


_CALL = re.compile(r"\[tool_call [^\]\n]*\] ?")
_BLOCK = re.compile(r"```[a-z]*\n(.*?)(?:```|\Z)", re.DOTALL)


def _texts(path: Path) -> Iterator[tuple[tuple[str, int], TurnText]]:
    for number, line in lines_of(path):
        row = parsed(line, f"{path}:{number}", _TextRow)
        yield (row.program_id, row.turn), TurnText(row.prompt_text[-MAX_TEXT:], arguments_of(row.output_text))


def _contexts(row: RecordedProgram, source: str, texts: Texts, new: Sequence[int]) -> list[TurnContext]:
    contexts = []
    for index, turn in enumerate(row.turns):
        before = range(index - 1, max(-1, index - 1 - HISTORY), -1)
        contexts.append(
            TurnContext(
                source=source,
                position=index,
                prompt_tokens=turn.context_tokens,
                new_tokens=new[index],
                outputs=tuple(row.turns[i].output_tokens for i in before),
                tools=tuple(row.turns[i].tool_class or NO_TOOL for i in before),
                durations_s=tuple(row.turns[i].tool_duration_s for i in before),
                returned=tuple(_returned(row, i, new) or 0 for i in before),
                text=texts.get((row.program_id, index), TurnText()).prompt,
            )
        )
    return contexts


def _new_tokens(row: RecordedProgram, index: int) -> int:
    """Return the prompt tokens that the turn before did not have. After a reset: all but the shared prefix."""
    turn = row.turns[index]
    if index == 0:
        return turn.context_tokens
    if turn.reset is not None:
        prefix = row.shared_prefix.tokens or 0 if row.shared_prefix else 0
        return max(0, turn.context_tokens - prefix)
    before = row.turns[index - 1]
    return max(0, turn.context_tokens - before.context_tokens - before.kept)


def _computed_tokens(row: RecordedProgram, index: int) -> int:
    """Return the tokens that a turn needs computed on a server that never evicts KV.

    If only a part of an output is sent again, this part moves to another place in the context and counts as new.
    """
    turn = row.turns[index]
    moved = 0
    if index and turn.reset is None and (before := row.turns[index - 1]).kept < before.output_tokens:
        moved = before.kept
    return _new_tokens(row, index) + moved + turn.output_tokens


def _returned(row: RecordedProgram, index: int, new: Sequence[int]) -> int | None:
    """Return the tokens that the turn's call added to the next prompt; None if they are unknown."""
    starts_another = row.turns[index + 1].reset is not None
    return row.turns[index].tool_return_tokens if starts_another else new[index + 1]


def _pause_outcome(turn: RecordedTurn, returned: int | None) -> PauseOutcome | None:
    if turn.tool_duration_s is None and returned is None:
        return None
    return PauseOutcome(turn.tool_duration_s, returned)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def in_test(split_group: str, seed: int, test_share: float = TEST_SHARE) -> bool:
    """Return whether a group is used for the test. The result does not depend on the files that are read."""
    digest = blake2b(f"{seed}/{split_group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < test_share * 2**64


def split(
    programs: Iterable[ProgramExample], seed: int, test_share: float = TEST_SHARE
) -> tuple[list[ProgramExample], list[ProgramExample]]:
    """Return the programs to train on and those to test on, in their order. The groups meet the share on average."""
    sides: tuple[list[ProgramExample], list[ProgramExample]] = ([], [])
    for program in programs:
        sides[in_test(program.split_group, seed, test_share)].append(program)
    return sides
