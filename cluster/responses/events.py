"""Converts a run's log to the numbered events of OpenAI's response stream. All readers of a log get the same events.

An item grows while its turn generates. A text ends where another item begins. A call ends only with its turn: until
then the turn may be lost and tried again, and a client may run a call that it has seen complete. The items of a lost
attempt stay in the output while the response grows, because clients identify items by their position. They are
`incomplete`, and the next attempt begins new items. The output of a response that has ended is without them, so that it
is what happened, and can be sent back as input.
"""

from collections.abc import Sequence, Set
from typing import Any, get_args

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItem,
    ResponseQueuedEvent,
    ResponseStreamEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_status import ResponseStatus

from cluster.core.errors import IllegalTransition
from cluster.responses.output_builder import OutputBuilder
from cluster.runs.events import (
    MAX_OUTPUT_TOKENS,
    MAX_TURNS,
    Accepted,
    EarlyEnd,
    EarlyIntent,
    Ended,
    Fault,
    Generated,
    LateAnswer,
    RunEvent,
    RunSpec,
    TakenOver,
    ToolAnswer,
    ToolIntent,
    Truncated,
    TurnIntent,
    TurnResult,
)
from cluster.runs.state import RunState, begin, is_whole_summary, step

# --- the response as it stands ----------------------------------------------------------------------------------------

INCOMPLETE_REASONS = {MAX_OUTPUT_TOKENS: "max_output_tokens", MAX_TURNS: "max_messages"}
"""OpenAI's incomplete reasons by end reason. For others the reason is null, and the additional field `detail` names it.
"""

ERROR_CODES = frozenset(get_args(ResponseError.model_fields["code"].annotation))

ECHOED = (
    "instructions",
    "metadata",
    "max_output_tokens",
    "max_tool_calls",
    "reasoning",
    "text",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)


SAMPLING_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values that OpenAI's server shows where the request has none."""


def unchanging(spec: RunSpec) -> Response:
    """Return the response before anything has happened."""
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
            "top_logprobs": spec.sampling.get("top_logprobs", 0),
            "truncation": "auto" if spec.truncate else "disabled",
            "usage": None,
            **{name: echo.get(name) for name in ECHOED},
            **{name: spec.sampling.get(name, default) for name, default in SAMPLING_DEFAULTS.items()},
            **({"conversation": echo["conversation"]} if "conversation" in echo else {}),
            **({"caesura": {"ignored": echo["ignored"]}} if "ignored" in echo else {}),
        }
    )


def response(base: Response, state: RunState, begun: bool, output: Sequence[ResponseOutputItem]) -> Response:
    """Return the response as it is now.

    Args:
        base: the result of `unchanging`.
        state: the state of the run.
        begun: whether a runner works on it.
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
    """Return why a response is incomplete."""
    return IncompleteDetails.model_validate({"reason": INCOMPLETE_REASONS.get(reason or ""), "detail": reason})


def error(fault: Fault) -> ResponseError:
    """Return why a response failed. OpenAI has few codes, so our code is added as the type."""
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
    """Return the tokens of all completed turns. Each turn counts its whole prompt, most of which is cached.

    Reasoning is not counted separately; its number is 0.
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


# --- its events -------------------------------------------------------------------------------------------------------

LAST_EVENTS = {
    "completed": ResponseCompletedEvent,
    "incomplete": ResponseIncompleteEvent,
    "failed": ResponseFailedEvent,
    # OpenAI's stream has no event for it; the response in this one has the status cancelled.
    "cancelled": ResponseIncompleteEvent,
}
LAST_TYPES = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}


class ResponseFold:
    """Processes a log, entry by entry."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._base: Response | None = None
        self._begun = False
        self._output = OutputBuilder("", ())

    @property
    def state(self) -> RunState:
        """The state of the run.

        Raises:
            IllegalTransition: nothing was fed.
        """
        if self._state is None:
            raise IllegalTransition("the log of this response is empty")
        return self._state

    @property
    def response(self) -> Response:
        """The response as it is now, as a new object.

        Raises:
            IllegalTransition: nothing was fed.
        """
        state = self.state
        assert self._base is not None
        return response(self._base, state, self._begun, self._output.models())

    @property
    def replaced(self) -> Set[str]:
        """Ids of items that were in the output while it grew, and are not part of what happened."""
        return self._output.replaced

    def feed(self, event: RunEvent) -> list[ResponseStreamEvent]:
        """Process an entry. Return the events that it makes for a client.

        Raises:
            IllegalTransition: the entry cannot follow the earlier ones.
        """
        if self._state is None:
            return self._accept(event)
        before = self._state
        self._state = step(before, event)
        events: list[ResponseStreamEvent] = []
        if not self._begun and not isinstance(event, Ended):
            events += self._begin()
        match event:
            case TurnIntent():
                self._output.replace_attempt()
            case Generated():
                if not before.summarising:
                    self._generated(event)
            case TurnResult() if event.summary:
                if is_whole_summary(event):
                    self._output.summarised(event.content)
            case TurnResult():
                self._output.finish_turn(event)
            case ToolIntent():
                self._output.begin_approved(call for call in before.calls if call.place in event.places)
            case ToolAnswer():
                self._output.begin_approved(call for call in before.calls if call.place == event.place)
                self._output.answered(event)
            case LateAnswer():
                self._output.answered(event.answer)
            case Ended():
                self._output.end()
                self._output.emit(LAST_EVENTS[event.status], type=LAST_TYPES[event.status], response=self.response)
            case Truncated() | TakenOver() | Accepted() | EarlyIntent() | EarlyEnd():
                pass
        return events + self._output.take()

    def _accept(self, event: RunEvent) -> list[ResponseStreamEvent]:
        self._state = begin(event)
        spec = self._state.spec
        self._base = unchanging(spec)
        self._output = OutputBuilder(spec.id, spec.offers, tuple(spec.echo.get("approvals", ())))
        self._output.emit(ResponseCreatedEvent, type="response.created", response=self.response)
        if spec.background:
            self._output.emit(ResponseQueuedEvent, type="response.queued", response=self.response)
            return self._output.take()
        return self._output.take() + self._begin()

    def _begin(self) -> list[ResponseStreamEvent]:
        self._begun = True
        self._output.emit(ResponseInProgressEvent, type="response.in_progress", response=self.response)
        echo = self.state.spec.echo
        for label in echo.get("told_servers", ()):
            self._output.list_tools(label, echo.get("unusable_tools", {}).get(label))
        return self._output.take()

    def _generated(self, event: Generated) -> None:
        if event.reasoning:
            self._output.add_reasoning(event.reasoning)
        if event.content:
            self._output.add_text(event.content, event.logprobs)
        for piece in event.calls:
            self._output.call_piece(event.turn, piece)
