"""The body of `POST /v1/responses`: OpenAI's fields, and additional ones.

A field of OpenAI's that is not supported is rejected if the answer would be another conversation's (`prompt`). Other
fields, values and hosted tools that have no effect here are ignored, as other servers do, so that clients work as they
are installed. The response names them (`caesura.ignored`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StringConstraints, Tag

from cluster.api.reasoning import Effort
from cluster.api.validation import validated
from cluster.core.errors import BadRequest
from cluster.responses.input_items import AnyItem, Name, OtherItem
from cluster.responses.tools import (
    MAX_TOOLS,
    AllowedTools,
    ChosenOther,
    CustomTool,
    FunctionTool,
    McpTool,
    NamespaceTool,
    OpenPart,
    OtherTool,
    Tool,
    ToolChoice,
    type_of,
)
from cluster.runs.events import Compaction

MAX_ITEMS = 8192
MAX_FORCED_CHOICES = 64
MAX_IGNORED, MAX_IGNORED_LENGTH = 64, 64
"""Largest number of ignored names that a response lists, and the length at which a name is cut."""

MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
# --- the answer's form ------------------------------------------------------------------------------------------------


class PlainText(OpenPart):
    """The answer may be any text."""

    type: Literal["text"]


class JsonObject(OpenPart):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class JsonSchema(OpenPart):
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
        lambda form: type_of(form, ("text", "json_object", "json_schema")),
        custom_error_type="text_format",
        custom_error_message="must be of the type text, json_object or json_schema",
    ),
]


class Text(OpenPart):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Ignored, because these models have no such setting."""


AnyValue = Annotated[str, StringConstraints(max_length=64)]


class Reasoning(OpenPart):
    """The effort of reasoning. Summaries are not made, because the answer has the reasoning itself.

    `context` and `mode` have no effect, because these models have no such settings.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: AnyValue | None = None
    mode: AnyValue | None = None

    @property
    def ignored(self) -> list[str]:
        """The names of the fields whose values have no effect here."""
        usual = {"context": "auto", "mode": "standard"}
        return [name for name, value in usual.items() if getattr(self, name) not in (None, value)]


LOGPROBS = "message.output_text.logprobs"

INCLUDED = frozenset(
    (
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        LOGPROBS,
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


class ConversationName(OpenPart):
    """A conversation, by its id."""

    id: str = Field(min_length=1, max_length=256)


class CompactionRule(OpenPart):
    """When the conversation is replaced with a summary."""

    type: Literal["compaction"]
    compact_threshold: int = Field(ge=1, le=2**31 - 1)
    """Tokens of the conversation from which on it is summarised before the next turn."""


Unsupported = Annotated[None, BeforeValidator(_refuse)]


def _id_of(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


ConversationId = Annotated[ConversationName, BeforeValidator(_id_of)]


@dataclass(frozen=True, slots=True)
class RequestTool:
    """A function or server of a request."""

    path: str
    """The path of its field, for errors."""
    tool: FunctionTool | CustomTool | McpTool
    namespace: str | None = None
    """The group that it belongs to."""


class CreateResponse(OpenPart):
    """A request for a response."""

    model: str | None = Field(None, max_length=256)
    input: str | Annotated[list[AnyItem], Field(max_length=MAX_ITEMS)] = ""
    instructions: str | None = None
    """A system message at the beginning. It is not kept for a response that continues this one."""
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    conversation: ConversationId | None = None
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
    metadata: Metadata | None = None
    generate: bool | None = None
    """False: the input is kept without a turn, and a later response continues it. OpenAI has it over WebSockets only.
    """

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
    cache_salt: str | None = Field(None, min_length=1)

    context_management: list[CompactionRule] | None = Field(None, max_length=1)

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
    prompt: Unsupported = None

    @property
    def functions(self) -> Iterator[RequestTool]:
        """The functions and servers among the tools, those of namespaces too."""
        for place, tool in enumerate(self.tools or ()):
            if isinstance(tool, NamespaceTool):
                for inner, one in enumerate(tool.tools):
                    yield RequestTool(f"tools.{place}.tools.{inner}", one, tool.name)
            elif not isinstance(tool, OtherTool):
                yield RequestTool(f"tools.{place}", tool)

    @property
    def compaction(self) -> Compaction | None:
        """When the run summarises its conversation. None: never."""
        return Compaction(self.context_management[0].compact_threshold) if self.context_management else None

    @property
    def ignored(self) -> list[str]:
        """What has no effect here: unknown fields, values of fields, and tools and items that nobody can run."""
        found = {name[:MAX_IGNORED_LENGTH] for name in _unknown(self)}
        found |= {f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, OtherTool)}
        found |= {f"include.{one}" for one in self.include or () if one not in INCLUDED}
        if not isinstance(self.input, str):
            found |= {f"input.{item.type}" for item in self.input if isinstance(item, OtherItem)}
        if isinstance(self.tool_choice, AllowedTools):
            found |= {f"tool_choice.{tool.type}" for tool in self.tool_choice.tools if isinstance(tool, ChosenOther)}
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.add("text.verbosity")
        if self.reasoning is not None:
            found |= {f"reasoning.{name}" for name in self.reasoning.ignored}
        return sorted(found)[:MAX_IGNORED]


IGNORED_PARTS = ("tools", "input", "include", "text", "reasoning", "tool_choice")
"""Parts of a request under which ignored names are counted. All other names count as `field`."""


def counted_as(ignored: str) -> str:
    """Return the part of a request that one of its ignored names belongs to."""
    part = ignored.partition(".")[0]
    return part if part in IGNORED_PARTS else "field"


def _unknown(part: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the names of unknown fields of a part and of the parts within, but not those of items of the input."""
    yield from (path + name for name in part.model_extra or ())
    for name, value in part:
        if name == "input" or name in (part.model_extra or ()):
            continue
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, BaseModel):
                yield from _unknown(one, f"{path}{name}.")


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
    "cache_salt",
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
    for place, choice in enumerate(request.tool_choices or ()):
        if isinstance(choice, AllowedTools):
            param = f"tool_choices.{place}"
            raise BadRequest(f"{param}: the choice of one turn cannot be allowed_tools", param=param)
    if request.background and request.store is False:
        raise BadRequest("background: a response that is not stored cannot run in the background", param="background")
    if request.conversation is not None:
        if request.previous_response_id is not None:
            raise BadRequest("conversation: give either it or previous_response_id", param="conversation")
        if request.store is False:
            message = "conversation: a response that is not stored cannot be added to one"
            raise BadRequest(message, param="conversation")
    elif request.previous_response_id is None and not request.input and request.generate is not False:
        raise BadRequest("input: it is empty; send text, or at least one item", param="input")
    return request
