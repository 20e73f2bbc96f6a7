"""Converts items of the input to messages of chat completions.

The model sees turns: an assistant's message with reasoning, text and calls, followed by the answers of the calls. A
response's output has them as a list of items, and this module makes turns of that list again. Answers are found by the
id of their call, at any position, and follow the message with the call, as chat templates require.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.core.errors import BadRequest
from cluster.core.tools import (
    IN_NEXT_MESSAGE,
    ToolId,
    ToolOffer,
    images_message,
    late_message,
    sent_back,
    server_tool_name,
)
from cluster.responses.compaction import UNREADABLE, unpacked
from cluster.responses.custom_tools import arguments_of
from cluster.responses.input_items import (
    ENDED,
    CompactionItem,
    Content,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    Message,
    Reasoning,
    error_text,
    images_in,
    text_of,
)
from cluster.responses.output import CLUSTER_LABEL, approval_request_id, is_approval_request_id
from cluster.runs.compaction import compacted
from cluster.runs.events import Call, Prior
from cluster.runs.state import RunState, conversation, runs_here

DENIED = "The user did not allow this call."

ChatMessage = dict[str, Any]
ChatPart = dict[str, Any]


def tool_message(call_id: str, text: str) -> ChatMessage:
    """Return the message with a call's answer."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def denied(response: McpApprovalResponse) -> str:
    """Return the text that the model reads instead of an answer."""
    return f"{DENIED} Reason: {response.reason}" if response.reason else DENIED


@dataclass(slots=True)
class InputCalls:
    """Answers and approvals of calls in the input. Each is used once."""

    outputs: dict[str, deque[tuple[int, str]]]
    """Answers by call id: the item's position in the input, and its text."""
    approvals: dict[str, tuple[int, McpApprovalResponse]]
    """Approval responses by the id of the approval request, with their position in the input."""
    images: dict[str, list[ChatPart]] = field(default_factory=dict)
    """The images of answers by call id, for a model that sees."""
    _read: list[ChatPart] = field(default_factory=list)
    """The images of the answers that were returned since `take_images`."""

    @classmethod
    def of(cls, items: Sequence[InputItem], first: int = 0, *, sees: bool = False) -> "InputCalls":
        """Collect them from all items.

        Args:
            items: the items.
            first: position of the first item in the request's input. It is negative for items of a conversation.
            sees: whether the model reads images.

        Raises:
            BadRequest: an approval request is answered twice.
        """
        outputs: dict[str, deque[tuple[int, str]]] = defaultdict(deque)
        approvals: dict[str, tuple[int, McpApprovalResponse]] = {}
        images: dict[str, list[ChatPart]] = defaultdict(list)
        settled = {item.approval_request_id for item in items if isinstance(item, McpCall)}
        for place, item in enumerate(items, first):
            if isinstance(item, FunctionCallOutput | CustomToolCallOutput):
                outputs[item.call_id].append((place, _answer_text(item.output, sees=sees)))
                images[item.call_id] += images_in(item.output) if sees else []
            if isinstance(item, McpApprovalResponse) and item.approval_request_id not in settled:
                if item.approval_request_id in approvals:
                    raise _bad(place, "approval_request_id", f"{item.approval_request_id!r} is answered twice")
                approvals[item.approval_request_id] = (place, item)
        return cls(outputs, approvals, images)

    def output(self, call_id: str) -> str:
        """Remove and return the answer to a call of one of the caller's functions.

        Raises:
            BadRequest: there is none.
        """
        answers = self.outputs.get(call_id)
        if not answers:
            raise BadRequest(f"No tool output found for function call {call_id}.", param="input")
        self._read += self.images.pop(call_id, [])
        return answers.popleft()[1]

    def take_images(self) -> list[ChatMessage]:
        """Return the message with the images of the answers since the last call, if there are any.

        It follows the answers, because chat templates take no image in a tool's message.
        """
        read, self._read = self._read, []
        return [{"role": "user", "content": read}] if read else []

    def approval(self, request_id: str) -> McpApprovalResponse:
        """Remove and return the answer to an approval request.

        Raises:
            BadRequest: there is none.
        """
        found = self.approvals.pop(request_id, None)
        if found is None:
            raise BadRequest(f"No approval response found for approval request {request_id}.", param="input")
        return found[1]

    def require_used(self) -> None:
        """Check that every answer belonged to a call.

        Raises:
            BadRequest: one did not.
        """
        for call_id, answers in self.outputs.items():
            for place, _ in answers:
                raise _bad(place, "call_id", f"No tool call found for function call output with call_id {call_id}.")
        for request_id, (place, _) in self.approvals.items():
            raise _bad(place, "approval_request_id", f"there is no approval request {request_id!r}")


