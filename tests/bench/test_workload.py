"""Traces, the built-in workload, shaping, arrivals and token ids."""

import gzip
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.core.errors import ConfigError, TraceError
from cluster.offline.bench.arrivals import Arrivals
from cluster.offline.bench.infercept import TABLE_1, builtin_workload
from cluster.offline.bench.trace import programs_from_trace
from cluster.offline.bench.workload import Conversation, PlannedProgram, PlannedTurn, Shaping, Workload, draw

STANDARD_ERRORS = 4.0


def recorded_turn(**changes):
    turn = {
        "new_prompt_tokens": 0,
        "context_tokens": 100,
        "output_tokens": 10,
        "tool": "bash",
        "tool_duration_s": 1.5,
        "tool_return_tokens": 5,
    }
    return turn | changes


def recorded(*turns, **changes):
    first = recorded_turn(new_prompt_tokens=100)
    last = recorded_turn(context_tokens=115, tool=None, tool_duration_s=None, tool_return_tokens=None)
    return {"program_id": "a", "category": "swe", "turns": list(turns) or [first, last]} | changes


def written(path, *programs):
    text = "".join((p if isinstance(p, str) else json.dumps(p)) + "\n" for p in programs)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_is_read_as_it_was_recorded(tmp_path: Path, name) -> None:
    workload = programs_from_trace(written(tmp_path / name, recorded()))
    assert workload.name == "t"
    (program,) = workload.programs
    assert (program.program_id, program.kind) == ("a", "swe")
    assert program.contexts() == [100, 115]
    assert program.turns == (
        PlannedTurn(fresh_tokens=100, output_tokens=10, kept_tokens=10, tool="bash", pause_s=1.5),
        PlannedTurn(fresh_tokens=5, output_tokens=10, kept_tokens=10),
    )


def test_reset_and_hidden_reasoning(tmp_path: Path) -> None:
    turns = (
        recorded_turn(new_prompt_tokens=100, kept_output_tokens=4),
        recorded_turn(context_tokens=109),
        recorded_turn(context_tokens=60, reset=2, tool=None),
        recorded_turn(context_tokens=75),
    )
    prefix = {"group": "g", "tokens": 40}
    (program,) = programs_from_trace(written(tmp_path / "t.jsonl", recorded(*turns, shared_prefix=prefix))).programs
    assert program.contexts() == [100, 109, 60, 75]
    assert [turn.reset for turn in program.turns] == [False, False, True, False]
    assert [turn.tool for turn in program.turns] == ["bash", "bash", None, None]
    assert program.turns[-1].pause_s == 0.0, "what follows a trace's last turn is not replayed"
    assert (program.prefix_group, program.prefix_tokens) == ("g", 40)


def test_a_tool_is_named_with_the_command_that_it_ran(tmp_path: Path) -> None:
    ran = recorded(recorded_turn(tool="bash", tool_cmd="grep"), recorded_turn(context_tokens=115))
    program = programs_from_trace(written(tmp_path / "t.jsonl", ran)).programs[0]
    assert program.turns[0].tool == "bash:grep"


def test_a_null_duration_needs_a_decision(tmp_path: Path) -> None:
    null = recorded(recorded_turn(tool_duration_s=None), recorded_turn(context_tokens=115))
    path = written(tmp_path / "t.jsonl", recorded(program_id="fine"), null)
    with pytest.raises(TraceError, match=r"t\.jsonl:2: turns\.0\.tool_duration_s: .*--missing-tool-s"):
        programs_from_trace(path)
    assert programs_from_trace(path, missing_tool_s=0.7).programs[1].turns[0].pause_s == 0.7
    rest = programs_from_trace(path, only_recorded=True)
    assert [program.program_id for program in rest.programs] == ["fine"]
    assert "1 programs with a tool duration that was not recorded are left out" in rest.notes
    with pytest.raises(TraceError, match="no programs in it, 1 left out"):
        programs_from_trace(written(tmp_path / "nulls.jsonl", null), only_recorded=True)


