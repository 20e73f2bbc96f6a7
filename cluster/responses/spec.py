"""Converts a request for a response to the specification of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from cluster.core.errors import BadRequest
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolOffer
from cluster.responses.conversation import Conversation, History, InputCalls, history, system_message
from cluster.responses.events import ResponseFold
from cluster.responses.input_items import InputItem, McpListTools, Message
from cluster.responses.offers import (
    Listing,
    Registered,
    RequestTools,
    brought,
    chat_choice,
    offers,
    shown_tools,
    unusable,
)
from cluster.responses.output import input_item_id
from cluster.responses.references import resolved
from cluster.responses.request import LOGPROBS, SAMPLING, CreateResponse, JsonObject, JsonSchema
from cluster.runs.compaction import kept
from cluster.runs.events import Limits, Prior, RunSpec, require_encodable
from cluster.runs.state import RunState

_RENDERED = ("reasoning_effort", "chat_template_kwargs")
"""Sampling fields that the chat template uses."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Values for a run that are not in its request."""

    run_id: str
    created_s: float
    """Unix time in seconds."""
    identity: ProgramIdentity
    model: str
    limits: Limits
    """The operator's limits. A request may set lower ones."""
    registered: Registered = field(default_factory=dict)
    """The operator's tools by name."""
    listings: Listing = field(default_factory=dict)
    """Listings of the MCP servers that the request brings (`brought`)."""
    previous: RunState | None = None
    """The final state of the run that `previous_response_id` names, or None."""
    referred: Mapping[str, ResponseFold] = field(default_factory=dict)
    """The responses whose items the request names, as far as they exist, by id."""
    continuable: bool = False
    """Whether the response can be continued even if it is not stored."""
    earlier: tuple[InputItem, ...] = ()
    """Items of the request's conversation after ``previous``."""
    known: int = 0
    """Number of entries of the request's conversation."""
    sees: bool = False
    """Whether the model reads images."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to be started."""

    spec: RunSpec
    brought: RequestTools
    """The request's own tools. Their secrets are not in ``spec``."""
    conversation: str | None = None
    """The conversation that the run is added to, if it still has ``known`` entries."""
    known: int = 0


def run_spec(request: CreateResponse, around: RequestContext) -> RunRequest:
    """Return the run that ``request`` asks for.

    Raises:
        BadRequest: a field is not valid. ``param`` names it.
    """
    if request.previous_response_id is not None and around.previous is None:
        raise _not_found(request.previous_response_id)
    request = resolved(request, around.referred)
    servers = brought(request)
    offered = offers(request, around.registered, around.listings)
    items = request.input if not isinstance(request.input, str) else _as_items(request.input)
    read, first = (*around.earlier, *items), -len(around.earlier)
    given = InputCalls.of(read, first, sees=around.sees)
    before = _before(request, around.previous, given)
    conversation = Conversation(given, offered, before.approved, sees=around.sees)
    conversation.add_all(read, first)
    _require_offered(conversation, offered)
    if request.generate is False and conversation.approved:
        raise BadRequest("generate: an approved call runs only in a response with a turn", param="generate")
    sampling = _sampling(request)
    identity = _identity(request, around)
    spec = RunSpec(
        id=around.run_id,
        api="responses",
        tenant=identity.tenant,
        program=str(identity.program_id),
        identity=identity.encode(),
        model=around.model,
        created_s=around.created_s,
        limits=_limits(request, around.limits),
        messages=(*(kept(before.messages) if conversation.summarised else before.messages), *conversation.messages),
        prior=None if conversation.summarised else _same_prefix(before.prior, around, offered, sampling),
        offers=offered,
        tool_choice=chat_choice(request.tool_choice, offered, "tool_choice"),
        tool_choices=tuple(
            chat_choice(choice, offered, f"tool_choices.{place}")
            for place, choice in enumerate(request.tool_choices or ())
        ),
        parallel=request.parallel_tool_calls is not False,
        sampling=sampling,
        definitions=servers.definitions,
        approved=tuple(conversation.approved),
        background=bool(request.background),
        store=request.store is not False,
        unread=() if conversation.summarised else before.unread,
        compaction=request.compaction,
        truncate=request.truncation == "auto",
        last=request.store is False and around.identity.program_id is None and not around.continuable,
        generate=request.generate is not False,
        sees=around.sees,
        previous=request.previous_response_id,
        echo=_echo(request, around, items, (*before.approval_ids, *conversation.approval_ids)),
    )
    require_encodable(spec)
    name = None if request.conversation is None else request.conversation.id
    return RunRequest(spec, servers, name, around.known)


