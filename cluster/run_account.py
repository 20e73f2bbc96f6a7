"""What is told of a run to people: its turns and tool calls, as plain values, from its log."""

from collections.abc import Sequence
from typing import Any

from cluster.run import RunState, fold
from cluster.run_events import RunEvent, ToolAnswer, TurnResult
from cluster.turn import unpack_ids


def account(events: Sequence[RunEvent], *, token_ids: bool = False) -> dict[str, Any]:
    """A run in plain values. Times in seconds since the run was accepted (or last taken over), lengths in tokens.

    Args:
        events: its log so far.
        token_ids: with the ids of each turn (`prompt_ids` are those added to what was there) and of the whole run.

    Raises:
        ValueError: there are no events.
    """
    state = fold(events)
    if state is None:
        raise ValueError("a run has at least one event")
    spec, ended = state.spec, state.ended
    told: dict[str, Any] = {
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
        told["reason"] = ended.reason
        told["error"] = None if ended.fault is None else {"code": ended.fault.code, "message": ended.fault.message}
    if token_ids:
        told["token_ids"] = unpack_ids(state.token_ids)
    return told


def _turn(state: RunState, turn: TurnResult, token_ids: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "turn": turn.turn,
        "began_s": turn.began_s,
        "ended_s": turn.ended_s,
        "rendering": turn.rendering,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "output_tokens": turn.output_tokens,
        "finish_reason": turn.finish_reason,
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
        told["prompt_ids"] = unpack_ids(turn.added_ids)
        told["output_ids"] = unpack_ids(turn.output_ids)
    return told


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