def test_missing_durations_are_drawn_from_those_of_the_same_tool_in_another_trace(tmp_path: Path) -> None:
    known = [recorded_turn(tool="ls", tool_duration_s=seconds) for seconds in (0.25, 0.5)]
    other = [recorded_turn(tool="cat", tool_duration_s=4.0), recorded_turn(tool=None, tool_duration_s=None)]
    source = written(tmp_path / "source.jsonl", recorded(*known, *other))
    lacking = [recorded_turn(tool=tool, tool_duration_s=None) for tool in ("ls", "make")]
    lacking[1]["context_tokens"] = 115
    last = recorded_turn(context_tokens=130)
    path = written(tmp_path / "t.jsonl", *(recorded(*lacking, last, program_id=f"p{n}") for n in range(20)))
    drawn = programs_from_trace(path, tools_from=source)
    assert drawn == programs_from_trace(path, tools_from=source)
    assert {program.turns[0].pause_s for program in drawn.programs} == {0.25, 0.5}
    assert {program.turns[1].pause_s for program in drawn.programs} > {4.0}
    assert {program.turns[2].pause_s for program in drawn.programs} == {0.0}
    note = "40 tool durations are modelled, drawn from those in source.jsonl: 20 of the same tool, 20 of all tools"
    assert note in drawn.notes
    silent = written(tmp_path / "silent.jsonl", recorded(recorded_turn(tool_duration_s=None)))
    with pytest.raises(TraceError, match=r"silent\.jsonl: no tool durations in it"):
        programs_from_trace(path, tools_from=silent)


def test_a_turn_without_a_tool_is_followed_at_once(tmp_path: Path) -> None:
    silent = recorded_turn(tool=None, tool_duration_s=None, tool_return_tokens=None)
    path = written(tmp_path / "t.jsonl", recorded(silent, recorded_turn(context_tokens=110)))
    assert programs_from_trace(path, missing_tool_s=9.0).programs[0].turns[0].pause_s == 0.0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "the line: Invalid JSON"),
        ("[]", "the line: Input should be an object"),
        (recorded(program_id=""), "program_id: String should have at least 1"),
        (recorded(program_id=7), "program_id: Input should be a valid string"),
        (recorded(turns=[]), "turns: Tuple should have at least 1 item"),
        ({"program_id": "x"}, "turns: Field required"),
        (
            recorded(recorded_turn(output_tokens=-1)),
            "turns.0.output_tokens: Input should be greater than or equal to 0",
        ),
        (recorded(recorded_turn(output_tokens=True)), "turns.0.output_tokens: Input should be a valid integer"),
        (recorded(recorded_turn(output_tokens=1.5)), "turns.0.output_tokens: Input should be a valid integer"),
        (recorded(recorded_turn(context_tokens=0)), "turns.0.context_tokens: Input should be greater than"),
        (recorded(recorded_turn(context_tokens=10**12)), "turns.0.context_tokens: Input should be less than"),
        (recorded(recorded_turn(tool_duration_s=-1)), "turns.0.tool_duration_s: Input should be greater than"),
        (recorded(recorded_turn(tool_duration_s="1")), "turns.0.tool_duration_s: Input should be a valid number"),
        (recorded(recorded_turn(reset=3)), "turns.0.reset: Input should be 1 or 2"),
        (recorded(recorded_turn(kept_output_tokens=11)), "turns.0.kept_output_tokens: 11 of 10"),
        (recorded(recorded_turn(), recorded_turn(context_tokens=116)), "turns.1.context_tokens: 116, .* make 115"),
        (recorded(shared_prefix={"group": 1, "tokens": None}), "shared_prefix.group: Input should be a valid string"),
        (recorded(program_id="first"), "program_id: 'first' is on line 1 too"),
        ('{"program_id": "\\ud800", "turns": []}', "the line: Invalid JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line, complaint) -> None:
    path = written(tmp_path / "t.jsonl", recorded(program_id="first"), "", line)
    with pytest.raises(TraceError, match=rf"t\.jsonl:3: {complaint}"):
        programs_from_trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl:1: cannot be read"):
        programs_from_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="no programs"):
        programs_from_trace(written(tmp_path / "empty.jsonl"))
    whole = gzip.compress(json.dumps(recorded()).encode())
    for name, content in {"plain.gz": b"{}", "cut.gz": whole[:-9], "wrong.gz": whole[:12] + b"\xff" * 20}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match="cannot be read"):
            programs_from_trace(tmp_path / name)


