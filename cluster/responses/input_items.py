"""The items of a request's `input`, as clients send them: their own, or an earlier response's output sent back.

What an item has beside the fields here (`status`, `phase`, annotations, ...) does not change what the model reads, and
is ignored.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

MAX_CALL_ID_LENGTH = 256

CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CALL_ID_LENGTH)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class InputText(_Part):
    """Text, of whoever speaks."""

    type: Literal["input_text", "output_text", "text"]
    text: str

    @property
    def said(self) -> str:
        """What is read of it."""
        return self.text


class Refusal(_Part):
    """The model's refusal: text, too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def said(self) -> str:
        """What is read of it."""
        return self.refusal


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return "text"
    return "refusal" if kind == "refusal" else None


ContentPart = Annotated[
    Annotated[InputText, Tag("text")] | Annotated[Refusal, Tag("refusal")],
    Discriminator(
        _part_kind,
        custom_error_type="content_part",
        custom_error_message="content must be text: a part of the type input_text, output_text or refusal",
    ),
]


Content = str | list[ContentPart]


class _Item(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    id: str | None = Field(None, max_length=MAX_CALL_ID_LENGTH)


class Message(_Item):
    """Something said; also in the easy form, without a type."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class FunctionCall(_Item):
    """A call that the model asked for."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: str


class FunctionCallOutput(_Item):
    """The answer to it."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class _Text(_Part):
    text: str


class Reasoning(_Item):
    """What the model thought. Its text is read from `content`; a summary is not what was generated."""

    type: Literal["reasoning"]
    summary: list[_Text] = []
    content: list[_Text] | None = None


class McpCall(_Item):
    """A call that ran here, and its answer."""

    type: Literal["mcp_call"]
    server_label: Label
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None


class McpListTools(_Item):
    """The tools of a server as they were told before. They are listed afresh; the item is only not told again."""

    type: Literal["mcp_list_tools"]
    server_label: Label


class McpApprovalRequest(_Item):
    """A call that waits for consent."""

    type: Literal["mcp_approval_request"]
    id: CallId
    server_label: Label
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class McpApprovalResponse(_Item):
    """Consent, or the lack of it."""

    type: Literal["mcp_approval_response"]
    approval_request_id: CallId
    approve: bool
    reason: str | None = None


InputItem = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | Reasoning
    | McpCall
    | McpListTools
    | McpApprovalRequest
    | McpApprovalResponse
)

ITEM_TYPES: dict[str, type[BaseModel]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "mcp_call": McpCall,
    "mcp_list_tools": McpListTools,
    "mcp_approval_request": McpApprovalRequest,
    "mcp_approval_response": McpApprovalResponse,
}


def _item_kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message" if "role" in item else None)
    return kind if isinstance(kind, str) and kind in ITEM_TYPES else None


AnyItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[McpCall, Tag("mcp_call")]
    | Annotated[McpListTools, Tag("mcp_list_tools")]
    | Annotated[McpApprovalRequest, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponse, Tag("mcp_approval_response")],
    Discriminator(
        _item_kind,
        custom_error_type="input_item",
        custom_error_message=f"must be an item of one of the types: {', '.join(ITEM_TYPES)} "
        "(no item_reference: previous_response_id brings a response's items)",
    ),
]


def text_of(content: str | list[InputText | Refusal]) -> str:
    """All that is said, without what is between the parts."""
    return content if isinstance(content, str) else "".join(part.said for part in content)
