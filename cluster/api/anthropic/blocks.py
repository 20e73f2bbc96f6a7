"""The content blocks of Anthropic's Messages API, as requests have them. Unknown fields of a block are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.core.tools import MAX_CALLED_NAME_LENGTH


class Part(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="ignore", strict=True)


class CacheControl(Part):
    """A cache breakpoint. Only an explicit `ttl` asks for something here, see `request.retention_s`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cacheable(Part):
    """A part that may have a cache breakpoint."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    """A text."""

    type: Literal["text"]
    text: str


class InlineData(Part):
    """Data in base64."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlData(Part):
    """Data that a URL names."""

    type: Literal["url"]
    url: str


class ImageBlock(Cacheable):
    """An image of the user or of a tool. A model that sees none gets a text in its place."""

    type: Literal["image"]
    source: Annotated[InlineData | UrlData, Field(discriminator="type")]


class PlainText(Part):
    """The text of a document."""

    type: Literal["text"]
    data: str


class BlocksOfDocument(Part):
    """A document as blocks."""

    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


class DocumentBlock(Cacheable):
    """A document."""

    type: Literal["document"]
    source: Annotated[PlainText | BlocksOfDocument | InlineData | UrlData, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Cacheable):
    """A search result that the client brings."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]


class ToolReference(Part):
    """The name of a tool that a tool search has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(Part):
    """Reasoning of an earlier turn. Its signature is not checked: a client may change its history here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Part):
    """Encrypted reasoning of another provider. Nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Cacheable):
    """A tool call that the client runs."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(max_length=MAX_CALLED_NAME_LENGTH)
    input: dict[str, Any]


ResultContent = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference, Field(discriminator="type")
]


class ToolResultBlock(Cacheable):
    """The answer of a tool that the client ran."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultContent] | None = None
    is_error: bool | None = None


class ServerToolUseBlock(Cacheable):
    """A tool call that a server ran: this cluster, an MCP server, or another provider."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(max_length=MAX_CALLED_NAME_LENGTH)
    input: dict[str, Any]
    server_name: str | None = None


class ServerToolResultBlock(Cacheable):
    """The answer of a tool that a server ran."""

    type: Literal[
        "mcp_tool_result",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
    ]
    tool_use_id: str
    content: Any = None
    is_error: bool | None = None


class CompactionBlock(Cacheable):
    """A summary of what stood before it."""

    type: Literal["compaction"]
    content: str | None = None


UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock, Field(discriminator="type")
]
AssistantBlock = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ServerToolUseBlock
    | ServerToolResultBlock
    | CompactionBlock,
    Field(discriminator="type"),
]


class UserMessage(Part):
    """A message of the user, or the answers of tools."""

    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Part):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Part):
    """An instruction within the conversation."""

    role: Literal["system"]
    content: str | list[TextBlock]


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
