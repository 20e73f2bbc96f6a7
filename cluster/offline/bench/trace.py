"""Converts recorded programs (`cluster.core.recorded_turn`) into a workload for the bench and the simulator."""

from pathlib import Path

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram, check_lengths, recorded_programs
from cluster.offline.bench.workload import MIN_OUTPUT_TOKENS, PlannedProgram, PlannedTurn, Workload, prefix_notes


def programs_from_trace(path: Path, missing_tool_s: float | None = None, only_recorded: bool = False) -> Workload:
    """Read all programs of ``path`` (.jsonl or .jsonl.gz), in the file's order.

    After a turn without a tool, the next turn follows at once. The tool of a program's last turn is not replayed.

    Args:
        path: the trace file.
        missing_tool_s: duration of tools whose duration was not recorded; None rejects such a program.
        only_recorded: omits the programs with a duration that was not recorded.

    Raises:
        TraceError: the file is unreadable or empty, or a line cannot be used; the message names the file, the line and
            the key.
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


def _first_missing(program: RecordedProgram) -> int | None:
    """Return the first turn whose tool is replayed and has no duration; None if there is none."""
    turns = enumerate(program.turns[:-1])
    return next((i for i, turn in turns if turn.tool is not None and turn.tool_duration_s is None), None)


def _check_durations(program: RecordedProgram, where: str, missing_tool_s: float | None) -> None:
    missing = _first_missing(program)
    if missing is not None and missing_tool_s is None:
        raise TraceError(
            f"{where}: turns.{missing}.tool_duration_s: not recorded (null); choose what it shall be with "
            "--missing-tool-s SECONDS, or leave such programs out with --only-recorded"
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
