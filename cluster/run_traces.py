"""A run's log as a line of a trace: what the cluster served, in the form that `caesura bench`, `simulate` and
`predictor` read.

A run is a program of its own; runs of one program, and no others, share its `split_group`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.program import CLASS_MARK
from cluster.run_events import Accepted, Call, LateAnswer, RunEvent, RunSpec, ToolAnswer, TurnResult
from cluster.tool_naming import classed
from cluster.tools import Outcome

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunTrace:
    """A line of a trace, and the lines of its texts."""

    program: Row
    texts: tuple[Row, ...]


def run_trace(events: Iterable[RunEvent], source: str) -> RunTrace | None:
    """The trace of one run's log, as far as it got; None: it generated nothing."""
    spec: RunSpec | None = None
    turns: list[TurnResult] = []
    answers: dict[tuple[int, int], ToolAnswer] = {}
    for event in events:
        if isinstance(event, Accepted):
            spec = event.spec
        elif isinstance(event, TurnResult):
            turns.append(event)
        elif isinstance(event, ToolAnswer | LateAnswer):
            answer = event.answer if isinstance(event, LateAnswer) else event
            answers[answer.place] = answer
    if spec is None or not turns:
        return None
    name = f"{spec.tenant}/{spec.program}/{spec.id}"
    program = {
        "program_id": name,
        "source": source,
        "split_group": f"{spec.tenant}/{spec.program}",
        "model": spec.model,
        "token_source": "provider_usage",
        "duration_kind": "tool_wall",
        "turns": _turn_rows(turns, answers),
    }
    return RunTrace(program, tuple(_text_rows(name, spec, turns, answers)))


def _turn_rows(turns: Sequence[TurnResult], answers: Mapping[tuple[int, int], ToolAnswer]) -> list[Row]:
    rows: list[Row] = []
    returned: int | None = None
    for index, turn in enumerate(turns):
        following = turns[index + 1] if index + 1 < len(turns) else None
        called = classed(turn.calls[0].name, turn.calls[0].arguments) if turn.calls else ""
        tool, _, command = called.partition(CLASS_MARK)
        # Beyond the first turn all that is new was brought by what was called, or by a caller in its place.
        row: Row = {
            "new_prompt_tokens": 0 if rows and returned is not None else turn.prompt_tokens,
            "context_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "tool": tool or None,
            "tool_duration_s": _seconds(turn.calls, answers),
        }
        if rows and returned is None:
            row["reset"] = 1
        returned = None
        if following is not None:
            growth = following.prompt_tokens - turn.prompt_tokens - turn.output_tokens
            returned = growth if growth >= 0 else None
        row["tool_return_tokens"] = returned
        if command:
            row["tool_cmd"] = command
        if len(turn.calls) > 1:
            row["n_tools"] = len(turn.calls)
        rows.append(row)
    return rows


def _seconds(calls: Sequence[Call], answers: Mapping[tuple[int, int], ToolAnswer]) -> float | None:
    """Until the slowest call of a turn had answered; None where one never did."""
    told = [answers.get(call.place) for call in calls]
    if not told or any(answer is None or answer.outcome == Outcome.STARTED for answer in told):
        return None
    return max(answer.queue_s + answer.run_s for answer in told if answer is not None)


def _text_rows(
    name: str, spec: RunSpec, turns: Sequence[TurnResult], answers: Mapping[tuple[int, int], ToolAnswer]
) -> Iterable[Row]:
    new = "\n".join(text for message in spec.messages if isinstance(text := message.get("content"), str))
    for index, turn in enumerate(turns):
        calls = "".join(f"\n[tool_call {call.name}] {call.arguments}" for call in turn.calls)
        yield {"program_id": name, "turn": index, "prompt_text": new, "output_text": turn.content + calls}
        new = "\n".join(answers[call.place].text for call in turn.calls if call.place in answers)
