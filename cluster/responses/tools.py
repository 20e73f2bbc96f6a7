"""The tools of a request for a response, and its choices among them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from cluster.core.tools import SEPARATOR
from cluster.responses.input_items import Label, Name

MAX_TOOLS = 128
MAX_HEADERS = 32

HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{0,8192}$")]
ServerTool = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Part(BaseModel):
    """A part of a request. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class OpenPart(BaseModel):
    """A part of a request whose unknown fields are ignored, and named in the response."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")


class FunctionTool(OpenPart):
    """A function that the caller runs, or with `server_side` one of the operator's tools, which the cluster runs."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_side: bool = False
    """Additional field. If true, this is the registered tool of this name, with its registered description and
    parameters."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None


class TextFormat(OpenPart):
    """The format of a custom tool whose input is text without a grammar."""

    type: Literal["text"]


class Grammar(OpenPart):
    """Text of a grammar. The model reads the grammar, and is not forced to follow it."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(max_length=65_536)


class CustomTool(OpenPart):
    """A tool of the caller whose argument is one text. The model is offered a function with one string."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: TextFormat | Grammar | None = Field(None, discriminator="type")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolFilter(Part):
    """A selection of a server's tools."""

    tool_names: list[ServerTool] | None = Field(None, max_length=512)
    read_only: bool | None = None
    """The server's `readOnlyHint` of the tool. A tool without the hint is not read-only."""

    def matches(self, name: str, read_only: bool) -> bool:
        """Return whether the tool is selected."""
        named = self.tool_names is None or name in self.tool_names
        return named and (self.read_only is None or self.read_only == read_only)


class ApprovalFilter(Part):
    """The tools that need approval. A tool that neither filter selects needs it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


def _unambiguous(label: str) -> str:
    if SEPARATOR in label or label.endswith("_"):
        raise ValueError(
            f"must not contain {SEPARATOR!r} nor end with '_': a tool's name begins with label and {SEPARATOR}"
        )
    return label


class McpTool(Part):
    """A remote MCP server. `authorization` and `headers` are secret: they are neither stored nor repeated."""

    type: Literal["mcp"]
    server_label: Annotated[Label, AfterValidator(_unambiguous)]
    server_url: str = Field(pattern=r"^https?://\S+$", max_length=4096)
    server_description: str | None = Field(None, max_length=4096)
    allowed_tools: list[ServerTool] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None
    authorization: str | None = Field(None, max_length=8192, pattern=r"^[\x20-\x7e]*$", repr=False)
    headers: dict[HeaderName, HeaderValue] | None = Field(None, max_length=MAX_HEADERS, repr=False)
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def allows(self, name: str, read_only: bool) -> bool:
        """Return whether the model may call this tool of the server."""
        if isinstance(self.allowed_tools, ToolFilter):
            return self.allowed_tools.matches(name, read_only)
        return self.allowed_tools is None or name in self.allowed_tools

    def needs_approval(self, name: str, read_only: bool) -> bool:
        """Return whether the caller has to approve each call of this tool."""
        if isinstance(self.require_approval, ApprovalFilter):
            always, never = self.require_approval.always, self.require_approval.never
            if always is not None and always.matches(name, read_only):
                return True
            return never is None or not never.matches(name, read_only)
        return self.require_approval != "never"


class OtherTool(BaseModel):
    """A tool that nobody here can run, such as OpenAI's `web_search`. It is left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    type: str = Field(min_length=1, max_length=64)


def _tool_kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "custom", "mcp", "namespace") else "other"


def _grouped_kind(tool: Any) -> str | None:
    kind = _tool_kind(tool)
    return kind if kind in ("function", "custom") else None


GroupedTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
    Discriminator(
        _grouped_kind, custom_error_type="tool_type", custom_error_message="must be of the type function or custom"
    ),
]


class NamespaceTool(OpenPart):
    """A group of functions. Each of them is offered to the model by its own name."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[GroupedTool] = Field(max_length=MAX_TOOLS)


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(
        _tool_kind, custom_error_type="tool_type", custom_error_message="must be an object with the type of a tool"
    ),
]


class ChosenFunction(Part):
    """A function or custom tool that must be called."""

    type: Literal["function", "custom"]
    name: Name


class ChosenMcpTool(Part):
    """A tool of a server that must be called, or all tools of a server."""

    type: Literal["mcp"]
    server_label: Label
    name: ServerTool | None = None


class ChosenOther(BaseModel):
    """A tool that nobody here can run. It cannot be chosen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    type: str


def type_of(value: Any, known: tuple[str, ...]) -> str | None:
    """Return the type that a part names, if it is among ``known``."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if kind in known else None


def _allowed_kind(choice: Any) -> str | None:
    kind = _tool_kind(choice)
    return kind if kind in ("function", "custom", "mcp") else kind and "other"


class AllowedTools(Part):
    """The tools that the model may call. It is not offered the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[ChosenFunction, Tag("function")]
            | Annotated[ChosenFunction, Tag("custom")]
            | Annotated[ChosenMcpTool, Tag("mcp")]
            | Annotated[ChosenOther, Tag("other")],
            Discriminator(
                _allowed_kind,
                custom_error_type="tool_type",
                custom_error_message="must be an object with the type of a tool",
            ),
        ]
    ] = Field(min_length=1, max_length=MAX_TOOLS)


def _choice_kind(choice: Any) -> str | None:
    if choice in ("auto", "none", "required"):
        return "word"
    return type_of(choice, ("function", "custom", "mcp", "allowed_tools"))


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[ChosenFunction, Tag("function")]
    | Annotated[ChosenFunction, Tag("custom")]
    | Annotated[ChosenMcpTool, Tag("mcp")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="must be auto, none, required, or an object of the type function, custom, mcp or "
        "allowed_tools",
    ),
]
