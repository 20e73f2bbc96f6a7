"""Items of the input as messages of chat completions.

The model saw turns: an assistant's message with reasoning, text and calls, then the calls' answers. A response's output
has them as a list of items; here that list becomes turns again. Answers are found by their call's id, wherever they
stand, and follow the message that asks for them, as chat templates want it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.tools import server_tool_name
from cluster.core.errors import BadRequest
from cluster.core.tools import ToolOffer
from cluster.responses.input_items import (
    ENDED,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    Reasoning,
    error_text,
    text_of,
)
from cluster.responses.output import approval_request_id, is_approval_request_id
from cluster.runs.events import Call, Prior
from cluster.runs.state import RunState, conversation, late_message, runs_here

DENIED = "The user did not allow this call."

ChatMessage = dict[str, Any]


def tool_message(call_id: str, text: str) -> ChatMessage:
    """A call's answer."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def denied(response: McpApprovalResponse) -> str:
    """What the model reads instead of an answer."""
    return f"{DENIED} Reason: {response.reason}" if response.reason else DENIED


@dataclass(slots=True)
class InputCalls:
    """What the input has for calls: answers and consent, each used once."""

    outputs: dict[str, deque[tuple[int, str]]]
    """By call id: the item's place in the input, and its text."""
    approvals: dict[str, tuple[int, McpApprovalResponse]]
    """By approval request."""

    @classmethod
    def of(cls, items: Sequence[InputItem]) -> "InputCalls":
        """From all items.

        Raises:
            BadRequest: a request for approval is answered twice.
        """
        outputs: dict[str, deque[tuple[int, str]]] = defaultdict(deque)
        approvals: dict[str, tuple[int, McpApprovalResponse]] = {}
        settled = {item.approval_request_id for item in items if isinstance(item, McpCall)}
        for place, item in enumerate(items):
            if isinstance(item, FunctionCallOutput):
                outputs[item.call_id].append((place, text_of(item.output)))
            if isinstance(item, McpApprovalResponse) and item.approval_request_id not in settled:
                if item.approval_request_id in approvals:
                    raise _bad(place, "approval_request_id", f"{item.approval_request_id!r} is answered twice")
                approvals[item.approval_request_id] = (place, item)
        return cls(outputs, approvals)

    def output(self, call_id: str) -> str:
        """The answer to a call of the caller's.

        Raises:
            BadRequest: there is none.
        """
        answers = self.outputs.get(call_id)
        if not answers:
            raise BadRequest(f"No tool output found for function call {call_id}.", param="input")
        return answers.popleft()[1]

    def approval(self, request_id: str) -> McpApprovalResponse:
        """The answer to a request for approval.

        Raises:
            BadRequest: there is none.
        """
        found = self.approvals.pop(request_id, None)
        if found is None:
            raise BadRequest(f"No approval response found for approval request {request_id}.", param="input")
        return found[1]

    def require_used(self) -> None:
        """Everything belonged to a call.

        Raises:
            BadRequest: something did not.
        """
        for call_id, answers in self.outputs.items():
            for place, _ in answers:
                raise _bad(place, "call_id", f"No tool call found for function call output with call_id {call_id}.")
        for request_id, (place, _) in self.approvals.items():
            raise _bad(place, "approval_request_id", f"there is no approval request {request_id!r}")


