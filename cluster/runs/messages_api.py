"""Messages of Anthropic's API with tools that the cluster runs: the run of a request, and its events as a message.

The calls of such tools are `mcp_tool_use` blocks, and their answers `mcp_tool_result` blocks, which no client takes for
calls of its own. A client that sends the blocks back gets the same conversation as the run has had.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cluster.api.anthropic.content import Content, Event, input_of, usage
from cluster.api.anthropic.conversation import MCP_RESULT
from cluster.api.anthropic.errors import in_anthropics_words
from cluster.api.anthropic.request import MessagesRequest, Prompt, sampling_fields
from cluster.api.anthropic.tools import chat_choice, shown_as
from cluster.core.errors import BadRequest, HttpError, IllegalTransition
from cluster.core.program import ProgramIdentity
from cluster.core.tools import Outcome, ToolOffer, ToolSource
from cluster.runs.chat_api import as_error
from cluster.runs.events import (
    MAX_OUTPUT_TOKENS,
    STOP_SEQUENCE,
    Call,
    Ended,
    Generated,
    Limits,
    RunEvent,
    RunSpec,
    ToolAnswer,
    TurnIntent,
    TurnResult,
    require_encodable,
)
from cluster.runs.state import Finish, RunState, begin, next_step, runs_here, step

MESSAGE_PREFIX = "msg_"

NOT_ANSWERED = "unknown: the program ended before this call was answered; it may have taken effect"
"""The answer of a call that was under way when its run ended. A conversation with a call needs an answer."""

FORCED = ("any", "tool")
"""Types of tool choices that apply to the first turn only, because a program ends with a turn that calls no tool."""

# --- the run ----------------------------------------------------------------------------------------------------------


def run_offers(
    prompt: Prompt, functions: Sequence[dict[str, Any]], offered: Sequence[ToolOffer]
) -> tuple[ToolOffer, ...]:
    """Return the tools that the model may call.

    Args:
        prompt: the request.
        functions: OpenAI's function objects of the client's tools.
        offered: the operator's tools, and those of the request's servers.

    Raises:
        BadRequest: a registered tool is unknown, or two tools have one name. ``param`` is the path of the tool.
    """
    servers = {server.name: server for server in prompt.servers}
    registered = {one.name: one for one in offered if one.tool and one.tool.source is ToolSource.OPERATOR}
    made = {function["name"]: ToolOffer(function["name"], function, here=False) for function in functions}
    for place, name in prompt.tools.here:
        if name not in registered:
            there_are = ", ".join(sorted(registered)) or "none"
            raise _bad(f"tools.{place}.name", f"no tool {name[:200]!r} is registered; registered are: {there_are}")
        made[name] = registered[name]
    for offer in offered:
        is_brought = offer.tool is not None and offer.tool.source is ToolSource.REQUEST
        server = servers.get(offer.tool.entry) if is_brought and offer.tool else None
        if server is None or not server.offers(offer.own_name):
            continue
        if offer.name in made:
            raise _bad(f"{server.path}.name", f"there are two tools of the name {offer.name!r}")
        made[offer.name] = msgspec.structs.replace(offer, server=server.name)
    return tuple(made.values())


def messages_spec(
    request: MessagesRequest,
    body: Mapping[str, Any],
    *,
    run_id: str,
    created_s: float,
    identity: ProgramIdentity,
    limits: Limits,
    prompt: Prompt,
    offers: tuple[ToolOffer, ...],
    sees: bool = False,
) -> RunSpec:
    """Return the run that a Messages request asks for. The first turn's replica checks vLLM's own fields.

    Args:
        request: the request.
        body: the chat completion that is made of it, with the id of its model.
        run_id: a new run id.
        created_s: Unix time of the request, in seconds.
        identity: the identity of its program.
        limits: the operator's limits. The request may set lower ones.
        prompt: the request's prompt.
        offers: the tools that the model may call.
        sees: whether the model reads images.

    Raises:
        BadRequest: a tool choice names no tool, or a number is too large for the log.
    """
    first, others = _choices(request, [offer.name for offer in offers])
    sampling = sampling_fields(request)
    if "chat_template_kwargs" in body:
        sampling["chat_template_kwargs"] = body["chat_template_kwargs"]
    spec = RunSpec(
        id=run_id,
        api="messages",
        tenant=identity.tenant,
        program=identity.program_id or run_id,
        identity=identity.encode(),
        model=body["model"],
        created_s=created_s,
        limits=msgspec.structs.replace(
            limits,
            turns=min(request.max_turns or limits.turns, limits.turns),
            output_tokens=min(request.max_tokens, limits.output_tokens),
        ),
        messages=tuple(body["messages"]),
        offers=offers,
        tool_choice=others,
        tool_choices=first,
        parallel=request.tool_choice is None or not request.tool_choice.disable_parallel_tool_use,
        sampling=sampling,
        definitions={server.name: server.definition for server in prompt.servers},
        store=False,
        sees=sees,
        last=identity.program_id is None,
    )
    require_encodable(spec)
    return spec


def _choices(request: MessagesRequest, names: Sequence[str]) -> tuple[tuple[Any, ...], Any]:
    """Return chat completions' tool choices of the first turns, one each, and of the others."""
    listed = tuple(
        chat_choice(choice, names, f"tool_choices.{place}") for place, choice in enumerate(request.tool_choices or ())
    )
    if request.tool_choice is None:
        return listed, None
    choice = chat_choice(request.tool_choice, names)
    return (listed or (choice,), None) if request.tool_choice.type in FORCED else (listed, choice)


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)


# --- its message ------------------------------------------------------------------------------------------------------


