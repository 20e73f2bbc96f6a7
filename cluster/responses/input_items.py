"""The items of a request's `input`: the client's own items, or the output of an earlier response.

Other fields of an item (`status`, `phase`, annotations, ...) do not change what the model reads, and are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses import ResponseItemList
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
)

from cluster.api.content_parts import file_text
from cluster.core.errors import BadRequest
from cluster.core.tools import MAX_CALLED_NAME_LENGTH, is_object
from cluster.runs.events import RunSpec

ENDED = "The call was ended before the tool answered."

MAX_CALL_ID_LENGTH = 256

CallId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CALL_ID_LENGTH)]
CalledName = Annotated[str, StringConstraints(max_length=MAX_CALLED_NAME_LENGTH)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class InputText(_Part):
    """Text of any role."""

    type: Literal["input_text", "output_text", "text"]
    text: str

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return self.text


class Refusal(_Part):
    """The model's refusal, which is text too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return self.refusal


def _not_stored(value: Any) -> Any:
    if value is not None:
        raise ValueError("uploaded files are not read in messages; send the content itself")
    return value


FileId = Annotated[None, BeforeValidator(_not_stored)]


class InputImage(_Part):
    """An image. A model that sees none reads a note in its place, so that a history with one can be continued."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    type: Literal["input_image"]
    image_url: str
    file_id: FileId = None

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return "[image left out: this model reads text only]"

    @property
    def image(self) -> dict[str, Any]:
        """The part of a chat message that has the image."""
        return {"type": "image_url", "image_url": {"url": self.image_url}}


def _not_fetched(value: Any) -> Any:
    if value is not None:
        raise ValueError("files are not fetched; send the content as `file_data`")
    return value


def _readable(data: str) -> str:
    file_text(data, None)
    return data


class InputFile(_Part):
    """A file with text, which the model reads."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    type: Literal["input_file"]
    file_id: FileId = None
    file_url: Annotated[None, BeforeValidator(_not_fetched)] = None
    file_data: Annotated[str, AfterValidator(_readable)]
    filename: str | None = None

    @property
    def shown(self) -> str:
        """The text that the model reads."""
        return file_text(self.file_data, self.filename)


def _part_kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text"):
        return "text"
    if kind in ("input_image", "input_file"):
        return str(kind)
    return "refusal" if kind == "refusal" else None


ContentPart = Annotated[
    Annotated[InputText, Tag("text")]
    | Annotated[Refusal, Tag("refusal")]
    | Annotated[InputImage, Tag("input_image")]
    | Annotated[InputFile, Tag("input_file")],
    Discriminator(
        _part_kind,
        custom_error_type="content_part",
        custom_error_message="content must be a part of the type input_text, input_image, input_file, output_text or "
        "refusal",
    ),
]

_part: TypeAdapter[Any] = TypeAdapter(ContentPart)

Content = str | list[ContentPart]


class _Item(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    id: str | None = Field(None, max_length=MAX_CALL_ID_LENGTH)


class Message(_Item):
    """A message, with or without a type."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content


class FunctionCall(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: str
    status: Any = Field(None, exclude=True)

    @property
    def unfinished(self) -> bool:
        """Whether the call's turn was cut or lost. Without an output, it is no call then."""
        return bool(self.status == "incomplete")


class FunctionCallOutput(_Item):
    """The answer to a function call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class _Text(_Part):
    text: str


class CustomToolCall(_Item):
    """A call of one of the client's custom tools."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: CalledName
    input: str
    status: Any = Field(None, exclude=True)

    @property
    def unfinished(self) -> bool:
        """Whether the call's turn was cut or lost. Without an output, it is no call then."""
        return bool(self.status == "incomplete")


class CustomToolCallOutput(_Item):
    """The answer to a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: Content


class Reasoning(_Item):
    """Reasoning of the model. Its text is in `content`; a summary is not what the model generated."""

    type: Literal["reasoning"]
    summary: list[_Text] = []
    content: list[_Text] | None = None


class McpCall(_Item):
    """A call that the cluster ran, and its answer."""

    type: Literal["mcp_call"]
    server_label: Label
    name: CalledName
    arguments: str
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None
    status: Any = Field(None, exclude=True)

    @property
    def unfinished(self) -> bool:
        """Whether a turn was cut within the call. It is no call then."""
        return self.status == "incomplete" and not is_object(self.arguments)


class McpListTools(_Item):
    """An earlier listing of a server's tools. They are listed again, without a new item."""

    type: Literal["mcp_list_tools"]
    server_label: Label


class McpApprovalRequest(_Item):
    """A call that waits for approval."""

    type: Literal["mcp_approval_request"]
    id: CallId
    server_label: Label
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class McpApprovalResponse(_Item):
    """The approval or denial of a call."""

    type: Literal["mcp_approval_response"]
    approval_request_id: CallId
    approve: bool
    reason: str | None = None


class CompactionItem(_Item):
    """A summary in place of a part of the conversation."""

    type: Literal["compaction"]
    encrypted_content: str


class ItemReference(_Item):
    """An item of a stored response, by its id. It is replaced with the item before anything else is read."""

    type: Literal["item_reference"] | None = None
    id: CallId


class OtherItem(_Item):
    """What a tool of another server did, such as OpenAI's web search. The model does not read it."""

    type: str


InputItem = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | Reasoning
    | McpCall
    | McpListTools
    | McpApprovalRequest
    | McpApprovalResponse
    | CompactionItem
    | ItemReference
    | OtherItem
)

