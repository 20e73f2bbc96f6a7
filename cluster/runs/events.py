"""The specification of a run, and the events in its log, from which `cluster.runs.state` computes its state.

A *program* is a conversation. A *run* is the part of it that one request starts: turns and tools until the model is
done, a limit is reached, or the caller has to act. Every event is written to the log before anybody acts on it.
"""

from typing import Any, Literal

import msgspec

from cluster.core.errors import BadRequest
from cluster.core.tools import ToolId, ToolOffer
from cluster.core.turn import CallDelta

Status = Literal["completed", "incomplete", "failed", "cancelled"]

MAX_OUTPUT_TOKENS = "max_output_tokens"
MAX_TURNS = "max_turns"
MAX_WALL_TIME = "max_wall_time"
STOP_SEQUENCE = "stop_sequence"
"""End reason of a run whose turn was ended by a stop string within a tool call."""


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of an event."""


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """An entry of the log."""


class Call(_Word, frozen=True):
    """One tool call of a turn."""

    turn: int
    """Number of the turn in its run, from 1. 0: an earlier run requested the call, and it is approved in this one."""
    index: int
    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    consent: str | None = None
    """Id of the approval request that the user granted. The call runs once under it. None: the call needed no approval.
    """
    tool: ToolId | None = None
    """The tool that the user has approved. None: the call is of a turn of this run, and its tool is that of its name.
    """

    @property
    def place(self) -> tuple[int, int]:
        """The call's place, which is unique in its run even where a model repeats an id."""
        return self.turn, self.index


class Limits(_Word, frozen=True):
    """Limits of a run, which end it if it does not end by itself."""

    turns: int
    tool_calls: int
    output_tokens: int
    """Generated tokens of all turns together."""
    wall_s: float
    turn_attempts: int
    """Number of times that a turn is tried if its replica or its runner fails."""


class Prior(_Word, frozen=True):
    """The conversation that a run continues, as token ids."""

    token_ids: bytes
    messages: int
    """Number of the run's messages that the ids represent."""


class Compaction(_Word, frozen=True):
    """When the run replaces the middle of its conversation with a summary, see `cluster.runs.compaction`."""

    threshold: int
    """Tokens of the conversation from which on a summary is written before the next turn."""
    tokens: int = 0
    """Tokens of the conversation before the first turn."""
    alone: bool = False
    """Whether the run is nothing but the summary, however short the conversation is."""


class RunSpec(_Word, frozen=True):
    """The complete specification of a run."""

    id: str
    api: Literal["responses", "chat", "messages"]
    tenant: str
    program: str
    """The program's id, without its tenant."""
    identity: str
    """The encoded `ProgramIdentity` of the request."""
    model: str
    created_s: float
    """Unix time in seconds."""
    limits: Limits
    messages: tuple[dict[str, Any], ...]
    """The conversation so far as chat completions messages, with the request's own input."""
    prior: Prior | None = None
    offers: tuple[ToolOffer, ...] = ()
    tool_choice: Any = None
    """The value of chat completions' `tool_choice`. None: the model chooses."""
    tool_choices: tuple[Any, ...] = ()
    """Tool choices of the first turns, one each, before `tool_choice` applies."""
    parallel: bool = True
    """Whether a turn may call several tools."""
    sampling: dict[str, Any] = {}
    """Other fields of a chat completions body, which each turn gets."""
    definitions: dict[str, Any] = {}
    """Tools that the request brought, as in the configuration, without their secrets."""
    approved: tuple[Call, ...] = ()
    """Calls of the conversation's last assistant message that are run before the first turn."""
    background: bool = False
    store: bool = True
    last: bool = False
    """Whether nobody can continue its program. The program's memory is then freed at the end."""
    unread: tuple[int, ...] = ()
    """Places in ``messages`` of answers of the cluster's tools that no turn has read. They are shortened if they do not
    fit."""
    compaction: Compaction | None = None
    truncate: bool = False
    """Whether the oldest messages are dropped if the conversation does not fit in the context window."""
    generate: bool = True
    """Whether the model is asked. False: the run ends at once, so that a later run continues its messages."""
    sees: bool = False
    """Whether the model reads images. Those of tools' answers are kept then."""
    previous: str | None = None
    """Id of the run whose conversation this one continues, or None."""
    echo: dict[str, Any] = {}
    """Fields that the API repeats in its answer and the run does not use."""


class Fault(_Word, frozen=True):
    """The reason why a run failed."""

    code: str
    message: str
    status: int = 500
    """The HTTP status of the fault."""
    param: str | None = None


class Accepted(_Event, frozen=True):
    """The first entry of a log."""

    spec: RunSpec


class TurnIntent(_Event, frozen=True):
    """A turn is about to be requested. Answers of asynchronous tools that have arrived are in its prompt."""

    turn: int
    attempt: int = 1
    summary: bool = False
    """Whether the turn writes a summary of the conversation."""