def as_published(source: str, category: str, *turns: dict[str, Any]) -> dict[str, Any]:
    """A line with all keys that the published recordings have, most of which are not ours."""
    told = {"source": source, "agent": "an agent", "model": "a model", "arrival_s": None, "has_text": False}
    told |= {"token_source": "provider_usage", "duration_kind": "gap_1s_quantised", "shared_prefix": None}
    return told | recorded(*turns, program_id=f"{source}/{category}", category=category, split_group=f"{source}:1")


def test_files_with_everything_that_recordings_have_are_read_whole(tmp_path: Path) -> None:
    merge = (as_published("merge", row.kind) for row in TABLE_1)
    programs = programs_from_trace(zipped(tmp_path / "merge.jsonl.gz", *merge)).programs
    assert {program.kind for program in programs} == {row.kind for row in TABLE_1}
    session = as_published(
        "sessions",
        "claude_code_session",
        recorded_turn(new_prompt_tokens=100, llm_s=5.2, tool_duration_s=None),
        recorded_turn(context_tokens=115, output_tokens=0, prefix_tokens=90, kept_output_tokens=0),
        recorded_turn(context_tokens=60, reset=1, tool=None, tool_duration_s=None, tool_return_tokens=None),
    )
    prefix = {"group": "claude-code-tools-system", "tokens": 80}
    child = {"parent_program_id": session["program_id"], "spawn_offset_s": 1.5}
    subagent = as_published("sessions", "claude_code_subagent") | child
    path = zipped(tmp_path / "sessions.jsonl.gz", session | {"shared_prefix": prefix}, subagent)
    sessions = programs_from_trace(path, missing_tool_s=1.0)
    assert [[turn.reset for turn in program.turns] for program in sessions.programs] == [
        [False, False, True],
        [False, False],
    ]
    assert sessions.programs[0].turns[0].pause_s == 1.0
    assert "1 turns were recorded without output" in " ".join(sessions.notes)


def zipped(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def samples(row):
    programs = [program for program in builtin_workload(0, 2000).programs if program.kind == row.kind]
    pauses = [turn.pause_s for program in programs for turn in program.turns[:-1]]
    calls = [len(program.turns) - 1 for program in programs]
    contexts = [
        statistics.fmean(
            context + turn.output_tokens
            for context, turn in zip(program.contexts()[:-1], program.turns[:-1], strict=True)
        )
        for program in programs
    ]
    return {"pause_s": pauses, "calls": calls, "context_tokens": contexts}


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: row.kind)
@pytest.mark.parametrize("figure", ["pause_s", "calls", "context_tokens"])
def test_the_builtin_workload_has_the_figures_of_table_1(row, figure) -> None:
    found = samples(row)[figure]
    mean, sd = getattr(row, figure)
    assert statistics.fmean(found) == pytest.approx(mean, abs=STANDARD_ERRORS * sd / len(found) ** 0.5)
    assert statistics.stdev(found) == pytest.approx(sd, rel=0.15)


def test_the_builtin_workload_is_deterministic_and_even() -> None:
    workload = builtin_workload(3, 60)
    assert workload == builtin_workload(3, 60)
    assert workload != builtin_workload(4, 60)
    kinds = [program.kind for program in workload.programs]
    assert all(kinds.count(row.kind) == 10 for row in TABLE_1)
    assert all(program.turns[-1].tool is None and program.turns[-1].pause_s == 0 for program in workload.programs)


