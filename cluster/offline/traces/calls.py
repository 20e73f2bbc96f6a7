"""Turns of a program from calls of a model, for formats that record calls and not programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram, RecordedTurn, Row

UNNAMED_TOOL = "tool_call"
"""The tool of a pause of which a format does not say what happened meanwhile."""
SMALL_RESET = 0.8
"""A context that shrinks to less than this part of the one before has the value 2 for ``reset``, not 1."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model, and the pause after it."""

    context_tokens: int
    output_tokens: int
    tool: str | None = None
    pause_s: float | None = None
    """Seconds until the next call. None: not recorded."""
    kept_tokens: int | None = None
    """Output tokens that can be in the next context. None: all."""


def turns_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the fields of each call's `RecordedTurn`.

    What a context has beyond the call before is the tool's result, or new prompt if no tool is recorded. A context that
    is shorter than the context and output before keeps less of the output. A context that is shorter than the context
    before starts another context (``reset``).
    """
    turns: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        following = calls[index + 1] if index + 1 < len(calls) else None
        may_keep = call.output_tokens if call.kept_tokens is None else call.kept_tokens
        kept, beyond = may_keep, 0
        if following is not None:
            room = following.context_tokens - call.context_tokens
            kept = may_keep if room < 0 else min(may_keep, room)
            beyond = max(0, room - kept)
        turn: dict[str, Any] = {
            "new_prompt_tokens": _new_prompt(calls, index, turns),
            "context_tokens": call.context_tokens,
            "output_tokens": call.output_tokens,
            "tool": call.tool,
            "tool_duration_s": call.pause_s,
            "tool_return_tokens": beyond if call.tool is not None and following is not None else None,
        }
        if kept != call.output_tokens:
            turn["kept_output_tokens"] = kept
        if index and call.context_tokens < calls[index - 1].context_tokens:
            turn["reset"] = 1 if call.context_tokens > SMALL_RESET * calls[index - 1].context_tokens else 2
            turns[-1]["tool_return_tokens"] = None
        turns.append(turn)
    return turns


def _new_prompt(calls: Sequence[Call], index: int, turns: Sequence[dict[str, Any]]) -> int:
    """Return the tokens of the context that are neither of the context before nor a tool's result."""
    context = calls[index].context_tokens
    if index == 0 or context < calls[index - 1].context_tokens:
        return context
    before = turns[-1]
    kept = before.get("kept_output_tokens", before["output_tokens"])
    return int(context - before["context_tokens"] - kept - (before["tool_return_tokens"] or 0))


def program(where: str, **fields: Any) -> RecordedProgram:
    """Build a program from its fields; ``turns`` are fields too.

    Raises:
        TraceError: a value is out of bounds. The message names the position ``where`` and the key.
    """
    turns = [_checked(f"{where}: turns.{index}.", RecordedTurn, turn) for index, turn in enumerate(fields.pop("turns"))]
    return _checked(f"{where}: ", RecordedProgram, {**fields, "turns": turns})


def _checked(place: str, schema: type[Row], fields: Mapping[str, Any]) -> Row:
    try:
        return schema(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TraceError(f"{place}{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