def _as_items(text: str) -> list[InputItem]:
    return [Message(role="user", content=text)] if text else []


def _before(request: CreateResponse, previous: RunState | None, given: InputCalls) -> History:
    if previous is not None:
        return history(previous, request.instructions, given)
    return History(() if request.instructions is None else (system_message(request.instructions),))


def _identity(request: CreateResponse, around: RequestContext) -> ProgramIdentity:
    """Return the identity with its program.

    The program is that of the first response of the conversation, or the conversation, unless the request names one.
    """
    if around.identity.program_id is not None:
        return around.identity
    program = around.run_id if request.conversation is None else request.conversation.id
    if around.previous is not None:
        program = around.previous.spec.program
    return replace(around.identity, program_id=program)


def _limits(request: CreateResponse, most: Limits) -> Limits:
    def least(asked: int | None, limit: int) -> int:
        return limit if asked is None else min(asked, limit)

    limits: Limits = msgspec.structs.replace(
        most,
        turns=least(request.max_turns, most.turns),
        tool_calls=least(request.max_tool_calls, most.tool_calls),
        output_tokens=least(request.max_output_tokens, most.output_tokens),
    )
    return limits


def _sampling(request: CreateResponse) -> dict[str, Any]:
    sampling = {name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None}
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        sampling |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.reasoning is not None and request.reasoning.effort is not None:
        sampling["reasoning_effort"] = request.reasoning.effort
    form = None if request.text is None else request.text.format
    if isinstance(form, JsonObject):
        sampling["response_format"] = {"type": "json_object"}
    if isinstance(form, JsonSchema):
        schema = form.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"type"})
        sampling["response_format"] = {"type": "json_schema", "json_schema": schema}
    return sampling


def _same_prefix(
    prior: Prior | None, around: RequestContext, offered: Sequence[ToolOffer], sampling: Mapping[str, Any]
) -> Prior | None:
    """Return ``prior`` if the template renders the earlier messages as before, else None.

    It also uses tools and settings.
    """
    if prior is None or around.previous is None:
        return None
    spec = around.previous.spec
    same_tools = [offer.function for offer in spec.offers] == [offer.function for offer in offered]
    same_settings = all(spec.sampling.get(key) == sampling.get(key) for key in _RENDERED)
    return prior if same_tools and same_settings and spec.model == around.model else None


def _require_offered(conversation: Conversation, offered: Sequence[ToolOffer]) -> None:
    for call in conversation.approved:
        # The tool must be the approved one. Another one may have its name now.
        if not any(offer.name == call.name and offer.tool is not None and offer.tool == call.tool for offer in offered):
            raise BadRequest(f"tools: the approved call's tool {call.name!r} is not among them", param="tools")


def _echo(
    request: CreateResponse, around: RequestContext, items: Sequence[InputItem], approvals: Sequence[str]
) -> dict[str, Any]:
    known = {item.server_label for item in items if isinstance(item, McpListTools)}
    if around.previous is not None:
        known |= set(around.previous.spec.definitions)
    echo: dict[str, Any] = {
        "instructions": request.instructions,
        "tools": shown_tools(request),
        "tool_choice": _dumped(request.tool_choice) or "auto",
        "text": _dumped(request.text) or {"format": {"type": "text"}},
        "reasoning": _reasoning(request),
        "metadata": request.metadata or {},
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "user": _word(request.user),
        "safety_identifier": _word(request.safety_identifier),
        "prompt_cache_key": _word(request.prompt_cache_key),
        "input": [
            {"id": input_item_id(around.run_id, place), **item.model_dump(mode="json", exclude_none=True)}
            for place, item in enumerate(items)
        ],
        "approvals": list(approvals),
        "ignored": request.ignored or None,
        "conversation": _dumped(request.conversation),
        "told_servers": [label for label in brought(request).definitions if label not in known],
        "unusable_tools": unusable(around.listings) or None,
    }
    return {key: value for key, value in echo.items() if value is not None}


def _reasoning(request: CreateResponse) -> Any:
    """Return the settings of reasoning that hold. OpenAI's models of a response reject unknown values."""
    if request.reasoning is None:
        return None
    ignored = request.reasoning.ignored
    return {name: value for name, value in _dumped(request.reasoning).items() if name not in ignored}


def _dumped(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _not_found(response_id: str | None) -> BadRequest:
    return BadRequest(
        f"Previous response with id '{response_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