@dataclass(slots=True)
class _Turn:
    """An assistant's message in progress."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Callable[[], ChatMessage | None]] = field(default_factory=list)
    """Functions that return the answers of the calls, in their order. They are called when the turn is complete. None:
    the call is run before the next turn."""
    names: dict[str, str] = field(default_factory=dict)
    answered: bool = False
    """Whether an answer has come. The model's next output is then another turn."""

    def message(self) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Conversation:
    """Builds messages, item by item.

    Args:
        given: answers and approvals in the input, without those for calls of an earlier run.
        offers: the tools that exist now.
        approved: calls of the last message that are already approved.
        sees: whether the model reads images.
    """

    def __init__(
        self, given: InputCalls, offers: Sequence[ToolOffer], approved: Sequence[Call] = (), *, sees: bool = False
    ) -> None:
        self._sees = sees
        self.messages: list[ChatMessage] = []
        self.summarised = False
        """Whether a summary stands in place of what was before it, the earlier messages included."""
        self.approved = list(approved)
        self.approval_ids: list[str] = []
        """Ids of the approval requests of approved calls that were found here, in their order."""
        self._given = given
        self._names = {(offer.label, offer.own_name): offer.name for offer in offers}
        self._turn: _Turn | None = None
        self._settled: set[str] = set()

    def add_all(self, items: Sequence[InputItem], first: int = 0) -> None:
        """Add all items, in order.

        Args:
            items: the items.
            first: position of the first item in the request's input. It is negative for items of a conversation.

        Raises:
            BadRequest: a call has no answer, an answer has no call, or a message comes before an approved call is run.
        """
        self._settled = {item.approval_request_id or "" for item in items if isinstance(item, McpCall)}
        for place, item in enumerate(items, first):
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
                self.messages.append(_message(item, sees=self._sees))
            case Reasoning():
                turn = self._open(place, another=bool(self._turn and (self._turn.content or self._turn.calls)))
                turn.reasoning += [part.text for part in item.content or ()]
            case CompactionItem():
                self._close()
                self._require_free(place)
                self._summarise(unpacked(item.encrypted_content))
            case McpCall() if item.unfinished:
                pass
            case FunctionCall() | CustomToolCall() if item.unfinished and not self._given.outputs.get(item.call_id):
                pass
            case FunctionCall():
                self._add_callers(place, item.call_id, item.name, item.arguments)
            case CustomToolCall():
                self._add_callers(place, item.call_id, item.name, arguments_of(item.input))
            case FunctionCallOutput() | CustomToolCallOutput():
                if self._turn is not None and self._turn.calls:
                    self._turn.answered = True
            case McpCall():
                self._add_mcp_call(place, item)
            case McpApprovalRequest() if item.id not in self._settled:
                turn = self._open(place)
                name = self._name(item)
                _append_call(turn, item.id, name, item.arguments)
                turn.answers.append(lambda: self._consent(item, name))
            case _:  # an answer to a call, which is read with the call, or nothing that the model reads
                pass

    def _summarise(self, summary: str | None) -> None:
        if summary is None:
            self.messages.append({"role": "user", "content": UNREADABLE})
            return
        self.messages = list(compacted(self.messages, summary))
        self.summarised = True

    def _add_callers(self, place: int, call_id: str, name: str, arguments: str) -> None:
        """Add a call of one of the caller's tools."""
        turn = self._open(place)
        _append_call(turn, call_id, name, arguments)
        turn.answers.append(lambda: tool_message(call_id, self._given.output(call_id)))
        turn.names[call_id] = name

    def _add_mcp_call(self, place: int, item: McpCall) -> None:
        turn = self._open(place)
        call_id = item.id or f"mcp_call_{place}"
        text = sent_back(item.output if item.output is not None else error_text(item.error))
        _append_call(turn, call_id, self._name(item), item.arguments)
        turn.answers.append(lambda: tool_message(call_id, text))

    def _name(self, item: McpCall | McpApprovalRequest) -> str:
        """Return the name of the tool for the model, as it is offered now."""
        known = self._names.get((item.server_label, item.name))
        if known is None and item.server_label in (item.name, CLUSTER_LABEL):
            return item.name
        return known or server_tool_name(item.server_label, item.name)

    def _consent(self, item: McpApprovalRequest, name: str) -> ChatMessage | None:
        response = self._given.approval(item.id)
        if not response.approve:
            return tool_message(item.id, denied(response))
        consent = item.id if is_approval_request_id(item.id) else None
        tool = ToolId.of_request(item.server_label, item.name)
        self.approved.append(Call(0, len(self.approved), item.id, name, item.arguments, consent, tool))
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
            # The tool was asynchronous: its final answer follows the answer that it was started.
            while self._given.outputs.get(call_id):
                self.messages.append(late_message(name, self._given.output(call_id)))
        self.messages += self._given.take_images()

    def _require_free(self, place: int) -> None:
        if self.approved:
            param = f"input.{place}" if place >= 0 else "conversation"
            message = f"{param}: nothing can be said between an approved call and its run; say it in a later request"
            raise BadRequest(message, param=param)


