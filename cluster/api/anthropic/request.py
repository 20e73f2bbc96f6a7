"""Reads a request of Anthropic's Messages API, and makes the body of a chat completion of it.

What does not concern the answer of a model that runs here is ignored: `service_tier`, `container`, unknown betas.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cluster.api.anthropic.blocks import AnyMessage, Cacheable, CacheControl, Part, TextBlock
from cluster.api.anthropic.conversation import chat_messages
from cluster.api.anthropic.errors import BETA_HEADER, VERSION_HEADER
from cluster.api.anthropic.servers import MAX_SERVERS, McpServer, Server, servers
from cluster.api.anthropic.tools import Offered, Tool, ToolChoice, chat_choice, offered
from cluster.api.reasoning import Effort, template_settings
from cluster.api.validation import validated
from cluster.core.errors import BadRequest

TTL_S = {"5m": 300.0, "1h": 3600.0}
SCHEMA_NAME = "output"

_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")
_BETA = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_BETAS = 64


DISABLED = "disabled"
"""The type of thinking with which the model does not reason."""


class Thinking(Part):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    """All but `disabled` are the same here: chat templates cannot choose where the model reasons."""
    budget_tokens: int | None = Field(None, ge=0)


class OutputFormat(Part):
    """The schema of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    """How the answer is made."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class CountRequest(Cacheable):
    """The body of `/v1/messages/count_tokens`: the fields that make a prompt."""

    model: str | None = None
    messages: list[AnyMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: settings of the chat template."""
    mcp_servers: list[McpServer] | None = Field(None, max_length=MAX_SERVERS)


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop_sequences: list[str] | None = None
    output_format: OutputFormat | None = None
    cache_salt: str | None = Field(None, min_length=1)
    """vLLM's: requests share cached prefixes only with those that have the same salt."""
    vllm_xargs: dict[str, Any] | None = None
    """vLLM's: arguments of its extensions."""
    max_turns: int | None = Field(None, ge=1)
    """Caesura's: the number of turns of a program that the cluster runs."""
    tool_choices: list[ToolChoice] | None = Field(None, max_length=256)
    """Caesura's: the choices of the first turns of a program that the cluster runs, one each."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a request."""

    request: CountRequest
    messages: list[dict[str, Any]]
    """Messages of a chat completion."""
    tools: Offered
    servers: tuple[Server, ...]
    """The MCP servers that the request brings and whose tools are offered."""

    @property
    def runs_here(self) -> bool:
        """Whether the cluster runs tools of this request, so that it is a program and not one turn."""
        return bool(self.tools.here or self.servers)


def check_headers(headers: Mapping[str, str]) -> None:
    """Check the headers of the API's version and betas. Betas that are unknown here are ignored.

    Raises:
        BadRequest: a header is malformed.
    """
    version = headers.get(VERSION_HEADER)
    if version is not None and _VERSION.fullmatch(version.strip()) is None:
        raise _bad(VERSION_HEADER, "must be a date such as 2023-06-01")
    betas = [one.strip() for one in headers.get(BETA_HEADER, "").split(",")]
    if betas == [""]:
        return
    if len(betas) > MAX_BETAS or not all(_BETA.fullmatch(one) for one in betas):
        raise _bad(BETA_HEADER, f"must be at most {MAX_BETAS} names of letters, digits, '.', '_' and '-', with commas")


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    """Read the body of `/v1/messages/count_tokens`.

    Raises:
        BadRequest: it is invalid. ``param`` is the path of the field.
    """
    return _prompt(validated(CountRequest, body))


def read_messages(body: Mapping[str, Any]) -> tuple[MessagesRequest, Prompt]:
    """Read the body of `/v1/messages`.

    Raises:
        BadRequest: it is invalid. ``param`` is the path of the field.
    """
    request = validated(MessagesRequest, body)
    for place, text in enumerate(request.stop_sequences or ()):
        if not text.strip():
            raise _bad(f"stop_sequences.{place}", "must have a character that is not white space")
    return request, _prompt(request)


def _prompt(request: CountRequest) -> Prompt:
    tools = request.tools or ()
    messages = chat_messages(request.system, request.messages)
    return Prompt(request, messages, offered(tools), servers(request.mcp_servers or (), tools))


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a chat completion that make its prompt, except for the effort of reasoning."""
    request = prompt.request
    fields: dict[str, Any] = {"messages": prompt.messages}
    if prompt.tools.functions:
        fields["tools"] = [{"type": "function", "function": function} for function in prompt.tools.functions]
    thinking = {} if request.thinking is None else {"enable_thinking": request.thinking.type != DISABLED}
    if settings := {**thinking, **(request.chat_template_kwargs or {})}:
        fields["chat_template_kwargs"] = settings
    if request.model is not None:
        fields["model"] = request.model
    return fields


def tokenize_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of the request to `/tokenize` that counts a prompt."""
    fields = prompt_fields(prompt)
    if settings := template_settings(_effort(prompt.request), fields.get("chat_template_kwargs")):
        fields["chat_template_kwargs"] = settings
    return fields


def _effort(request: CountRequest) -> str | None:
    """Return the effort of reasoning. None: the request names none, or the model shall not reason."""
    if request.output_config is None or (request.thinking is not None and request.thinking.type == DISABLED):
        return None
    return request.output_config.effort


def sampling_fields(request: MessagesRequest) -> dict[str, Any]:
    """Return the fields of a chat completion that choose its tokens and its cache, without its bound."""
    fields: dict[str, Any] = {}
    for name in ("temperature", "top_p", "top_k", "cache_salt", "vllm_xargs"):
        if (value := getattr(request, name)) is not None:
            fields[name] = value
    if (effort := _effort(request)) is not None:
        fields["reasoning_effort"] = effort
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    wanted = request.output_format or (request.output_config.format if request.output_config is not None else None)
    if wanted is not None:
        schema = {"name": SCHEMA_NAME, "schema": wanted.json_schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def chat_body(request: MessagesRequest, prompt: Prompt) -> dict[str, Any]:
    """Return the body of the chat completion that answers a request.

    Raises:
        BadRequest: `tool_choice` names a tool that is not offered.
    """
    body = {**prompt_fields(prompt), **sampling_fields(request), "max_completion_tokens": request.max_tokens}
    if request.tool_choice is not None and not prompt.runs_here:
        names = [function["name"] for function in prompt.tools.functions]
        choice = chat_choice(request.tool_choice, names)
        if names:
            body["tool_choice"] = choice
            body["parallel_tool_calls"] = not request.tool_choice.disable_parallel_tool_use
    return body


def retention_s(request: CountRequest) -> float | None:
    """Return the longest `ttl` of the request's cache breakpoints in seconds; None: no breakpoint has one.

    A breakpoint without a `ttl` only marks a prefix. Every prefix is cached here, and the policy decides how long.
    """
    return max((TTL_S[one.ttl] for one in _breakpoints(request) if one.ttl is not None), default=None)


def _breakpoints(request: CountRequest) -> Iterator[CacheControl]:
    content = [message.content for message in request.messages]
    blocks = [block for part in (request.system, *content) if isinstance(part, list) for block in part]
    for part in (request, *(request.tools or ()), *blocks):
        if (control := getattr(part, "cache_control", None)) is not None:
            yield control


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)
