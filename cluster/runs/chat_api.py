"""Chat completions with tools that the cluster runs: the run makes turn after turn with the tools marked `server_side`.

The answer is one assistant message with the text of all turns, without the calls between them. A client that wants to
see the calls uses `/v1/responses` or `/v1/programs`.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cluster.api.openai import RETRY_AFTER_S
from cluster.core.errors import BadRequest, HttpError, IllegalTransition, Overloaded, UpstreamFailed
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolOffer
from cluster.runs.events import (
    STOP_SEQUENCE,
    Accepted,
    Ended,
    Fault,
    Generated,
    Limits,
    RunEvent,
    RunSpec,
    TurnIntent,
    TurnResult,
    require_encodable,
)

MARK = "server_side"
"""The key that marks a tool that the cluster runs."""

BETWEEN_TURNS = "\n\n"
"""Text between the texts of two turns."""

OTHER_TEXT = "a replica failed, and the turn was tried again with another text than was sent; send the request again"

_OWN = frozenset(
    ("messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "model", "store", "user")
)
_UNFIT = ("n", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "kv_transfer_params")
_BOUNDS = {"max_turns": "turns", "max_tool_calls": "tool_calls"}


def asks_for_loop(body: Mapping[str, Any]) -> bool:
    """Return whether a tool of this request is marked."""
    tools = body.get("tools")
    return isinstance(tools, list) and any(isinstance(tool, dict) and MARK in tool for tool in tools)


def chat_spec(
    body: Mapping[str, Any],
    *,
    run_id: str,
    created_s: float,
    identity: ProgramIdentity,
    model: str,
    limits: Limits,
    registered: Mapping[str, ToolOffer],
    sees: bool = False,
) -> RunSpec:
    """Return the run that a chat completions body requests. The first turn's replica checks vLLM's own fields.

    Args:
        body: the body, without the fields that name its program.
        run_id: a new run id.
        created_s: Unix time of the request, in seconds.
        identity: the identity of its program.
        model: the model's name, as clients use it.
        limits: the operator's limits. The request may set lower ones.
        registered: the operator's tools by name.
        sees: whether the model reads images.

    Raises:
        BadRequest: a field is not valid, and ``param`` names it; or a number is too large for the log.
    """
    for name in _UNFIT:
        if body.get(name) not in (None, False, 1 if name == "n" else None):
            raise _bad(name, "is not supported together with tools that the cluster runs")
    if not isinstance(body.get("messages"), list):
        raise _bad("messages", "must be a list")
    for place, message in enumerate(body["messages"]):
        if not isinstance(message, dict):
            raise _bad(f"messages.{place}", "must be an object")
    offers = tuple(_offer(tool, registered, f"tools.{place}") for place, tool in enumerate(body["tools"]))
    sampling = {name: value for name, value in body.items() if name not in _OWN and name not in _BOUNDS}
    asked = {field: _bound(body, name, getattr(limits, field)) for name, field in _BOUNDS.items()}
    for name in ("max_tokens", "max_completion_tokens"):
        sampling.pop(name, None)
        if body.get(name) is not None:
            asked["output_tokens"] = _bound(body, name, limits.output_tokens)
    own = identity.program_id or run_id
    spec = RunSpec(
        id=run_id,
        api="chat",
        tenant=identity.tenant,
        program=own,
        identity=identity.encode(),
        model=model,
        created_s=created_s,
        limits=msgspec.structs.replace(limits, **asked),
        messages=tuple(body["messages"]),
        offers=offers,
        tool_choice=body.get("tool_choice"),
        parallel=body.get("parallel_tool_calls") is not False,
        sampling=sampling,
        store=body.get("store") is True,
        sees=sees,
        last=identity.program_id is None,
    )
    require_encodable(spec)
    return spec


def _offer(tool: Any, registered: Mapping[str, ToolOffer], param: str) -> ToolOffer:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _bad(f"{param}.function.name", "must be a string")
    if tool.get(MARK) is not True:
        raise _bad(param, "tools that the caller runs cannot be mixed with those that the cluster runs")
    known = registered.get(name)
    if known is None:
        there_are = ", ".join(sorted(one.name for one in registered.values() if one.unusable is None)) or "none"
        raise _bad(f"{param}.function.name", f"no tool {name[:200]!r} is registered; registered are: {there_are}")
    if known.unusable is not None:
        raise _bad(f"{param}.function.name", f"the tool {name!r} cannot be used: {known.unusable}")
    return known


def _bound(body: Mapping[str, Any], name: str, most: int) -> int:
    value = body.get(name)
    if value is None:
        return most
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad(name, "must be a positive integer")
    return min(value, most)


def _bad(param: str, message: str) -> BadRequest:
    return BadRequest(f"{param}: {message}", param=param)


class _TurnText:
    """A text of the current turn, as far as it was sent, over all attempts at the turn."""

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._lost = ""
        """What attempts that were lost have sent."""
        self._repeated = 0
        """Number of characters of it that the current attempt has generated."""

    def begin_attempt(self) -> None:
        """Begin another attempt. It has to generate the text that was sent again."""
        self._lost, self._repeated = "".join(self._sent), 0

    def add(self, piece: str) -> str:
        """Return what a piece of the current attempt adds.

        Raises:
            UpstreamFailed: the attempt generates another text.
        """
        repeated = self._lost[self._repeated : self._repeated + len(piece)]
        if not piece.startswith(repeated):
            raise UpstreamFailed(OTHER_TEXT)
        self._repeated += len(repeated)
        self._sent.append(piece[len(repeated) :])
        return self._sent[-1]

    def end(self) -> None:
        """End the turn.

        Raises:
            UpstreamFailed: its last attempt has generated less than was sent.
        """
        if self._repeated < len(self._lost):
            raise UpstreamFailed(OTHER_TEXT)


class ChatFold:
    """Builds a chat completion from a run's events, complete or in chunks.

    If an attempt at a turn is lost after a part of its text was sent, the next attempt must begin with the same text.
    A complete answer needs no `Generated` events, and has what the completed turns have said.
    """

    def __init__(self) -> None:
        self._accepted: RunSpec | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._turns: list[TurnResult] = []
        self._sent = {"content": _TurnText(), "reasoning": _TurnText()}
        self._turn = 0
        self._has_text = False
        """Whether an earlier turn has generated text."""
        self.ended: Ended | None = None

    def feed(self, event: RunEvent) -> dict[str, Any] | None:
        """Process an event. Return the delta that it adds to the message, or None.

        Raises:
            UpstreamFailed: an attempt at a turn was lost, and the next one has generated another text.
        """
        match event:
            case Accepted():
                self._accepted = event.spec
                return {"role": "assistant", "content": ""}
            case TurnIntent():
                for text in self._sent.values():
                    text.begin_attempt()
            case Generated():
                return self._generated(event)
            case TurnResult():
                self._turn_done(event)
            case Ended():
                self.ended = event
        return None

    def _generated(self, event: Generated) -> dict[str, Any] | None:
        delta: dict[str, Any] = {}
        if content := self._sent["content"].add(event.content):
            between = BETWEEN_TURNS if self._has_text and event.turn != self._turn else ""
            self._turn = event.turn
            delta["content"] = between + content
        if reasoning := self._sent["reasoning"].add(event.reasoning):
            delta["reasoning"] = reasoning
        return delta or None

    def _turn_done(self, result: TurnResult) -> None:
        for text in self._sent.values():
            text.end()
        self._sent = {"content": _TurnText(), "reasoning": _TurnText()}
        self._turns.append(result)
        self._has_text = self._has_text or bool(result.content)
        self._texts.append(result.content)
        self._reasoning.append(result.reasoning)

    def completion(self) -> dict[str, Any]:
        """Return the complete answer.

        Raises:
            HttpError: the run failed, or was cancelled.
        """
        message: dict[str, Any] = {
            "role": "assistant",
            "content": BETWEEN_TURNS.join(text for text in self._texts if text),
        }
        if any(self._reasoning):
            message["reasoning"] = "".join(self._reasoning)
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason(), "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage(), "caesura": self._summary()}

    def chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """Return a chunk with ``delta``."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk that `stream_options.include_usage` requests."""
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": self.usage(),
            "caesura": self._summary(),
        }

    def finish_reason(self) -> str:
        """Return the finish reason of the run, which has ended.

        Raises:
            HttpError: the run failed, or was cancelled.
        """
        ended = self.ended
        if ended is None or ended.status == "cancelled":
            raise HttpError("the program was cancelled", code="cancelled")
        if ended.status == "failed":
            raise as_error(ended.fault)
        return "stop" if ended.status == "completed" or ended.reason == STOP_SEQUENCE else "length"

    def usage(self) -> dict[str, Any]:
        """Return the token counts of all turns."""
        prompt = sum(turn.prompt_tokens for turn in self._turns)
        output = sum(turn.output_tokens for turn in self._turns)
        cached = sum(turn.cached_tokens for turn in self._turns)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @property
    def _spec(self) -> RunSpec:
        if self._accepted is None:
            raise IllegalTransition("the log of this completion is empty")
        return self._accepted

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._spec.id, "object": kind, "created": int(self._spec.created_s), "model": self._spec.model}

    def _summary(self) -> dict[str, Any]:
        calls = sum(len(turn.calls) for turn in self._turns)
        return {"program": self._spec.program, "turns": len(self._turns), "tool_calls": calls}


def as_error(fault: Fault | None) -> HttpError:
    """Return the HTTP error for a failed run's fault."""
    if fault is None:
        return HttpError("the program failed")
    if fault.status == Overloaded.status:
        return Overloaded(fault.message, code=fault.code, retry_after_s=RETRY_AFTER_S)
    kind = BadRequest if fault.status < 500 else HttpError
    return kind(fault.message, status=fault.status, param=fault.param, code=fault.code)


async def deltas(fold: ChatFold, batches: AsyncIterator[Sequence[RunEvent]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream, to its end.

    Raises:
        HttpError: the run failed, or was cancelled, or a turn was tried again with another text.
    """
    async for batch in batches:
        for event in _without_lost(batch):
            if (delta := fold.feed(event)) is not None:
                yield fold.chunk(delta)
    yield fold.chunk({}, fold.finish_reason())


def _without_lost(batch: Sequence[RunEvent]) -> Iterator[RunEvent]:
    """Yield events without the pieces of attempts that are known to be lost."""
    last = {event.turn: place for place, event in enumerate(batch) if isinstance(event, TurnIntent)}
    for place, event in enumerate(batch):
        if not isinstance(event, Generated) or place > last.get(event.turn, -1):
            yield event