def _append_call(turn: _Turn, call_id: str, name: str, arguments: str) -> None:
    turn.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _answer_text(content: Content, *, sees: bool) -> str:
    if not sees or not images_in(content):
        return text_of(content)
    parts = [] if isinstance(content, str) else content
    return "\n".join(IN_NEXT_MESSAGE if images_in([part]) else part.shown for part in parts)


def _message(item: Message, *, sees: bool) -> ChatMessage:
    role = "system" if item.role == "developer" else item.role
    if sees and images_in(item.content) and not isinstance(item.content, str):
        parts = [(images_in([part]) or [{"type": "text", "text": part.shown}])[0] for part in item.content]
        return {"role": role, "content": parts}
    if isinstance(item.content, str) or len(item.content) == 1:
        return {"role": role, "content": text_of(item.content)}
    return {"role": role, "content": [{"type": "text", "text": part.shown} for part in item.content]}


def _bad(place: int, key: str, message: str) -> BadRequest:
    param = f"input.{place}.{key}" if place >= 0 else "conversation"
    return BadRequest(f"{param}: {message}", param=param)


# --- going on from an earlier response --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class History:
    """The conversation before the request's own input."""

    messages: tuple[ChatMessage, ...] = ()
    approved: tuple[Call, ...] = ()
    approval_ids: tuple[str, ...] = ()
    """The requests for approval that ``approved`` answers, in its order."""
    prior: Prior | None = None
    unread: tuple[int, ...] = ()
    """Places of answers of the cluster's tools that no turn has read."""


def history(previous: RunState, instructions: str | None, given: InputCalls) -> History:
    """Return the conversation of ``previous``, with its open calls answered from the input.

    Args:
        previous: the final state of the run.
        instructions: the instructions of the new request. Those of earlier requests are dropped.
        given: answers and approvals in the input. The ones that are used here are removed.

    Raises:
        BadRequest: the earlier response is not done, or a call of its last turn has no answer.
    """
    if previous.ended is None:
        message = f"the response {previous.spec.id!r} is not done; a response can only follow one that is"
        raise BadRequest(message, param="previous_response_id", code="previous_response_not_done")
    answers: list[ChatMessage] = []
    images: list[str] = []
    unread = list(previous.unread)
    approved: list[Call] = []
    approval_ids: list[str] = []
    # A run that was ended among its calls has shown the model none of their answers.
    cut = any(runs_here(previous, call) for call in previous.waiting)
    for call in previous.calls:
        answer = previous.answers.get(call.place)
        if runs_here(previous, call):
            if cut:
                unread.append(len(previous.messages) + len(answers))
                answers.append(tool_message(call.id, ENDED if answer is None else answer.text))
                images += () if answer is None else answer.images
            continue
        offer = previous.offer(call.name)
        if offer is None or not offer.approval:
            answers.append(tool_message(call.id, given.output(call.id)))
            continue
        request_id = approval_request_id(previous.spec.id, call)
        response = given.approval(request_id)
        if response.approve:
            approved.append(Call(0, len(approved), call.id, call.name, call.arguments, request_id, offer.tool))
            approval_ids.append(request_id)
        else:
            answers.append(tool_message(call.id, denied(response)))
    answers += (*images_message(images), *given.take_images())
    late = conversation(previous)[len(previous.messages) :]
    messages = (*previous.messages, *answers, *late)
    texts = (place for place, message in enumerate(messages) if isinstance(message["content"], str))
    unread += (place for place in texts if place >= len(messages) - len(late))
    before = previous.spec.echo.get("instructions")
    prior = Prior(previous.token_ids, previous.covered) if previous.covered else None
    if before != instructions:
        count = len(messages)
        messages, prior = _with_instructions(messages, before, instructions), None
        unread = [place + len(messages) - count for place in unread]
    return History(messages, tuple(approved), tuple(approval_ids), prior, tuple(unread))


def _with_instructions(
    messages: tuple[ChatMessage, ...], before: str | None, instructions: str | None
) -> tuple[ChatMessage, ...]:
    rest = messages if before is None else messages[1:]
    return rest if instructions is None else (system_message(instructions), *rest)


def system_message(instructions: str) -> ChatMessage:
    """Return the first message of a conversation with instructions."""
    return {"role": "system", "content": instructions}
