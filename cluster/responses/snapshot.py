"""A run's state as OpenAI's `Response`."""

from collections.abc import Sequence
from typing import Any, get_args

from openai.types.responses import Response, ResponseError, ResponseOutputItem, ResponseUsage
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_status import ResponseStatus

from cluster.run import RunState
from cluster.run_events import MAX_OUTPUT_TOKENS, MAX_TURNS, Fault, RunSpec

INCOMPLETE_REASONS = {MAX_OUTPUT_TOKENS: "max_output_tokens", MAX_TURNS: "max_messages"}
"""OpenAI's word for ours. For the others it has none: the reason is null, and `detail`, which is ours, says it."""

ERROR_CODES = frozenset(get_args(ResponseError.model_fields["code"].annotation))

ECHOED = (
    "instructions",
    "metadata",
    "temperature",
    "top_p",
    "max_output_tokens",
    "max_tool_calls",
    "reasoning",
    "text",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)


def unchanging(spec: RunSpec) -> Response:
    """The response before anything has happened."""
    echo = spec.echo
    return Response.model_validate(
        {
            "id": spec.id,
            "object": "response",
            "created_at": spec.created_s,
            "completed_at": None,
            "status": "queued" if spec.background else "in_progress",
            "background": spec.background,
            "error": None,
            "incomplete_details": None,
            "model": spec.model,
            "output": [],
            "parallel_tool_calls": spec.parallel,
            "previous_response_id": spec.previous,
            "service_tier": "default",
            "store": spec.store,
            "tool_choice": echo.get("tool_choice", "auto"),
            "tools": echo.get("tools", []),
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
            **{name: echo.get(name) for name in ECHOED},
        }
    )


def response(base: Response, state: RunState, begun: bool, output: Sequence[ResponseOutputItem]) -> Response:
    """The response as it stands.

    Args:
        base: of `unchanging`.
        state: of the run.
        begun: a runner works on it.
        output: the items so far.
    """
    status: ResponseStatus = "in_progress" if begun else base.status or "in_progress"
    changes: dict[str, Any] = {"output": list(output), "status": status}
    ended = state.ended
    if ended is not None:
        changes |= {"status": ended.status, "usage": usage(state)}
        if ended.status == "completed":
            changes["completed_at"] = max(ended.at_s, base.created_at)
        if ended.status == "incomplete":
            changes["incomplete_details"] = incomplete_details(ended.reason)
        if ended.fault is not None:
            changes["error"] = error(ended.fault)
    return base.model_copy(update=changes)


def incomplete_details(reason: str | None) -> IncompleteDetails:
    """Why a response is incomplete."""
    return IncompleteDetails.model_validate({"reason": INCOMPLETE_REASONS.get(reason or ""), "detail": reason})


def error(fault: Fault) -> ResponseError:
    """Why a response failed. OpenAI's codes are few; ours is beside them, as the type."""
    if fault.code in ERROR_CODES:
        code = fault.code
    elif fault.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if 400 <= fault.status < 500 else "server_error"
    return ResponseError.model_validate(
        {"code": code, "message": fault.message, "param": fault.param, "type": fault.code}
    )


def usage(state: RunState) -> ResponseUsage:
    """Tokens of all turns that ran their course. Each turn's prompt counts whole, most of it from the cache.

    Reasoning is not counted apart: the number is 0.
    """
    prompts = sum(turn.prompt_tokens for turn in state.turns)
    return ResponseUsage.model_validate(
        {
            "input_tokens": prompts,
            "input_tokens_details": {
                "cached_tokens": sum(turn.cached_tokens for turn in state.turns),
                "cache_write_tokens": 0,
            },
            "output_tokens": state.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompts + state.output_tokens,
        }
    )
