"""The body of `POST /v1/responses`: OpenAI's fields, and additional ones.

A field of OpenAI's that is not supported is rejected if the answer would be another conversation's (`conversation`,
`prompt`). Other fields, values and hosted tools that have no effect here are ignored, as other servers do, so that
clients work as they are installed. The response names them (`caesura.ignored`).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)

from cluster.api.validation import validated
from cluster.config.tools import SEPARATOR
from cluster.core.errors import BadRequest
from cluster.responses.input_items import AnyItem, Label, Name

MAX_TOOLS = 128
MAX_ITEMS = 8192
MAX_FORCED_CHOICES = 64
MAX_HEADERS = 32
MAX_IGNORED, MAX_IGNORED_LENGTH = 64, 64
"""Largest number of ignored names that a response lists, and the length at which a name is cut."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]{0,8192}$")]
ServerTool = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


# --- tools ------------------------------------------------------------------------------------------------------------


class FunctionTool(_Part):
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


class ToolFilter(_Part):
    """A selection of a server's tools."""

    tool_names: list[ServerTool] | None = Field(None, max_length=512)
    read_only: bool | None = None
    """The server's `readOnlyHint` of the tool. A tool without the hint is not read-only."""

    def matches(self, name: str, read_only: bool) -> bool:
        """Return whether the tool is selected."""
        named = self.tool_names is None or name in self.tool_names
        return named and (self.read_only is None or self.read_only == read_only)


class ApprovalFilter(_Part):
    """The tools that need approval. A tool that neither filter selects needs it."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


def _unambiguous(label: str) -> str:
    if SEPARATOR in label or label.endswith("_"):
        raise ValueError(
            f"must not contain {SEPARATOR!r} nor end with '_': a tool's name begins with label and {SEPARATOR}"
        )
    return label


class McpTool(_Part):
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


class NamespaceTool(_Part):
    """A group of functions. Each of them is offered to the model by its own name."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    type: Literal["namespace"]
    name: Name
    tools: list[FunctionTool] = Field(max_length=MAX_TOOLS)


class OtherTool(_Part):
    """A tool that nobody here can run, such as OpenAI's `web_search`. It is left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    type: str = Field(min_length=1, max_length=64)


def _type_of(value: Any, known: tuple[str, ...]) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if kind in known else None


def _tool_kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "mcp", "namespace") else "other"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(
        _tool_kind, custom_error_type="tool_type", custom_error_message="must be an object with the type of a tool"
    ),
]


class ChosenFunction(_Part):
    """A function that must be called."""

    type: Literal["function"]
    name: Name


class ChosenMcpTool(_Part):
    """A tool of a server that must be called."""

    type: Literal["mcp"]
    server_label: Label
    name: ServerTool | None = None


def _choice_kind(choice: Any) -> str | None:
    return "word" if choice in ("auto", "none", "required") else _type_of(choice, ("function", "mcp"))


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[ChosenFunction, Tag("function")]
    | Annotated[ChosenMcpTool, Tag("mcp")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message="must be auto, none, required, or an object of the type function or mcp",
    ),
]


# --- the answer's form ------------------------------------------------------------------------------------------------


class PlainText(_Part):
    """The answer may be any text."""

    type: Literal["text"]


class JsonObject(_Part):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Part):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormat = Annotated[
    Annotated[PlainText, Tag("text")]
    | Annotated[JsonObject, Tag("json_object")]
    | Annotated[JsonSchema, Tag("json_schema")],
    Discriminator(
        lambda form: _type_of(form, ("text", "json_object", "json_schema")),
        custom_error_type="text_format",
        custom_error_message="must be of the type text, json_object or json_schema",
    ),
]


class Text(_Part):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored, because these models have no such setting."""


class Reasoning(_Part):
    """The effort of reasoning. Summaries are not made, because the answer has the reasoning itself."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


INCLUDED = frozenset(
    (
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""Values of `include` with which nothing is missing. Most request more of items that never occur here. Encrypted
reasoning is returned unencrypted, so that a client that keeps its own history sends it back unchanged."""


def _refuse(value: Any) -> Any:
    if value is not None:
        raise ValueError("is not supported here")
    return value


Unsupported = Annotated[None, BeforeValidator(_refuse)]


class CreateResponse(_Part):
    """A request for a response."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    model: str | None = Field(None, max_length=256)
    input: str | Annotated[list[AnyItem], Field(max_length=MAX_ITEMS)] = ""
    instructions: str | None = None
    """A system message at the beginning. It is not kept for a response that continues this one."""
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, le=2**31 - 1)
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    """Largest number of generated tokens of all turns together."""
    text: Text | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    background: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)

    # Ours.
    tool_choices: list[ToolChoice] | None = Field(None, max_length=MAX_FORCED_CHOICES)
    """`tool_choice` of the first turns, one each. `tool_choice` applies to later turns."""
    max_turns: int | None = Field(None, ge=1, le=2**31 - 1)
    """Largest number of turns of the model, within the operator's limit. The last turn may call no tool."""

    # vLLM's, of sampling and of the chat template; each turn's replica looks at them.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    # OpenAI's, of which some values have no effect here.
    include: list[Annotated[str, StringConstraints(max_length=128)]] | None = Field(None, max_length=64)
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    # OpenAI's, without a meaning here.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Any = None
    stream_options: Any = None
    client_metadata: Any = None

    # OpenAI's, unsupported.
    conversation: Unsupported = None
    prompt: Unsupported = None
    context_management: Unsupported = None

    @property
    def functions(self) -> Iterator[tuple[str, FunctionTool | McpTool]]:
        """The functions and servers among the tools, those of namespaces too, each with the path of its field."""
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, NamespaceTool):
                yield from ((f"tools.{place}.tools.{inner}", one) for inner, one in enumerate(tool.tools))
            elif not isinstance(tool, OtherTool):
                yield f"tools.{place}", tool

    @property
    def ignored(self) -> list[str]:
        """What has no effect here: unknown fields, values of fields, and tools that nobody can run."""
        found = {name[:MAX_IGNORED_LENGTH] for name in self.model_extra or ()}
        found |= {f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, OtherTool)}
        found |= {f"include.{one}" for one in self.include or () if one not in INCLUDED}
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.add("text.verbosity")
        if self.truncation == "auto":
            found.add("truncation")
        if self.top_logprobs:
            found.add("top_logprobs")
        return sorted(found)[:MAX_IGNORED]


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "chat_template_kwargs",
    "vllm_xargs",
)
"""Fields that chat completions have too."""


def read_request(body: Mapping[str, Any]) -> CreateResponse:
    """Parse ``body``, and check what can be checked without other data.

    Args:
        body: the JSON object, without the fields that name its program (`cluster.core.identity`).

    Raises:
        BadRequest: a field is not valid. ``param`` names it.
    """
    request = validated(CreateResponse, body)
    if sum(1 for _ in request.functions) > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS} functions and servers, with those of namespaces", param="tools")
    if request.background and request.store is False:
        raise BadRequest("background: a response that is not stored cannot run in the background", param="background")
    if request.previous_response_id is None and not request.input:
        raise BadRequest("input: it is empty; send text, or at least one item", param="input")
    return request