LONG = PlannedProgram(
    "long", "k", (PlannedTurn(100, 10, 10, "a", 2.0), PlannedTurn(20, 30, 10, "b", 4.0), PlannedTurn(5, 1, 1)), "g", 40
)


def test_shaping_cuts_scales_and_drops() -> None:
    pool = Workload("w", (LONG, replace(LONG, program_id="longer", turns=(PlannedTurn(400, 10, 10),))))
    shaped = pool.shaped(Shaping(scale_lengths=0.5, scale_tools=0.1, max_context=100, max_turns=2), seed=0)
    assert shaped.dropped == 1
    (program,) = shaped.programs
    assert program.turns == (
        PlannedTurn(50, 5, 5, "a", pytest.approx(0.2)),
        PlannedTurn(10, 15, 5),
    )
    assert program.prefix_tokens == 20
    assert LONG.peak_tokens == 160 == 100 + 10 + 20 + 30
    assert len(pool.shaped(Shaping(max_context=160), 0).programs) == 1
    assert len(pool.shaped(Shaping(max_context=159), 0).programs) == 0


def test_programs_are_selected_by_category_and_number_of_calls() -> None:
    pool = Workload("w", tuple(replace(LONG, kind=kind, turns=LONG.turns[:turns]) for kind, turns in KINDS))

    def kept(**shaping: Any) -> set[tuple[str, int]]:
        programs = pool.shaped(Shaping(**shaping), 0).programs
        return {(program.kind, len(program.turns)) for program in programs}

    assert kept(categories=("qa",)) == {("qa", 1), ("qa", 3)}
    assert kept(calls=(1, 1)) == {("chat", 2)}
    assert kept(calls=(0, 1)) == {("qa", 1), ("chat", 2)}
    assert kept(categories=("chat",), calls=(2, 2)) == set()
    assert pool.shaped(Shaping(calls=(5, 5)), 0).dropped == 0


KINDS = (("qa", 1), ("chat", 2), ("qa", 3))


def test_repeated_turns_are_as_many_times_shorter() -> None:
    [program] = Workload("w", (LONG,)).shaped(Shaping(repeat_turns=2), 0).programs
    assert [turn.fresh_tokens for turn in program.turns] == [50, 10, 2, 50, 10, 2]
    assert [turn.output_tokens for turn in program.turns] == [5, 15, 1, 5, 15, 1]
    assert [turn.pause_s for turn in program.turns] == [2.0, 4.0, 0.0, 2.0, 4.0, 0.0]
    assert program.peak_tokens == pytest.approx(LONG.peak_tokens, abs=10)
    assert Workload("w", (LONG,)).shaped(Shaping(repeat_turns=2, max_turns=4), 0).programs[0].turns[-1].pause_s == 0.0


def test_a_program_can_wait_for_the_call_of_its_last_turn(tmp_path: Path) -> None:
    """As the benchmark of InferCept's authors does: what the tool returned is read, and a token is generated."""
    whole = written(tmp_path / "t.jsonl", recorded(), recorded(recorded_turn(new_prompt_tokens=100), program_id="b"))
    pool = programs_from_trace(whole)
    assert [len(program.turns) for program in pool.shaped(Shaping(), 0).programs] in ([1, 2], [2, 1])
    shaped = {program.program_id: program for program in pool.shaped(Shaping(last_calls=True), 0).programs}
    assert len(shaped["a"].turns) == 2
    assert shaped["b"].turns == (PlannedTurn(100, 10, 10, "bash", 1.5), PlannedTurn(5, 1, 1))
    assert shaped["b"].contexts() == [100, 115]
    assert pool.shaped(Shaping(last_calls=True, max_turns=1), 0).programs[0].turns[-1].tool is None