@dataclass(slots=True)
class _Turn:
    """An assistant's message that is being put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Callable[[], ChatMessage | None]] = field(default_factory=list)
    """Of the calls, in their order; taken when the turn is complete. None: the call is run before the next turn."""
    names: dict[str, str] = field(default_factory=dict)
    answered: bool = False
    """An answer came: whatever the model generates next is another turn."""

    def message(self) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Conversation:
    """Messages, put together item by item.

    Args:
        offers: the tools that there are now.
        given: answers and consent in the input; what belongs to an earlier run's calls has been taken out.
        approved: calls of the last message that are consented to already.
    """

    def __init__(self, given: InputCalls, offers: Sequence[ToolOffer], approved: Sequence[Call] = ()) -> None:
        self.messages: list[ChatMessage] = []
        self.approved = list(approved)
        self.approval_ids: list[str] = []
        """Of the approved calls that were found here, in their order."""
        self._given = given
        self._names = {(offer.server, offer.server_tool): offer.name for offer in offers}
        self._turn: _Turn | None = None
        self._settled: set[str] = set()

    def add_all(self, items: Sequence[InputItem]) -> None:
        """All of them, in order.

        Raises:
            BadRequest: a call without an answer, an answer without a call, or words between a call that is to be run
                and its run.
        """
        self._settled = {item.approval_request_id or "" for item in items if isinstance(item, McpCall)}
        for place, item in enumerate(items):
            self._add(place, item)
        self._close()
        self._given.require_used()

    def _add(self, place: int, item: InputItem) -> None:
        match item:
            case Message(role="assistant"):
                turn = self._open(place, another=bool(self._turn and (self._turn.content or self._turn.calls)))
                turn.content.append(text_of(item.content))
            case Message():
                self._close()
                self._require_free(place)
                self.messages.append(_message(item))
            case Reasoning():
                turn = self._open(place, another=bool(self._turn and (self._turn.content or self._turn.calls)))
                turn.reasoning += [part.text for part in item.content or ()]
            case FunctionCall() | McpCall() if item.unfinished:
                pass
            case FunctionCall():
                turn = self._open(place)
                _append_call(turn, item.call_id, item.name, item.arguments)
                turn.answers.append(lambda: tool_message(item.call_id, self._given.output(item.call_id)))
                turn.names[item.call_id] = item.name
            case FunctionCallOutput():
                if self._turn is not None and self._turn.calls:
                    self._turn.answered = True
            case McpCall():
                self._add_mcp_call(place, item)
            case McpApprovalRequest() if item.id not in self._settled:
                turn = self._open(place)
                name = self._name(item)
                _append_call(turn, item.id, name, item.arguments)
                turn.answers.append(lambda: self._consent(item, name))
            case McpApprovalRequest() | McpApprovalResponse() | McpListTools():
                pass

    def _add_mcp_call(self, place: int, item: McpCall) -> None:
        turn = self._open(place)
        call_id = item.id or f"mcp_call_{place}"
        text = item.output if item.output is not None else error_text(item.error)
        _append_call(turn, call_id, self._name(item), item.arguments)
        turn.answers.append(lambda: tool_message(call_id, text))

    def _name(self, item: McpCall | McpApprovalRequest) -> str:
        """What the model calls the tool, as it is offered now."""
        known = self._names.get((item.server_label, item.name))
        return known or server_tool_name(item.server_label, item.name)

    def _consent(self, item: McpApprovalRequest, name: str) -> ChatMessage | None:
        response = self._given.approval(item.id)
        if not response.approve:
            return tool_message(item.id, denied(response))
        if (item.server_label, item.name) not in self._names:
            raise BadRequest(f"tools: the approved call's tool {name!r} is not among them", param="tools")
        consent = item.id if is_approval_request_id(item.id) else None
        self.approved.append(Call(0, len(self.approved), item.id, name, item.arguments, consent))
        self.approval_ids.append(item.id)
        return None

    def _open(self, place: int, another: bool = False) -> _Turn:
        if self._turn is not None and (another or self._turn.answered):
            self._close()
        if self._turn is None:
            self._require_free(place)
            self._turn = _Turn()
        return self._turn

    def _close(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self.messages.append(turn.message())
        for answer in turn.answers:
            message = answer()
            if message is not None:
                self.messages.append(message)
        for call_id, name in turn.names.items():
            # The tool was asynchronous: its answer came after the word that it was started.
            while self._given.outputs.get(call_id):
                self.messages.append(late_message(name, self._given.output(call_id)))

    def _require_free(self, place: int) -> None:
        if self.approved:
            raise BadRequest(
                f"input.{place}: nothing can be said between an approved call and its run; say it in a later request",
                param=f"input.{place}",
            )


def _append_call(turn: _Turn, call_id: str, name: str, arguments: str) -> None:
    turn.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _message(item: Message) -> ChatMessage:
    role = "system" if item.role == "developer" else item.role
    if isinstance(item.content, str) or len(item.content) == 1:
        return {"role": role, "content": text_of(item.content)}
    return {"role": role, "content": [{"type": "text", "text": part.shown} for part in item.content]}


def _bad(place: int, key: str, message: str) -> BadRequest:
    param = f"input.{place}.{key}"
    return BadRequest(f"{param}: {message}", param=param)


# --- going on from an earlier response --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """What came before the request's own input."""

    messages: tuple[ChatMessage, ...] = ()
    approved: tuple[Call, ...] = ()
    approval_ids: tuple[str, ...] = ()
    """The requests for approval that ``approved`` answers, in its order."""
    prior: Prior | None = None


def history(previous: RunState, instructions: str | None, given: InputCalls) -> History:
    """The conversation of ``previous``, its open calls answered from the input.

    Args:
        previous: the final state.
        instructions: the new request's; the earlier ones are not carried over.
        given: what the input has for calls; what is used here is taken out.

    Raises:
        BadRequest: the earlier response is not done, or a call of its last turn has no answer.
    """
    if previous.ended is None:
        message = f"the response {previous.spec.id!r} is not done; a response can only follow one that is"
        raise BadRequest(message, param="previous_response_id", code="previous_response_not_done")
    answers: list[ChatMessage] = []
    approved: list[Call] = []
    approval_ids: list[str] = []
    # A run that was ended among its calls has shown the model none of their answers.
    cut = any(runs_here(previous, call) for call in previous.waiting)
    for call in previous.calls:
        answer = previous.answers.get(call.place)
        if runs_here(previous, call):
            if cut:
                answers.append(tool_message(call.id, ENDED if answer is None else answer.text))
            continue
        offer = previous.offer(call.name)
        if offer is None or not offer.approval:
            answers.append(tool_message(call.id, given.output(call.id)))
            continue
        request_id = approval_request_id(previous.spec.id, call)
        response = given.approval(request_id)
        if response.approve:
            approved.append(Call(0, len(approved), call.id, call.name, call.arguments, request_id))
            approval_ids.append(request_id)
        else:
            answers.append(tool_message(call.id, denied(response)))
    late = conversation(previous)[len(previous.messages) :]
    messages = (*previous.messages, *answers, *late)
    before = previous.spec.echo.get("instructions")
    prior = Prior(previous.token_ids, previous.covered) if previous.covered else None
    if before != instructions:
        messages, prior = _with_instructions(messages, before, instructions), None
    return History(messages, tuple(approved), tuple(approval_ids), prior)


def _with_instructions(
    messages: tuple[ChatMessage, ...], before: str | None, instructions: str | None
) -> tuple[ChatMessage, ...]:
    rest = messages if before is None else messages[1:]
    return rest if instructions is None else (system_message(instructions), *rest)


def system_message(instructions: str) -> ChatMessage:
    """The first message of a conversation with instructions."""
    return {"role": "system", "content": instructions}
