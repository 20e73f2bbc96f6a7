"""A trace of ours that goes to another format and comes back has all that this format carries."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from cluster.core.recorded_turn import RecordedProgram, RecordedTurn
from cluster.core.registry import TRACE_FORMATS
from cluster.offline.traces.calls import UNNAMED_TOOL
from cluster.offline.traces.format import BLOCK_TOKENS
from tests.traces.programs import contexts, programs, there_and_back

EXAMPLES = settings(max_examples=150, deadline=None)


def stretches(program: RecordedProgram) -> list[list[RecordedTurn]]:
    """The turns of a program, divided where the context starts anew."""
    parts: list[list[RecordedTurn]] = []
    for turn in program.turns:
        if not parts or turn.reset is not None:
            parts.append([])
        parts[-1].append(turn)
    return parts


def pauses(turns: Sequence[RecordedTurn]) -> list[float]:
    return [turn.tool_duration_s or 0.0 for turn in turns[:-1]]


def check_pauses(turns: Sequence[RecordedTurn], expected: Sequence[float]) -> None:
    assert pauses(turns) == pytest.approx(expected)
    for turn in turns[:-1]:
        assert turn.tool == (UNNAMED_TOOL if turn.tool_duration_s else None)


@EXAMPLES
@given(programs())
@pytest.mark.parametrize("name", ["caesura", "otel"])
def test_everything_comes_back(name: str, trace: list[RecordedProgram]) -> None:
    back, losses = there_and_back(trace, name)
    assert {program.program_id: program for program in back} == {program.program_id: program for program in trace}
    assert len(back) == len(trace)
    assert not any("tool" in loss or "arrival" in loss for loss in losses)


@EXAMPLES
@given(programs())
def test_aiperf_keeps_sessions_tokens_pauses_and_arrivals(trace: list[RecordedProgram]) -> None:
    back, _ = there_and_back(trace, "aiperf")
    sent = [(program, part) for program in trace for part in stretches(program)]
    assert len(back) == len(sent)
    for came, (program, part) in zip(back, sent, strict=True):
        expected = [part[0].context_tokens]
        for before, turn in pairwise(part):
            new = turn.context_tokens - before.context_tokens - before.kept
            expected.append(expected[-1] + max(1, before.output_tokens) + max(1, new))
        assert contexts([came]) == [expected]
        assert [turn.output_tokens for turn in came.turns] == [max(1, turn.output_tokens) for turn in part]
        check_pauses(came.turns, pauses(part))
        first = part[0] is program.turns[0]
        assert came.program_id == (
            program.program_id if first else f"{program.program_id}#{program.turns.index(part[0])}"
        )
        assert came.arrival_s == (pytest.approx(program.arrival_s) if first and program.arrival_s is not None else None)


@EXAMPLES
@given(programs(least_context=BLOCK_TOKENS, prefixes=False))
def test_mooncake_keeps_requests_their_times_and_which_continues_which(trace: list[RecordedProgram]) -> None:
    back, losses = there_and_back(trace, "mooncake")
    sent: list[tuple[float, list[RecordedTurn]]] = []
    for number, program in enumerate(trace):
        now_s = number * 1.0 if program.arrival_s is None else program.arrival_s
        for part in stretches(program):
            sent.append((now_s, part))
            now_s += sum(turn.tool_duration_s or 0.0 for turn in part)
    sent.sort(key=lambda one: one[0])
    assert len(back) == len(sent)
    for came, (start_s, part) in zip(back, sent, strict=True):
        assert came.arrival_s == pytest.approx(start_s)
        assert contexts([came]) == contexts_of(part)
        assert [turn.output_tokens for turn in came.turns] == [turn.output_tokens for turn in part]
        check_pauses(came.turns, pauses(part))
        assert came.shared_prefix is None
    assert not any("link" in loss for loss in losses)


def contexts_of(part: Sequence[RecordedTurn]) -> list[list[int]]:
    return [[turn.context_tokens for turn in part]]


@EXAMPLES
@given(programs())
@pytest.mark.parametrize("name", list(TRACE_FORMATS))
def test_no_request_is_lost_or_added(name: str, trace: list[RecordedProgram]) -> None:
    """Also where links are lost: prompts without a block of their own, prefixes, contexts that start anew."""
    back, _ = there_and_back(trace, name)
    outputs = [sorted(turn.output_tokens for program in one for turn in program.turns) for one in (trace, back)]
    least = 1 if name == "aiperf" else 0
    assert outputs[1] == sorted(max(least, tokens) for tokens in outputs[0])


def two(group: str, prefix: int, *prompts: int) -> list[RecordedProgram]:
    turn: dict[str, Any] = {"output_tokens": 5, "tool": None, "tool_duration_s": None, "tool_return_tokens": None}
    return [
        RecordedProgram.model_validate(
            {
                "program_id": f"p{number}",
                "shared_prefix": {"group": group, "tokens": prefix},
                "turns": ({**turn, "new_prompt_tokens": prompt, "context_tokens": prompt},),
            },
            strict=False,
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("name", ["mooncake", "aiperf"])
@pytest.mark.parametrize(
    ("prefix", "prompts", "shared"),
    [(1024, (2000, 3000), 1024), (1100, (2000, 3000), 1024), (500, (2000, 3000), None), (2048, (2600, 2100), 2048)],
)
def test_a_shared_prefix_comes_back_in_whole_blocks(
    name: str, prefix: int, prompts: tuple[int, ...], shared: int | None
) -> None:
    back, losses = there_and_back(two("g", prefix, *prompts), name)
    groups = [program.shared_prefix for program in back]
    assert [group and group.tokens for group in groups] == [shared, shared]
    assert len({group and group.group for group in groups}) == 1
    expected = len(prompts) if prefix % BLOCK_TOKENS else None
    assert losses.get("tokens of a shared prefix that fill no block (programs)") == expected


@pytest.mark.parametrize("name", ["mooncake", "aiperf"])
def test_one_short_prompt_does_not_shorten_the_prefix_of_the_others(name: str) -> None:
    back, _ = there_and_back(two("g", 2048, 3000, 2600, 2100, 700), name)
    tokens = {
        of_one[0]: p.shared_prefix and p.shared_prefix.tokens for of_one, p in zip(contexts(back), back, strict=True)
    }
    assert [tokens[prompt] for prompt in (3000, 2600, 2100)] == [2048, 2048, 2048]
    assert tokens[700] is None


def test_a_prompt_of_shared_blocks_only_is_counted_as_uncertain() -> None:
    """In Mooncake's format it cannot be told from the turn before a longer prompt."""
    back, losses = there_and_back(two("g", 2048, 1500, 3000), "mooncake")
    assert contexts(back) == [[1500, 3000]]
    assert losses["certain link between turns, because the prompt fills no block of its own (turns)"] == 1
    apart, losses = there_and_back(two("g", 2048, 1500, 3000), "aiperf")
    assert contexts(apart) == [[1500], [3000]]
    assert not any("link" in loss for loss in losses)
