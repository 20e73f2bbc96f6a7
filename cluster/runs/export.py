"""Exports a run's log: plain values for `/v1/programs`, and lines of a trace.

`caesura bench`, `simulate` and `predictor` read traces. In a trace each run is a program of its own. Runs of one
program have the same `split_group`, and other runs have another.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core.program import CLASS_MARK, MAX_ID_LENGTH
from cluster.core.tools import Outcome
from cluster.core.turn import unpack_ids
from cluster.durations.tool_names import classed
from cluster.runs.events import (
    Accepted,
    Call,
    Ended,
    LateAnswer,
    RunEvent,
    RunSpec,
    ToolAnswer,
    TurnResult,
    decode,
)
from cluster.runs.state import RunState, fold
from cluster.store.runs.store import RunStore

# --- plain values -----------------------------------------------------------------------------------------------------


def account(events: Sequence[RunEvent], *, token_ids: bool = False) -> dict[str, Any]:
    """Return a run as plain values.

    Times are in seconds since the run was accepted or last taken over, lengths in tokens.

    Args:
        events: its log so far.
        token_ids: whether to include the ids of each turn and of the whole run. `prompt_ids` of a turn are those that
            it added.

    Raises:
        ValueError: there are no events.
    """
    state = fold(events)
    if state is None:
        raise ValueError("a run has at least one event")
    spec, ended = state.spec, state.ended
    plain: dict[str, Any] = {
        "id": spec.id,
        "object": "program.run",
        "api": spec.api,
        "status": "in_progress" if ended is None else ended.status,
        "created_at": int(spec.created_s),
        "previous": spec.previous,
        "runners": state.runners,
        "turns": [_turn(state, turn, token_ids) for turn in state.turns],
    }
    if ended is not None:
        plain["reason"] = ended.reason
        plain["error"] = None if ended.fault is None else {"code": ended.fault.code, "message": ended.fault.message}
    if token_ids:
        plain["token_ids"] = unpack_ids(state.token_ids)
    return plain


def _turn(state: RunState, turn: TurnResult, token_ids: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "turn": turn.turn,
        "began_s": turn.began_s,
        "ended_s": turn.ended_s,
        "rendering": turn.rendering,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "output_tokens": turn.output_tokens,
        "finish_reason": turn.finish_reason,
        "answer_chars": turn.answer_chars,
        "summary": turn.summary,
        "calls": [
            {
                "id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                **_answer(state.answers.get(call.place)),
            }
            for call in turn.calls
        ],
    }
    if token_ids:
        plain["prompt_ids"] = unpack_ids(turn.added_ids)
        plain["output_ids"] = unpack_ids(turn.output_ids)
    return plain


def _answer(answer: ToolAnswer | None) -> dict[str, Any]:
    if answer is None:
        return {"outcome": None}
    return {
        "outcome": answer.outcome,
        "queue_s": answer.queue_s,
        "run_s": answer.run_s,
        "attempts": answer.attempts,
        "truncated": answer.truncated,
    }


# --- traces -----------------------------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunTrace:
    """A line of a trace, and the lines of its texts."""

    program: Row
    texts: tuple[Row, ...]


def run_trace(events: Iterable[RunEvent], source: str) -> RunTrace | None:
    """Return the trace of one run's log so far, or None if it generated nothing.

    The program of a run that has not completed is marked as incomplete.
    """
    spec: RunSpec | None = None
    turns: list[TurnResult] = []
    answers: dict[tuple[int, int], ToolAnswer] = {}
    completed = False
    for event in events:
        if isinstance(event, Accepted):
            spec = event.spec
        elif isinstance(event, TurnResult):
            turns.append(event)
        elif isinstance(event, ToolAnswer | LateAnswer):
            answer = event.answer if isinstance(event, LateAnswer) else event
            answers[answer.place] = answer
        elif isinstance(event, Ended):
            completed = event.status == "completed"
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
        **({} if completed else {"incomplete": 1}),
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
            row["tool_cmd"] = command[:MAX_ID_LENGTH]  # readers reject a trace with a longer one
        if len(turn.calls) > 1:
            row["n_tools"] = len(turn.calls)
        rows.append(row)
    return rows


def _seconds(calls: Sequence[Call], answers: Mapping[tuple[int, int], ToolAnswer]) -> float | None:
    """Return the seconds until the slowest call of a turn was answered, or None if they are not known.

    They are not known if a call has no answer yet, if nobody knows what became of it, or if it ended before its tool
    was started. A call that was refused was answered without its tool.
    """
    seconds: list[float] = []
    for call in calls:
        answer = answers.get(call.place)
        if answer is None or answer.outcome in (Outcome.STARTED, Outcome.UNKNOWN):
            return None
        if answer.attempts == 0 and answer.outcome != Outcome.REFUSED:
            return None
        seconds.append(answer.queue_s + answer.run_s)
    return max(seconds, default=None)


def _text_rows(
    name: str, spec: RunSpec, turns: Sequence[TurnResult], answers: Mapping[tuple[int, int], ToolAnswer]
) -> Iterable[Row]:
    new = "\n".join(text for message in spec.messages if isinstance(text := message.get("content"), str))
    for index, turn in enumerate(turns):
        calls = "".join(f"\n[tool_call {call.name}] {call.arguments}" for call in turn.calls)
        yield {"program_id": name, "turn": index, "prompt_text": new, "output_text": turn.content + calls}
        new = "\n".join(answers[call.place].text for call in turn.calls if call.place in answers)


# --- the traces of a tenant's runs ------------------------------------------------------------------------------------

PAGE = 100
"""Number of runs in one request to the store."""


async def exported(store: RunStore, tenant: str, source: str) -> AsyncIterator[RunTrace]:
    """Yield the traces of closed runs, the newest first.

    Runs that were deleted meanwhile or are unreadable are left out.

    Raises:
        RunStoreUnavailable: the store does not answer.
    """
    before: float | None = None
    while heads := await store.runs(tenant, limit=PAGE, before=before):
        for head in heads:
            if not head.open and (trace := await _trace(store, head.id, source)) is not None:
                yield trace
        before = heads[-1].created_s


async def _trace(store: RunStore, run_id: str, source: str) -> RunTrace | None:
    entries: list[bytes] = []
    while (log := await store.read(run_id, len(entries))) is not None:
        entries += log.items
        if not log.more:
            break
    try:
        return run_trace([decode(entry) for entry in entries], source)
    except ValueError:
        return None