ITEM_TYPES: dict[str, type[BaseModel]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
    "reasoning": Reasoning,
    "mcp_call": McpCall,
    "mcp_list_tools": McpListTools,
    "mcp_approval_request": McpApprovalRequest,
    "mcp_approval_response": McpApprovalResponse,
    "compaction": CompactionItem,
    "item_reference": ItemReference,
}

HOSTED_ITEMS = frozenset(
    (
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
"""Types of items of OpenAI's hosted tools."""


def _item_kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if set(item) == {"id"} else None
    if not isinstance(kind, str):
        return None
    return "other" if kind in HOSTED_ITEMS else kind if kind in ITEM_TYPES else None


AnyItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[McpCall, Tag("mcp_call")]
    | Annotated[McpListTools, Tag("mcp_list_tools")]
    | Annotated[McpApprovalRequest, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponse, Tag("mcp_approval_response")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(
        _item_kind,
        custom_error_type="input_item",
        custom_error_message=f"must be an item of one of the types: {', '.join(ITEM_TYPES)}",
    ),
]


def text_of(content: str | list[InputText | Refusal | InputImage | InputFile]) -> str:
    """Return the text of all parts, each on lines of its own, as chat templates get it."""
    return content if isinstance(content, str) else "\n".join(part.shown for part in content)


def images_in(content: str | list[InputText | Refusal | InputImage | InputFile]) -> list[dict[str, Any]]:
    """Return the images of a content, as parts of a chat message."""
    if isinstance(content, str):
        return []
    return [part.image for part in content if isinstance(part, InputImage)]


def error_text(error: Any) -> str:
    """Return the error text of a failed call, in any form that responses have used."""
    if isinstance(error, dict):
        error = error.get("message", error.get("content"))
    if isinstance(error, list):
        error = "\n".join(
            part["text"] for part in error if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return error if isinstance(error, str) and error else ENDED


# --- the input of a response, page by page ----------------------------------------------------------------------------

MOST_LISTED = 100

DETAILS = ("low", "high", "auto", "original")
"""Values of an image's `detail` that OpenAI's models have. No model reads it here, so a request may have any value."""


def input_items(spec: RunSpec, **page: Any) -> ResponseItemList:
    """Return a page of the items that a request itself brought. Items of earlier responses are not included.

    Args:
        spec: the specification of the response's run.
        page: arguments of `page_of`.

    Raises:
        BadRequest: the page is not valid.
    """
    return ResponseItemList.model_validate(page_of(stored_input(spec), **page))


def stored_input(spec: RunSpec) -> list[dict[str, Any]]:
    """Return all items that a request itself brought, as they are shown.

    Items of hosted tools are left out, because only their types are stored.
    """
    return [shown_item(item) for item in spec.echo.get("input", ()) if item["type"] not in HOSTED_ITEMS]


def page_of(
    items: Sequence[Mapping[str, Any]],
    *,
    order: Literal["asc", "desc"],
    limit: int,
    after: str | None,
    most: int = MOST_LISTED,
) -> dict[str, Any]:
    """Return a page of a list of items, as OpenAI's lists are.

    Args:
        items: all items, the oldest first.
        order: `desc` has the newest item first.
        limit: largest number of items of the page.
        after: id of the item before the page. None: the page is the first.
        most: largest value of ``limit``.

    Raises:
        BadRequest: ``limit`` or ``after`` is not valid.
    """
    if not 1 <= limit <= most:
        raise BadRequest(f"limit must be between 1 and {most}, not {limit}", param="limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"there is no item {after[:256]!r} in the list", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > limit,
    }


def shown_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the input as it is shown, with the fields that the request left out."""
    whole = {"status": "completed", **item}
    match item["type"]:
        case "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            whole["content"] = [_as_part(part, kind) for part in _parts(item["content"])]
        case "function_call_output" | "custom_tool_call_output" if isinstance(item["output"], list):
            whole["output"] = [_as_part(part, "input_text") for part in item["output"]]
        case "reasoning":
            whole["summary"] = [{"type": "summary_text", **part} for part in item.get("summary", ())]
            whole["content"] = [{"type": "reasoning_text", **part} for part in item.get("content", ())]
        case "mcp_call" if "error" in item:
            content = [{"type": "text", "text": error_text(item["error"])}]
            whole |= {"error": {"type": "mcp_tool_execution_error", "content": content}, "status": "failed"}
        case "mcp_list_tools":
            whole["tools"] = []
    return whole


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_part(part: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a part as OpenAI's models have it.

    A part that they do not have at its place, such as an image of an assistant, is the text that the model reads.
    """
    match part["type"]:
        case "refusal" if kind == "output_text":
            return dict(part)
        case "input_image" if kind == "input_text":
            detail = part.get("detail")
            is_known = detail in DETAILS
            return {"type": "input_image", "image_url": part["image_url"], "detail": detail if is_known else "auto"}
        case "input_file" if kind == "input_text":
            return {name: part[name] for name in ("type", "filename", "file_data") if name in part}
    shown: dict[str, Any] = {"type": kind, "text": _part.validate_python(part).shown}
    if kind == "output_text":
        shown["annotations"] = []
    return shown
