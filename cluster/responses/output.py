"""Items of a response's output in progress, their conversion to OpenAI's models, and the ids of responses and items.

An item's id depends on the log only, so that all readers of a log give the same id.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.mcp_tool_call_error import McpToolExecutionError
from openai.types.responses.response_output_item import McpApprovalRequest, McpCall, McpListTools, McpListToolsTool
from openai.types.responses.response_reasoning_item import Content as ReasoningContent

from cluster.core.tools import Outcome, ToolOffer
from cluster.responses.custom_tools import InputReader
from cluster.runs.events import Call, ToolAnswer

# --- ids --------------------------------------------------------------------------------------------------------------

RESPONSE_PREFIX = "resp_"


def stem(run_id: str) -> str:
    """Return the part of a run's id that its items' ids share."""
    return run_id.removeprefix(RESPONSE_PREFIX)


def output_item_id(prefix: str, run_id: str, output_index: int) -> str:
    """Return the id of an item of the output."""
    return f"{prefix}_{stem(run_id)}_{output_index:04d}"


def input_item_id(run_id: str, index: int) -> str:
    """Return the id of an item of the input that has none."""
    return f"in_{stem(run_id)}_{index:04d}"


def approval_request_id(run_id: str, call: Call) -> str:
    """Return the id of the approval request for ``call``. It identifies the call."""
    return f"mcpr_{stem(run_id)}_t{call.turn}c{call.index}"


def is_approval_request_id(text: str) -> bool:
    """Return whether the id was made by `approval_request_id`. Such an id is unique."""
    return _APPROVAL_REQUEST_ID.fullmatch(text) is not None


_APPROVAL_REQUEST_ID = re.compile(r"mcpr_[0-9a-f]{32}_t\d{1,9}c\d{1,9}")


# --- items ------------------------------------------------------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]

CLUSTER_LABEL = "caesura"
"""The server label of a call of a tool that does not exist, which the cluster answers with an error."""


@dataclass(slots=True)
class MessageItem:
    """Text of the model."""

    id: str
    index: int
    """Position of the item in the output."""
    text: str = ""
    status: ItemStatus = "in_progress"
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """An entry for each token, if they are wanted."""

    def part(self) -> ResponseOutputText:
        """Return its one part."""
        fields = {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}
        return ResponseOutputText.model_validate(fields)

    def model(self) -> ResponseOutputItem:
        """Return the item as it is now."""
        content = [self.part()] if self.text else []
        return ResponseOutputMessage(
            id=self.id, type="message", role="assistant", status=self.status, content=list(content)
        )


@dataclass(slots=True)
class ReasoningItem:
    """Reasoning of the model."""

    id: str
    index: int
    text: str = ""
    status: ItemStatus = "in_progress"

    def part(self) -> ReasoningContent:
        """Return its one part."""
        return ReasoningContent(type="reasoning_text", text=self.text)

    def model(self) -> ResponseOutputItem:
        """Return the item as it is now."""
        content = [self.part()] if self.text else []
        return ResponseReasoningItem(id=self.id, type="reasoning", summary=[], content=content, status=self.status)


@dataclass(slots=True)
class FunctionCallItem:
    """A call of the caller's function."""

    id: str
    index: int
    call_id: str
    name: str
    namespace: str | None = None
    text: str = ""
    """The arguments, as JSON text."""
    status: ItemStatus = "in_progress"

    def model(self) -> ResponseOutputItem:
        """Return the item as it is now."""
        return ResponseFunctionToolCall(
            id=self.id,
            type="function_call",
            call_id=self.call_id,
            name=self.name,
            namespace=self.namespace,
            arguments=self.text,
            status=self.status,
        )


@dataclass(slots=True)
class CustomCallItem:
    """A call of the caller's custom tool."""

    id: str
    index: int
    call_id: str
    name: str
    namespace: str | None = None
    text: str = ""
    """The arguments of the function that the model called, as JSON text."""
    input: str = ""
    status: ItemStatus = "in_progress"
    reader: InputReader = field(default_factory=InputReader)

    def model(self) -> ResponseOutputItem:
        """Return the item as it is now."""
        return ResponseCustomToolCall.model_validate(
            {
                "id": self.id,
                "type": "custom_tool_call",
                "call_id": self.call_id,
                "name": self.name,
                "namespace": self.namespace,
                "input": self.input,
                "status": self.status,
            }
        )


@dataclass(slots=True)
class McpCallItem:
    """A call that the cluster runs, and its answer. No client takes it for one of its own to run."""

    id: str
    index: int
    call_id: str
    name: str
    server: str
    server_tool: str
    approval_request_id: str | None = None
    text: str = ""
    """The arguments, as JSON text."""
    status: ItemStatus | Literal["failed"] = "in_progress"
    answer: str = ""

    def take(self, answer: ToolAnswer) -> None:
        """Set the answer, which completes the item."""
        self.answer = answer.text
        self.status = "completed" if answer.outcome == Outcome.OK else "failed"

    def model(self) -> ResponseOutputItem:
        """Return the item as it is now."""
        failed = McpToolExecutionError(type="mcp_tool_execution_error", content=[{"type": "text", "text": self.answer}])
        return McpCall(
            id=self.id,
            type="mcp_call",
            server_label=self.server,
            name=self.server_tool,
            arguments=self.text,
            approval_request_id=self.approval_request_id,
            status=self.status,
            output=self.answer if self.status == "completed" else None,
            error=failed if self.status == "failed" else None,
        )


@dataclass(slots=True)
class WholeItem:
    """An item that is complete from the beginning."""

    id: str
    index: int
    whole: ResponseOutputItem
    status: ItemStatus = "completed"

    def model(self) -> ResponseOutputItem:
        """Return the item as its maker has built it, whatever its status here."""
        return self.whole


TextItem = MessageItem | ReasoningItem
CallItem = FunctionCallItem | CustomCallItem | McpCallItem
Item = TextItem | CallItem | WholeItem


def approval_request(item_id: str, offer: ToolOffer, call: Call) -> ResponseOutputItem:
    """Return the item of a call that waits for approval."""
    return McpApprovalRequest(
        id=item_id,
        type="mcp_approval_request",
        server_label=offer.label,
        name=offer.own_name,
        arguments=call.arguments,
    )


def tool_list(item_id: str, label: str, offers: tuple[ToolOffer, ...], error: str | None) -> McpListTools:
    """Return the item with the tools of a server that the model may call. ``error`` reports the others, if any."""
    tools = [
        McpListToolsTool(
            name=offer.own_name,
            description=offer.function.get("description"),
            input_schema=offer.function.get("parameters", {}),
        )
        for offer in offers
        if offer.server == label
    ]
    return McpListTools(id=item_id, type="mcp_list_tools", server_label=label, tools=tools, error=error)