class MessagesFold:
    """Builds a message from a run's events, complete or as Anthropic's events.

    If an attempt at a turn is lost after a part of it was generated, the blocks of that part stay, and the next attempt
    begins new ones. Without the `Generated` events, the message has only what the completed turns have said.

    Args:
        places: the places of the client's own tools in the request, for errors. These tools are the run's first ones.
    """

    def __init__(self, places: Sequence[int] = ()) -> None:
        self._places = places
        self._state: RunState | None = None
        self._content = Content()
        self._ids: dict[tuple[int, int], str] = {}
        """Ids of the calls that the cluster runs, by their place."""
        self._sent = {"thinking": "", "text": ""}
        """What the current attempt has said so far."""
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        self._begun = False
        self.output_tokens = 0
        """Number of tokens of the completed turns."""
        self.done = False
        """Whether the run has ended."""

    @property
    def state(self) -> RunState:
        """The state of the run.

        Raises:
            IllegalTransition: nothing was taken.
        """
        if self._state is None:
            raise IllegalTransition("the log of this message is empty")
        return self._state

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        spec = self.state.spec
        head = {"id": spec.id, "type": "message", "role": "assistant", "model": spec.model}
        return {**head, "content": list(self._content.blocks), **self._stop, "usage": self._usage()}

    def take(self, event: RunEvent) -> list[Event]:
        """Process an event. Return Anthropic's events that it makes.

        A run that fails before its first token has no event, so that its error can be the answer of the request.

        Raises:
            HttpError: the run failed, or was cancelled.
        """
        if self._state is None:
            self._state = begin(event)
            return []
        before, self._state = self._state, step(self._state, event)
        start: Event = {} if self._begun else {"type": "message_start", "message": self.message()}
        events = list(self._events(before, event))
        if events and not self._begun:
            self._begun = True
            return [start, *events]
        return events

    def _events(self, before: RunState, event: RunEvent) -> Iterator[Event]:
        match event:
            case TurnIntent():
                yield from self._content.close()
                self._sent = {"thinking": "", "text": ""}
                for late in before.undelivered:
                    yield from self._answer(late)
            case Generated():
                yield from self._grow("thinking", event.reasoning)
                yield from self._grow("text", event.content)
            case TurnResult():
                yield from self._turn(event)
            case ToolAnswer():
                yield from self._answer(event)
            case Ended():
                yield from self._end(event)

    def _grow(self, kind: str, piece: str) -> Iterator[Event]:
        if piece:
            self._sent[kind] += piece
            yield from self._content.grow(kind, piece)

    def _turn(self, result: TurnResult) -> Iterator[Event]:
        """Complete a turn with what its pieces have left out, and with its calls."""
        for kind, whole in (("thinking", result.reasoning), ("text", result.content)):
            sent = self._sent[kind]
            if not whole.startswith(sent):  # the pieces were another text: the conversation goes on with the result
                yield from self._content.close()
                sent = ""
            yield from self._grow(kind, whole[len(sent) :])
        yield from self._content.close()
        self.output_tokens += result.output_tokens
        # Where the run ends now, the cluster answers no call, and a call without an answer fits in no conversation.
        is_last = isinstance(next_step(self.state), Finish)
        for call in result.calls:
            if not runs_here(self.state, call):
                yield from self._content.call(_block("tool_use", call, call.name))
            elif not is_last:
                self._ids[call.place] = call.id
                server, name = shown_as(call.name, self.state.offer(call.name))
                # Only the beta helper of Anthropic's client adds later pieces of the input to such a block.
                yield from self._content.whole({**_block("mcp_tool_use", call, name), "server_name": server})

    def _answer(self, answer: ToolAnswer) -> Iterator[Event]:
        content = [{"type": "text", "text": answer.text}]
        is_error = answer.outcome not in (Outcome.OK, Outcome.STARTED)
        result = {"type": MCP_RESULT, "tool_use_id": self._ids[answer.place], "is_error": is_error}
        yield from self._content.whole({**result, "content": content})

    def _end(self, ended: Ended) -> Iterator[Event]:
        if ended.status == "cancelled":
            raise HttpError("the program was cancelled", code="cancelled")
        if ended.status == "failed":
            raise in_anthropics_words(as_error(ended.fault), self._places)
        self.done = True
        yield from self._content.close()
        for call in self.state.waiting:
            if call.place in self._ids:
                yield from self._answer(ToolAnswer(*call.place, Outcome.UNKNOWN, NOT_ANSWERED))
        for late in self.state.undelivered:
            yield from self._answer(late)
        for place in self.state.late:
            yield from self._answer(ToolAnswer(*place, Outcome.UNKNOWN, NOT_ANSWERED))
        self._stop = self._stopped(ended)
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _stopped(self, ended: Ended) -> dict[str, str | None]:
        last = self.state.turns[-1] if self.state.turns else None
        if last is not None and last.stop_sequence is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_sequence}
        return {"stop_reason": self._reason(ended), "stop_sequence": None}

    def _reason(self, ended: Ended) -> str:
        if ended.reason == MAX_OUTPUT_TOKENS:
            return "max_tokens"
        if any(not runs_here(self.state, call) for call in self.state.waiting):
            return "tool_use"
        if ended.status == "completed" or ended.reason == STOP_SEQUENCE:
            return "end_turn"
        # Only content that ends with a tool's answer can be the last message of the next request.
        last = self._content.blocks[-1]["type"] if self._content.blocks else None
        return "pause_turn" if last == MCP_RESULT else "max_tokens"

    def _usage(self) -> dict[str, int]:
        turns = self.state.turns
        prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
        return usage(prompt, cached, self.state.output_tokens)


def _block(kind: str, call: Call, name: str) -> dict[str, Any]:
    return {"type": kind, "id": call.id, "name": name, "input": input_of(call.arguments)}