def test_a_share_of_the_programs_has_no_calls() -> None:
    pool = Workload("w", tuple(replace(LONG, program_id=f"{number}") for number in range(10)))

    def silent(share: float, seed: int = 0) -> dict[str, tuple[PlannedTurn, ...]]:
        shaped = pool.shaped(Shaping(no_calls_share=share), seed)
        assert len(shaped.programs) == 10
        return {program.program_id: program.turns for program in shaped.programs if len(program.turns) == 1}

    assert (len(silent(0.0)), len(silent(0.3)), len(silent(1.0))) == (0, 3, 10)
    assert silent(0.3) == silent(0.3) != silent(0.3, seed=1)
    assert set(silent(0.3).values()) == {(PlannedTurn(100, 41, 41),)}


def test_limit_draws_by_seed() -> None:
    pool = builtin_workload(0, 60)
    some = pool.shaped(Shaping(limit=10), seed=1).programs
    assert some == pool.shaped(Shaping(limit=10), seed=1).programs
    assert some != pool.shaped(Shaping(limit=10), seed=2).programs
    assert len(set(some)) == 10


def test_drawing_uses_every_program_before_it_repeats() -> None:
    pool = builtin_workload(0, 6).programs
    drawn = draw(pool, 15, np.random.default_rng(0))
    assert set(drawn[:6]) == set(drawn[6:12]) == set(pool)
    assert len(drawn) == 15


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:2", 2.0)])
def test_arrivals_have_their_rate_and_burstiness(text, cv) -> None:
    times = Arrivals.parse(text, 4.0).times_s(np.random.default_rng(0), count=20_000)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(0.25, rel=STANDARD_ERRORS * cv / 20_000**0.5)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05)


def test_arrivals_of_a_duration() -> None:
    process = Arrivals.parse("poisson", 5.0)
    times = process.times_s(np.random.default_rng(7), duration_s=400.0)
    assert len(times) == pytest.approx(2000, abs=STANDARD_ERRORS * 2000**0.5)
    assert times == sorted(times)
    assert times[0] > 0 and times[-1] < 400.0
    assert times == process.times_s(np.random.default_rng(7), duration_s=400.0)


@pytest.mark.parametrize(
    "text", ["", "uniform", "gamma", "gamma:", "gamma:x", "gamma:0", "gamma:-1", "gamma:nan", "poisson:2"]
)
def test_unknown_arrivals_name_the_flag(text) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        Arrivals.parse(text, 1.0)


def test_prompts_extend_what_was_sent_and_generated() -> None:
    talk = Conversation(LONG, seed=(0, 0, 0))
    first, known = talk.prompt(LONG.turns[0])
    assert (len(first), known) == (100, 0)
    talk.answered(list(range(1000, 1010)), kept_tokens=10)
    second, known = talk.prompt(LONG.turns[1])
    assert second[:110] == first + list(range(1000, 1010))
    assert (len(second), known) == (130, 110)
    # 20 of 30 generated tokens were reasoning: what comes before them is all that can be reused.
    talk.answered(list(range(2000, 2030)), kept_tokens=10)
    third, known = talk.prompt(LONG.turns[2])
    assert third[:140] == second + list(range(2020, 2030))
    assert (len(third), known) == (145, 130)


def test_a_reset_keeps_the_shared_prefix_only() -> None:
    talk = Conversation(LONG, seed=(0, 0, 0))
    first, _ = talk.prompt(LONG.turns[0])
    talk.answered([7] * 10, kept_tokens=10)
    again, known = talk.prompt(PlannedTurn(60, 1, 1, reset=True))
    assert (len(again), known) == (60, 40)
    assert again[:40] == first[:40]
    assert again[40:] != first[40:60]


def test_only_programs_of_a_group_share_their_beginning() -> None:
    def first(group, seed):
        return Conversation(replace(LONG, prefix_group=group), seed).prompt(LONG.turns[0])[0]

    assert first("g", (0, 0, 1))[:40] == first("g", (0, 1, 2))[:40]
    assert first("g", (0, 0, 1))[40:] != first("g", (0, 0, 2))[40:]
    assert first("g", (0, 0, 1))[:40] != first("h", (0, 0, 1))[:40]
    assert first("g", (0, 0, 1)) == first("g", (0, 0, 1))
