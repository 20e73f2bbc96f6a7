from pathlib import Path

import pytest

from cluster.core.errors import TraceError
from predictor_service.examples import arguments_of, read_programs
from predictor_service.model import HISTORY, MAX_ARGUMENTS, MAX_TEXT, NO_TOOL, PauseOutcome, TurnContext, TurnOutcome
from tests.predictor.traces import DATA, needs_data, row, write

THREE = [(100, 20, "bash:ls", 0.5, 30), (5, 10, None, None, 0), (40, 7, "done", None, 0)]


def test_a_turn_is_told_what_was_before_it_and_nothing_of_itself(tmp_path: Path) -> None:
    texts = [{"program_id": "a", "turn": 1, "prompt_text": "files", "output_text": "[tool_call bash] {}"}]
    trace = write(tmp_path / "t.jsonl", [row("a", THREE)])
    [program] = read_programs([trace], [write(tmp_path / "x.jsonl", texts)])
    assert [turn.context for turn in program.turns] == [
        TurnContext("made", 0, 100, 100),
        TurnContext("made", 1, 155, 35, (20,), ("bash:ls",), (0.5,), (35,), "files"),
        TurnContext("made", 2, 205, 40, (10, 20), (NO_TOOL, "bash:ls"), (None, 0.5), (40, 35)),
    ]
    assert [turn.outcome for turn in program.turns] == [
        TurnOutcome(20, "bash:ls"),
        TurnOutcome(10, NO_TOOL, "{}"),
        TurnOutcome(7, "done", last=True),
    ]
    # 35 + 10 and 40 + 7 tokens are still to be computed after the first turn.
    assert [turn.remaining for turn in program.turns] == [(92, 2), (47, 1), (0, 0)]
    assert program.split_group == "group of a"


def test_only_a_call_that_is_waited_for_makes_a_pause(tmp_path: Path) -> None:
    [program] = read_programs([write(tmp_path / "t.jsonl", [row("a", THREE)])])
    first, without_tool, last = program.turns
    assert first.pause is not None
    assert (first.pause.tool, first.pause.output_tokens) == ("bash:ls", 20)
    assert first.pause_outcome == PauseOutcome(0.5, 35)
    assert (without_tool.pause, last.pause) == (None, None)


def test_what_was_not_recorded_is_none(tmp_path: Path) -> None:
    recorded = row("a", [(9, 2, "t", None, 4), (0, 2, "t", None, 3), (0, 1, None, None, 0)])
    recorded["turns"][1]["tool_return_tokens"] = None
    recorded["turns"][2] |= {"reset": 2, "context_tokens": 8, "new_prompt_tokens": 8}
    [program] = read_programs([write(tmp_path / "t.jsonl", [recorded])])
    assert [turn.pause_outcome for turn in program.turns] == [PauseOutcome(None, 4), None, None]
    assert program.turns[2].context.new_tokens == 8


def test_an_output_that_is_not_kept_as_a_whole_is_computed_again(tmp_path: Path) -> None:
    recorded = row("a", [(10, 6, "t", 1.0, 0), (3, 1, None, None, 0)])
    recorded["turns"][0]["kept_output_tokens"] = 4
    recorded["turns"][1]["context_tokens"] = 17
    [program] = read_programs([write(tmp_path / "t.jsonl", [recorded])])
    assert program.turns[1].context.new_tokens == 3
    assert program.turns[0].remaining == (3 + 4 + 1, 1)


def test_histories_and_texts_are_bounded_and_the_nearest_is_kept(tmp_path: Path) -> None:
    turns = [(1, index, "t", 0.0, 0) for index in range(1, HISTORY + 4)]
    texts = [
        {
            "program_id": "a",
            "turn": 1,
            "prompt_text": "x" * MAX_TEXT + "end",
            "output_text": "[tool_call t] " + "y" * 9999,
        }
    ]
    trace = write(tmp_path / "t.jsonl", [row("a", turns)])
    [program] = read_programs([trace], [write(tmp_path / "x.jsonl", texts)])
    last = program.turns[-1].context
    assert last.outputs == tuple(range(HISTORY + 2, 2, -1))
    text = program.turns[1].context.text
    assert (len(text), text[-3:]) == (MAX_TEXT, "end")
    assert program.turns[1].outcome.arguments == "y" * MAX_ARGUMENTS


@pytest.mark.parametrize(
    ("output", "arguments"),
    [
        ('I look.\n[tool_call bash] {"command": "ls"}', '{"command": "ls"}'),
        ("Say\n```python\na\n```\nthen\n```bash\ngrep b\n```", "grep b\n"),
        ("```bash\ncut off", "cut off"),
        ("no call", ""),
        ("", ""),
    ],
)
def test_arguments_are_those_of_the_call(output: str, arguments: str) -> None:
    assert arguments_of(output) == arguments


def test_a_trace_without_groups_and_sources_has_each_program_alone(tmp_path: Path) -> None:
    recorded = row("a", THREE)
    del recorded["split_group"], recorded["source"]
    [program] = read_programs([write(tmp_path / "mine.jsonl", [recorded])])
    assert (program.source, program.split_group) == ("mine", "a")


def test_a_program_that_was_ended_early_is_no_example(tmp_path: Path) -> None:
    rows = [row("a", THREE), row("b", THREE, incomplete=1)]
    texts = [{"program_id": "a", "turn": 0, "prompt_text": "x", "output_text": ""}]
    [program] = read_programs([write(tmp_path / "t.jsonl", rows)], [write(tmp_path / "x.jsonl", texts)])
    assert program.program_id == "a"
    with pytest.raises(TraceError, match="no complete programs"):
        read_programs([write(tmp_path / "t.jsonl", rows[1:])])


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", [row("a", THREE)])
    again = write(tmp_path / "again.jsonl", [row("a", THREE)])
    with pytest.raises(TraceError, match=r"again.jsonl:1: program_id: 'a' is in .*good.jsonl:1 too"):
        read_programs([good, again])
    wrong = row("b", THREE)
    wrong["turns"][1]["context_tokens"] += 1
    with pytest.raises(TraceError, match=r"wrong.jsonl:1: turns.1.context_tokens"):
        read_programs([write(tmp_path / "wrong.jsonl", [wrong])])
    other = {"program_id": "b", "turn": 0, "prompt_text": "", "output_text": ""}
    with pytest.raises(TraceError, match=r"other.jsonl:1: program_id: none of the traces' programs"):
        read_programs([good], [write(tmp_path / "other.jsonl", [other])])
    with pytest.raises(TraceError, match=r"bad.jsonl:1: turn: "):
        read_programs([good], [write(tmp_path / "bad.jsonl", [other | {"turn": -1}])])
    with pytest.raises(TraceError, match="no complete programs"):
        read_programs([write(tmp_path / "empty.jsonl", [])])


@needs_data
def test_the_recorded_traces_are_read() -> None:
    programs = read_programs(
        [DATA / "programs" / "tau_airline_gpt4o.jsonl.gz"], [DATA / "text" / "tau_airline_gpt4o.jsonl.gz"]
    )
    turns = [turn for program in programs for turn in program.turns]
    assert len(turns) == 997
    assert sum(bool(turn.context.text) for turn in turns) > 900
    assert any(turn.pause and turn.pause.arguments for turn in turns)
