"""What the cluster served, as traces that the readers of recorded ones take."""

import json
from pathlib import Path

import pytest

from cluster.core.errors import TraceError
from cluster.core.program import MAX_ID_LENGTH
from cluster.core.recorded_turn import recorded_programs
from cluster.offline.bench.trace import programs_from_trace
from cluster.runs.events import Call, Ended, LateAnswer, RunEvent, TakenOver, ToolAnswer, TurnResult
from cluster.runs.export import run_trace
from predictor_service.examples import read_programs
from tests.words.test_run import accepted, call, ok


def turn(number: int, prompt: int, output: int, *calls: Call, content: str = "") -> TurnResult:
    return TurnResult(
        number, True, "continued", b"", b"", "stop", prompt, 0, output, 0.0, 1.0, content=content, calls=calls
    )


def answer(place: tuple[int, int], seconds: float, text: str = "42") -> ToolAnswer:
    return ToolAnswer(*place, "ok", text, queue_s=0.5, run_s=seconds, attempts=1)


LOG: list[RunEvent] = [
    accepted(),
    turn(1, 100, 20, call(1, name="bash", arguments='{"command": "grep -n x ."}'), content="I look."),
    answer((1, 0), 2.0, "src/a.py:1:x"),
    TakenOver("another"),
    turn(2, 150, 30, call(2), call(2, 1)),
    answer((2, 0), 1.0),
    answer((2, 1), 4.0),
    turn(3, 200, 10, content="42."),
    Ended("completed"),
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace = run_trace(LOG, "ours")
    assert trace is not None
    programs, texts = tmp_path / "ours.jsonl", tmp_path / "text.jsonl"
    programs.write_text(json.dumps(trace.program) + "\n")
    texts.write_text("".join(json.dumps(text) + "\n" for text in trace.texts))
    return programs, texts


def test_a_log_is_what_the_predictor_learns_from(files: tuple[Path, Path]) -> None:
    [program] = read_programs([files[0]], [files[1]])
    assert (program.program_id, program.split_group, program.source) == ("t/p/resp_1", "t/p", "ours")
    assert [each.outcome.output_tokens for each in program.turns] == [20, 30, 10]
    assert [each.outcome.tool for each in program.turns] == ["bash:grep", "calc", ""]
    assert [each.pause_outcome and each.pause_outcome.duration_s for each in program.turns] == [2.5, 4.5, None]
    assert [each.context.new_tokens for each in program.turns] == [100, 30, 20]
    assert program.turns[1].context.text == "src/a.py:1:x"
    assert program.turns[0].context.text == "what is 6 x 7?"
    assert "grep -n x" in program.turns[0].outcome.arguments


@pytest.mark.parametrize("end", [Ended("incomplete", "max_turns"), Ended("failed"), Ended("cancelled"), None])
def test_a_run_that_was_ended_is_replayed_and_not_learnt_from(tmp_path: Path, end: Ended | None) -> None:
    trace = run_trace([*LOG[:-1], *(() if end is None else (end,))], "ours")
    assert trace is not None
    (tmp_path / "t.jsonl").write_text(json.dumps(trace.program) + "\n")
    [planned] = programs_from_trace(tmp_path / "t.jsonl").programs
    assert len(planned.turns) == 3
    with pytest.raises(TraceError, match="complete"):
        read_programs([tmp_path / "t.jsonl"])


def test_a_log_can_be_replayed(files: tuple[Path, Path]) -> None:
    [planned] = programs_from_trace(files[0]).programs
    assert [each.pause_s for each in planned.turns] == [2.5, 4.5, 0.0]


def test_a_long_first_word_is_cut_to_what_readers_accept(tmp_path: Path) -> None:
    long = call(1, name="bash", arguments=json.dumps({"command": "x" * 5000 + " -n"}))
    trace = run_trace([accepted(), turn(1, 100, 20, long), ok(1), turn(2, 150, 5), Ended("completed")], "ours")
    assert trace is not None
    (tmp_path / "t.jsonl").write_text(json.dumps(trace.program) + "\n")
    [(_, program)] = recorded_programs(tmp_path / "t.jsonl")
    assert program.turns[0].tool_cmd == "x" * MAX_ID_LENGTH


def test_a_prompt_that_shrank_starts_another_context(tmp_path: Path) -> None:
    trace = run_trace([accepted(), turn(1, 1000, 20, call(1)), ok(1), turn(2, 300, 5), Ended("completed")], "ours")
    assert trace is not None
    (tmp_path / "t.jsonl").write_text(json.dumps(trace.program) + "\n")
    [program] = read_programs([tmp_path / "t.jsonl"])
    assert program.turns[1].context.new_tokens == 300


def test_durations_that_nobody_saw_are_not_told() -> None:
    started = ToolAnswer(1, 0, "started", "")
    late = LateAnswer(answer((1, 0), 9.0))
    for events, seconds in (([], None), ([started], None), ([started, late], 9.5)):
        trace = run_trace([accepted(), turn(1, 100, 20, call(1)), *events, turn(2, 150, 5)], "ours")
        assert trace is not None
        assert trace.program["turns"][0]["tool_duration_s"] == seconds


@pytest.mark.parametrize(
    ("outcome", "attempts", "seconds"),
    [
        ("unknown", 0, None),  # lost in a take-over
        ("unknown", 1, None),
        ("timeout", 0, None),
        ("cancelled", 0, None),
        ("timeout", 1, 9.5),
        ("error", 2, 9.5),
        ("refused", 0, 9.5),
    ],
)
def test_only_durations_of_calls_that_ran_or_were_refused_are_told(
    outcome: str, attempts: int, seconds: float | None
) -> None:
    one = ToolAnswer(1, 0, outcome, "", queue_s=0.5, run_s=9.0, attempts=attempts)
    other = answer((1, 1), 1.0)
    trace = run_trace([accepted(), turn(1, 100, 20, call(1), call(1, 1)), one, other, turn(2, 150, 5)], "ours")
    assert trace is not None
    assert trace.program["turns"][0]["tool_duration_s"] == seconds


def test_a_run_that_generated_nothing_is_no_program() -> None:
    assert run_trace([accepted()], "ours") is None
    assert run_trace([], "ours") is None
