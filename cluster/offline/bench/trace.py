"""Converts recorded programs (`cluster.core.recorded_turn`) into a workload for the bench and the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedTurn, check_lengths, recorded_programs
from cluster.offline.bench.recorded_trees import RecordedTree, trees_of
from cluster.offline.bench.workload import (
    MIN_OUTPUT_TOKENS,
    LastCall,
    PlannedProgram,
    PlannedTurn,
    Workload,
    prefix_notes,
)


@dataclass(slots=True)
class RecordedDurations:
    """Durations of tools that a trace has, of which those that another trace lacks are drawn."""

    name: str
    by_tool: Mapping[str, Sequence[float]]
    """Seconds by tool, with the class of its arguments."""
    all_tools: Sequence[float]
    same_tool: int = field(default=0, init=False)
    other_tool: int = field(default=0, init=False)
    """Number of durations that were drawn of the same tool, and of all tools."""

    @classmethod
    def of(cls, path: Path) -> "RecordedDurations":
        """Read the durations of a trace.

        Raises:
            TraceError: the file cannot be used, or has no durations.
        """
        by_tool: dict[str, list[float]] = {}
        for _, program in recorded_programs(path):
            for turn in program.turns:
                if turn.tool_class is not None and turn.tool_duration_s is not None:
                    by_tool.setdefault(turn.tool_class, []).append(turn.tool_duration_s)
        if not by_tool:
            raise TraceError(f"{path}: no tool durations in it")
        return cls(path.name, by_tool, [seconds for known in by_tool.values() for seconds in known])

    def draw(self, tool: str, place: str) -> float:
        """Return seconds of a call of ``tool``, always the same for a ``place``: the turn of a program."""
        known = self.by_tool.get(tool)
        self.same_tool += known is not None
        self.other_tool += known is None
        return float(np.random.default_rng(crc32(place.encode())).choice(known or self.all_tools))

    @property
    def note(self) -> str:
        """What was drawn, for readers of the results."""
        drawn = self.same_tool + self.other_tool
        of = f"{self.same_tool} of the same tool, {self.other_tool} of all tools"
        return f"{drawn} tool durations are modelled, drawn from those in {self.name}: {of}"


def programs_from_trace(
    path: Path, missing_tool_s: float | None = None, only_recorded: bool = False, tools_from: Path | None = None
) -> Workload:
    """Read all programs of ``path`` (.jsonl or .jsonl.gz), in the file's order. Children are part of their parent.

    After a turn without a tool, the next turn follows at once. The tool of a program's last turn is not replayed, nor
    is a duration of a pause in which children run: it lasts until they have ended.

    Args:
        path: the trace file.
        missing_tool_s: duration of tools whose duration was not recorded; None rejects such a program.
        only_recorded: omits the programs with a duration that was not recorded, with their children.
        tools_from: a trace of whose durations those that were not recorded are drawn.

    Raises:
        TraceError: the file is unreadable or empty, or a line cannot be used; the message names the file, the line and
            the key.
    """
    programs: list[PlannedProgram] = []
    empty_outputs = left_out = orphans = 0
    durations = None if tools_from is None else RecordedDurations.of(tools_from)
    for tree in trees_of(recorded_programs(path)):
        family = list(tree.family())
        if only_recorded and any(_first_missing(each) is not None for each in family):
            left_out += len(family)
            continue
        for each in family:
            if durations is None:
                _check_durations(each, missing_tool_s)
            check_lengths(each.program, each.where)
            empty_outputs += sum(turn.output_tokens < MIN_OUTPUT_TOKENS for turn in each.program.turns)
        orphans += tree.program.parent_program_id is not None
        programs.append(_planned(tree, missing_tool_s, durations))
    if not programs:
        raise TraceError(f"{path}: no programs in it" + (f", {left_out} left out" if left_out else ""))
    notes = prefix_notes(programs)
    if left_out:
        notes += (f"{left_out} programs with a tool duration that was not recorded are left out",)
    if orphans:
        notes += (f"{orphans} programs name a parent without parent_turn: they are replayed as programs of their own",)
    if durations is not None:
        notes += (durations.note,)
    if empty_outputs:
        notes += (f"{empty_outputs} turns were recorded without output: they generate {MIN_OUTPUT_TOKENS} token",)
    return Workload(name=path.name.removesuffix(".gz").removesuffix(".jsonl"), programs=tuple(programs), notes=notes)


def _first_missing(tree: RecordedTree) -> int | None:
    """Return the first turn whose tool is replayed and has no duration; None if there is none."""
    turns = ((i, turn) for i, turn in enumerate(tree.program.turns[:-1]) if i not in tree.children)
    return next((i for i, turn in turns if turn.tool is not None and turn.tool_duration_s is None), None)


def _check_durations(tree: RecordedTree, missing_tool_s: float | None) -> None:
    missing = _first_missing(tree)
    if missing is not None and missing_tool_s is None:
        raise TraceError(
            f"{tree.where}: turns.{missing}.tool_duration_s: not recorded (null); choose what it shall be with "
            "--missing-tool-s SECONDS, draw it from another trace with --missing-tools-from TRACE, or leave such "
            "programs out with --only-recorded"
        )


def _planned(tree: RecordedTree, missing_tool_s: float | None, durations: RecordedDurations | None) -> PlannedProgram:
    program = tree.program
    planned: list[PlannedTurn] = []
    kept_context = 0
    for index, turn in enumerate(program.turns):
        last = index == len(program.turns) - 1
        starts = index == 0 or turn.reset is not None
        pause_s = turn.tool_duration_s
        children = tree.children.get(index, ())
        if pause_s is None and turn.tool_class is not None and not last and not children:
            if durations is not None:
                pause_s = durations.draw(turn.tool_class, f"{program.program_id}/{index}")
            else:
                pause_s = missing_tool_s
        planned.append(
            PlannedTurn(
                fresh_tokens=turn.context_tokens - (0 if starts else kept_context),
                output_tokens=max(MIN_OUTPUT_TOKENS, turn.output_tokens),
                kept_tokens=turn.kept,
                tool=None if last else turn.tool_class,
                pause_s=0.0 if last or pause_s is None else pause_s,
                reset=index > 0 and turn.reset is not None,
                children=tuple(_planned(child, missing_tool_s, durations) for child in children),
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
        last_call=_last_call(program.turns[-1]),
    )


def _last_call(turn: RecordedTurn) -> LastCall | None:
    if turn.tool_class is None or turn.tool_duration_s is None:
        return None
    return LastCall(turn.tool_class, turn.tool_duration_s, turn.tool_return_tokens or 0)
