"""Builds a response's output: items begin, grow and end, and each step is an event."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.responses import (
    ResponseCompactionItem,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseMcpCallArgumentsDeltaEvent,
    ResponseMcpCallArgumentsDoneEvent,
    ResponseMcpCallCompletedEvent,
    ResponseMcpCallFailedEvent,
    ResponseMcpCallInProgressEvent,
    ResponseMcpListToolsCompletedEvent,
    ResponseMcpListToolsInProgressEvent,
    ResponseOutputItem,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseStreamEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from openai.types.responses.response_output_item import McpListTools

from cluster.core.tools import Outcome, ToolOffer
from cluster.core.turn import CallDelta
from cluster.responses.compaction import compaction_item
from cluster.responses.custom_tools import input_of
from cluster.responses.output import (
    CLUSTER_LABEL,
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemStatus,
    McpCallItem,
    MessageItem,
    ReasoningItem,
    TextItem,
    WholeItem,
    approval_request,
    approval_request_id,
    output_item_id,
    tool_list,
)
from cluster.runs.events import Call, ToolAnswer, TurnResult
from cluster.runs.state import is_ours

Place = tuple[int, int]


@dataclass(slots=True)
class _Nameless:
    """A call whose id or name has not been generated yet."""

    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


class OutputBuilder:
    """The output, and the events that were not taken yet.

    Args:
        run_id: the run's id, from which the items' ids are made.
        offers: the tools that the model may call.
        approvals: ids of the approval requests that the run's approved calls answer, in the order of the calls.
    """

    def __init__(self, run_id: str, offers: tuple[ToolOffer, ...], approvals: tuple[str, ...] = ()) -> None:
        self._run_id = run_id
        self._offers = offers
        self._by_name = {offer.name: offer for offer in offers}
        self._approvals = approvals
        self._items: list[Item] = []
        self._events: list[ResponseStreamEvent] = []
        self._number = 0
        # State of the current attempt:
        self._attempt: list[Item] = []
        self._open_text: TextItem | None = None
        self._sent = {MessageItem: "", ReasoningItem: ""}
        self._nameless: dict[Place, _Nameless] = {}
        # State of the whole run:
        self._is_over = False
        self.replaced: set[str] = set()
        """Ids of items whose turn was tried again, or whose pieces were not those of its result."""
        self._calls: dict[Place, CallItem] = {}

    def models(self) -> list[ResponseOutputItem]:
        """Return the items as they are now. After the end, they are those of the conversation, without `replaced`."""
        left_out = self.replaced if self._is_over else ()
        return [item.model() for item in self._items if item.id not in left_out]

    def take(self) -> list[ResponseStreamEvent]:
        """Return the events since the last call."""
        taken, self._events = self._events, []
        return taken

    def emit(self, kind: Any, **fields: Any) -> None:
        """Append a stream event of this type, with the next sequence number, to those that `take` returns."""
        self._events.append(kind(sequence_number=self._number, **fields))
        self._number += 1

    # --- a turn -------------------------------------------------------------------------------------------------------

    def add_reasoning(self, delta: str) -> None:
        """Append generated reasoning text to the open reasoning item, or open one."""
        self._grow_text(ReasoningItem, delta)

    def add_text(self, delta: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Add text, with the log probabilities of its tokens if they are wanted."""
        self._grow_text(MessageItem, delta, logprobs)

    def call_piece(self, turn: int, piece: CallDelta) -> None:
        """Add a piece of a call."""
        place = (turn, piece.index)
        item = self._calls.get(place)
        if item is not None:
            self._grow_call(item, piece.arguments)
            return
        known = self._nameless.setdefault(place, _Nameless())
        known.call_id = piece.id or known.call_id
        known.name = piece.name or known.name
        known.arguments += piece.arguments
        if known.call_id is None or known.name is None or self._needs_approval(known.name):
            return  # a call that needs approval is shown when it is complete
        del self._nameless[place]
        self._grow_call(self._begin_call(place, known.call_id, known.name), known.arguments)

    def finish_turn(self, result: TurnResult) -> None:
        """Complete the turn's items, with what its pieces left out."""
        self._complete_text(ReasoningItem, result.reasoning)
        self._complete_text(MessageItem, result.content)
        self._end_text("incomplete" if result.finish_reason == "length" else "completed")
        asked = {call.place: call for call in result.calls}
        is_cut = result.finish_reason == "length" or result.unfinished
        for place, item in list(self._calls.items()):
            call = asked.get(place)
            if place[0] == result.turn and (call is None or not _is_same(item, call)):
                self._abandon(item)
                if call is not None or not is_cut:
                    self.replaced.add(item.id)
                del self._calls[place]
        for call in result.calls:
            self._finish_call(call)
        self._forget_attempt()

    def replace_attempt(self) -> None:
        """End the items of an attempt that failed, if there is one. The turn is tried again."""
        self.replaced.update(item.id for item in self._attempt)
        self._end_attempt()

    def _end_attempt(self) -> None:
        self._end_text("incomplete")
        for item in self._attempt:
            if isinstance(item, FunctionCallItem | CustomCallItem | McpCallItem):
                self._abandon(item)
            item.status = "incomplete"
        lost = {item.index for item in self._attempt}
        self._calls = {place: item for place, item in self._calls.items() if item.index not in lost}
        self._forget_attempt()

    def end(self) -> None:
        """End all items that are still growing. No item is added after that."""
        self._is_over = True
        self._end_attempt()
        for item in self._calls.values():
            if item.status == "in_progress":
                self._abandon(item)

    def _forget_attempt(self) -> None:
        self._attempt.clear()
        self._nameless.clear()
        self._sent = {MessageItem: "", ReasoningItem: ""}

    # --- text ---------------------------------------------------------------------------------------------------------

    def _grow_text(
        self, kind: type[MessageItem] | type[ReasoningItem], delta: str, logprobs: Sequence[dict[str, Any]] = ()
    ) -> None:
        if not isinstance(self._open_text, kind):
            self._end_text("completed")
            prefix = "msg" if kind is MessageItem else "rs"
            item = kind(self._next_id(prefix), len(self._items))
            self._attempt.append(item)
            self._add(item)
            self._emit_at(item, ResponseContentPartAddedEvent, "content_part.added", content_index=0, part=_part(item))
            self._open_text = item
        item = self._open_text
        item.text += delta
        self._sent[kind] += delta
        if isinstance(item, MessageItem):
            item.logprobs += logprobs
            told = [_told(one) for one in logprobs]
            self._emit_at(
                item, ResponseTextDeltaEvent, "output_text.delta", content_index=0, delta=delta, logprobs=told
            )
        else:
            self._emit_at(item, ResponseReasoningTextDeltaEvent, "reasoning_text.delta", content_index=0, delta=delta)

    def _complete_text(self, kind: type[MessageItem] | type[ReasoningItem], whole: str) -> None:
        sent = self._sent[kind]
        if not whole.startswith(sent):
            # The pieces were another text. The conversation continues with the result.
            if isinstance(self._open_text, kind):
                self._end_text("incomplete")
            for item in self._attempt:
                if isinstance(item, kind):
                    item.status = "incomplete"
                    self.replaced.add(item.id)
            sent = ""
        if len(whole) > len(sent):
            self._grow_text(kind, whole[len(sent) :])

    def _end_text(self, status: ItemStatus) -> None:
        item, self._open_text = self._open_text, None
        if item is None:
            return
        item.status = status
        if isinstance(item, MessageItem):
            told = [_told(one) for one in item.logprobs]
            self._emit_at(
                item, ResponseTextDoneEvent, "output_text.done", content_index=0, text=item.text, logprobs=told
            )
        else:
            self._emit_at(item, ResponseReasoningTextDoneEvent, "reasoning_text.done", content_index=0, text=item.text)
        self._emit_at(item, ResponseContentPartDoneEvent, "content_part.done", content_index=0, part=_part(item))
        self._done(item)

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin_approved(self, calls: Iterable[Call]) -> None:
        """Add the items of approved calls of an earlier response, which are about to be run."""
        for call in calls:
            if call.turn == 0 and call.place not in self._calls:
                item = self._begin_call(call.place, call.id, call.name)
                self._grow_call(item, call.arguments)
                self._end_arguments(item)

    def answered(self, answer: ToolAnswer) -> None:
        """Add the answer of a tool that the cluster ran."""
        item = self._calls[answer.place]
        if answer.outcome == Outcome.STARTED or not isinstance(item, McpCallItem):
            return  # the final answer of an asynchronous tool completes the item
        item.take(answer)
        if item.status == "completed":
            self._emit_at(item, ResponseMcpCallCompletedEvent, "mcp_call.completed")
        else:
            self._emit_at(item, ResponseMcpCallFailedEvent, "mcp_call.failed")
        self._done(item)

    def _begin_call(self, place: Place, call_id: str, name: str) -> CallItem:
        self._end_text("completed")
        offer = self._by_name.get(name)
        index = len(self._items)
        item: CallItem
        if is_ours(offer, self._offers):
            answers = self._approvals[place[1]] if place[0] == 0 and place[1] < len(self._approvals) else None
            label, tool = (CLUSTER_LABEL, name) if offer is None else (offer.label, offer.own_name)
            item = McpCallItem(self._next_id("mcp"), index, call_id, name, label, tool, answers)
        elif offer is not None and offer.custom:
            item = CustomCallItem(self._next_id("ctc"), index, call_id, name, offer.namespace)
        else:
            group = None if offer is None else offer.namespace
            item = FunctionCallItem(self._next_id("fc"), index, call_id, name, group)
        self._calls[place] = item
        if place[0]:  # an approved call belongs to no turn of this run
            self._attempt.append(item)
        self._add(item)
        if isinstance(item, McpCallItem):
            self._emit_at(item, ResponseMcpCallInProgressEvent, "mcp_call.in_progress")
        return item

    def _grow_call(self, item: CallItem, delta: str) -> None:
        if not delta:
            return
        item.text += delta
        if isinstance(item, McpCallItem):
            self._emit_at(item, ResponseMcpCallArgumentsDeltaEvent, "mcp_call_arguments.delta", delta=delta)
        elif isinstance(item, CustomCallItem):
            self._grow_input(item, item.reader.feed(delta))
        else:
            self._emit_at(item, ResponseFunctionCallArgumentsDeltaEvent, "function_call_arguments.delta", delta=delta)

    def _grow_input(self, item: CustomCallItem, delta: str) -> None:
        if delta:
            item.input += delta
            self._emit_at(item, ResponseCustomToolCallInputDeltaEvent, "custom_tool_call_input.delta", delta=delta)

    def _finish_call(self, call: Call) -> None:
        offer = self._by_name.get(call.name)
        if offer is not None and offer.approval:
            request_id = approval_request_id(self._run_id, call)
            whole = approval_request(request_id, offer, call)
            self._add_whole(WholeItem(request_id, len(self._items), whole))
            return
        item = self._calls.get(call.place)
        if item is None:
            item = self._begin_call(call.place, call.id, call.name)
        self._grow_call(item, call.arguments[len(item.text) :])
        self._end_arguments(item)
        if not isinstance(item, McpCallItem):
            item.status = "completed"
            self._done(item)

    def _end_arguments(self, item: CallItem) -> None:
        if isinstance(item, McpCallItem):
            done: Any = ResponseMcpCallArgumentsDoneEvent
            self._emit_at(item, done, "mcp_call_arguments.done", arguments=item.text)
        elif isinstance(item, CustomCallItem):
            whole = input_of(item.text)
            if whole.startswith(item.input):
                self._grow_input(item, whole[len(item.input) :])
            item.input = whole
            self._emit_at(item, ResponseCustomToolCallInputDoneEvent, "custom_tool_call_input.done", input=whole)
        else:
            done = ResponseFunctionCallArgumentsDoneEvent
            self._emit_at(item, done, "function_call_arguments.done", arguments=item.text)

    def _abandon(self, item: CallItem) -> None:
        """End an item that is not complete. Its arguments may be cut."""
        item.status = "incomplete"
        self._done(item)

    def _needs_approval(self, name: str) -> bool:
        offer = self._by_name.get(name)
        return offer is not None and offer.approval

    # --- items --------------------------------------------------------------------------------------------------------

    def list_tools(self, label: str, error: str | None = None) -> None:
        """Add the item that lists the tools of a server. ``error`` reports those that cannot be used, if any."""
        item_id = self._next_id("mcpl")
        whole = tool_list(item_id, label, self._offers, error)
        empty = McpListTools(id=item_id, type="mcp_list_tools", server_label=label, tools=[])
        item = WholeItem(item_id, len(self._items), empty)
        self._add(item)
        self._emit_at(item, ResponseMcpListToolsInProgressEvent, "mcp_list_tools.in_progress")
        self._emit_at(item, ResponseMcpListToolsCompletedEvent, "mcp_list_tools.completed")
        item.whole = whole
        self._done(item)

    def summarised(self, summary: str) -> None:
        """Add the item of a summary, which replaces what was before it."""
        item_id = self._next_id("cmp")
        whole = ResponseCompactionItem.model_validate(compaction_item(item_id, summary))
        self._add_whole(WholeItem(item_id, len(self._items), whole))

    def _next_id(self, prefix: str) -> str:
        return output_item_id(prefix, self._run_id, len(self._items))

    def _add(self, item: Item) -> None:
        self._items.append(item)
        self.emit(
            ResponseOutputItemAddedEvent, type="response.output_item.added", output_index=item.index, item=item.model()
        )

    def _add_whole(self, item: WholeItem) -> None:
        self._add(item)
        self._done(item)

    def _done(self, item: Item) -> None:
        self.emit(
            ResponseOutputItemDoneEvent, type="response.output_item.done", output_index=item.index, item=item.model()
        )

    def _emit_at(self, item: Item, kind: Any, name: str, **fields: Any) -> None:
        self.emit(kind, type=f"response.{name}", item_id=item.id, output_index=item.index, **fields)


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log probability as the events of a text have it."""
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}


def _part(item: TextItem) -> dict[str, Any]:
    return item.part().model_dump()


def _is_same(item: CallItem, call: Call) -> bool:
    return item.call_id == call.id and item.name == call.name and call.arguments.startswith(item.text)