class Generated(_Event, frozen=True):
    """What a turn has generated since the last such event."""

    turn: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    logprobs: tuple[dict[str, Any], ...] = ()
    """Log probabilities of the content's tokens, see `cluster.core.turn.TurnDelta`."""


class TurnResult(_Event, frozen=True):
    """A turn that completed."""

    turn: int
    continued: bool
    """Whether its prompt began with all earlier ids. Otherwise it was rendered again, and `added_ids` are the whole
    prompt."""
    rendering: str
    """A value of `cluster.core.turn.PromptMode`."""
    added_ids: bytes
    output_ids: bytes
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    began_s: float
    """Seconds since the run was accepted, or since its runner took it over."""
    ended_s: float
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    """The complete calls, by `cluster.core.tools.split_complete`."""
    unfinished: tuple[Call, ...] = ()
    """The call within which the turn was cut."""
    answer_chars: int | None = None
    """Characters that its prompt has of each longer answer of a tool, see `cluster.core.answer_cut`. None: it has all
    answers whole."""
    summary: bool = False
    """Whether its content is a summary, which replaces the middle of the conversation."""
    stop_sequence: str | None = None
    """The stop string that ended it. None: something else did."""


class ToolIntent(_Event, frozen=True):
    """These calls are about to be run."""

    places: tuple[tuple[int, int], ...]


class EarlyIntent(_Event, frozen=True):
    """A call of a turn that goes on is about to be run. Its tool is idempotent or read-only."""

    call: Call
    attempt: int
    """Number of the attempt at the turn."""


class EarlyEnd(_Event, frozen=True):
    """The answer of a call that was started early is not used, because its turn failed, or has not made this call."""

    turn: int
    index: int
    attempt: int
    outcome: str
    """A value of `cluster.core.tools.Outcome`. UNKNOWN: the runner that started it is gone."""

    @property
    def place(self) -> tuple[int, int]:
        """The call's place."""
        return self.turn, self.index


class ToolAnswer(_Event, frozen=True):
    """The answer of a call.

    ``outcome`` is a value of `cluster.core.tools.Outcome`; after STARTED a `LateAnswer` follows.
    """

    turn: int
    index: int
    outcome: str
    text: str
    truncated: bool = False
    queue_s: float = 0.0
    run_s: float = 0.0
    attempts: int = 0
    images: tuple[str, ...] = ()
    """Its images as `data:` URLs. Each has its place in the text, see `cluster.core.tools.IN_NEXT_MESSAGE`."""

    @property
    def place(self) -> tuple[int, int]:
        """The call's place."""
        return self.turn, self.index


class LateAnswer(_Event, frozen=True):
    """The answer of an asynchronous tool."""

    answer: ToolAnswer


class Truncated(_Event, frozen=True):
    """The turn's prompt did not fit. The oldest messages are dropped, and the turn is tried again."""

    groups: int
    """Number of groups of `cluster.runs.truncation.droppable`."""


class TakenOver(_Event, frozen=True):
    """Another runner continues the run, because the previous one is gone."""

    runner: str
    after_s: float = 0.0
    """Seconds since the run was accepted, as far as runners have worked on it."""


class Ended(_Event, frozen=True):
    """The last entry of a log."""

    status: Status
    reason: str | None = None
    fault: Fault | None = None
    at_s: float = 0.0
    """Unix time in seconds."""


RunEvent = (
    Accepted
    | TurnIntent
    | Generated
    | TurnResult
    | ToolIntent
    | EarlyIntent
    | EarlyEnd
    | ToolAnswer
    | LateAnswer
    | Truncated
    | TakenOver
    | Ended
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RunEvent] = msgspec.msgpack.Decoder(RunEvent)


def encode(event: RunEvent) -> bytes:
    """Encode an entry for the log."""
    return _encoder.encode(event)


def decode(entry: bytes) -> RunEvent:
    """Decode an entry of the log.

    Raises:
        ValueError: ``entry`` is not a result of :func:`encode`.
    """
    return _decoder.decode(entry)


def require_encodable(spec: RunSpec) -> None:
    """Check that the log can encode a run, and that it can be read again. JSON allows larger numbers, in fields of any
    content such as a schema. To read long messages again would take long, so that only their outermost type is checked.

    Raises:
        BadRequest: the body has an integer of more than 64 bits, or a field of another type than the log expects.
    """
    try:
        encode(Accepted(spec))
        decode(encode(Accepted(msgspec.structs.replace(spec, messages=()))))
    except OverflowError as error:
        raise BadRequest("the body has an integer of more than 64 bits") from error
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body has a field of a wrong type: {error}") from error
    if not all(isinstance(message, dict) for message in spec.messages):
        raise BadRequest("each of the messages must be an object", param="messages")
