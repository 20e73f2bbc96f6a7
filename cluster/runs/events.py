"""The specification of a run, and the events in its log, from which `cluster.runs.state` computes its state.

A *program* is a conversation; a *run* is one request's share of it: turns and tools until the model is done, a bound is
reached, or the caller has to act. Every event is written to the log before anybody acts on it.
"""

from typing import Any, Literal

import msgspec

from cluster.core.tools import ToolOffer
from cluster.core.turn import CallDelta

Status = Literal["completed", "incomplete", "failed", "cancelled"]

MAX_OUTPUT_TOKENS = "max_output_tokens"
MAX_TURNS = "max_turns"
MAX_WALL_TIME = "max_wall_time"
STOP_SEQUENCE = "stop_sequence"
"""A stop string ended a turn within a tool call."""


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of an event."""


class _Event(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """An entry of the log."""


class Call(_Word, frozen=True):
    """One tool call of a turn."""

    turn: int
    """The turn's number in its run, from 1; 0: asked for in an earlier run, and approved in this one."""
    index: int
    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it."""
    consent: str | None = None
    """The request for approval that was answered with consent to it; it runs once under it."""

    @property
    def place(self) -> tuple[int, int]:
        """Unique in its run, also where a model repeats an id."""
        return self.turn, self.index


class Limits(_Word, frozen=True):
    """What ends a run that does not end by itself."""

    turns: int
    tool_calls: int
    output_tokens: int
    """Of all turns together."""
    wall_s: float
    turn_attempts: int
    """How often a turn is tried whose replica, or whose runner, failed."""


class Prior(_Word, frozen=True):
    """The conversation that a run goes on from, as token ids."""

    token_ids: bytes
    messages: int
    """How many of the run's messages they stand for."""


class RunSpec(_Word, frozen=True):
    """All that a run needs to know."""

    id: str
    api: Literal["responses", "chat"]
    tenant: str
    program: str
    """The program's id, without its tenant."""
    identity: str
    """`ProgramIdentity.encode` of the request."""
    model: str
    created_s: float
    """Unix time."""
    limits: Limits
    messages: tuple[dict[str, Any], ...]
    """The conversation so far in the form of chat completions, the request's own input included."""
    prior: Prior | None = None
    offers: tuple[ToolOffer, ...] = ()
    tool_choice: Any = None
    """As in chat completions; None: the model chooses."""
    tool_choices: tuple[Any, ...] = ()
    """For the first turns, one each, before `tool_choice` applies."""
    parallel: bool = True
    """A turn may ask for several tools."""
    sampling: dict[str, Any] = {}
    """Other fields of a chat completions body, passed on to each turn."""
    definitions: dict[str, Any] = {}
    """Tools that the request brought, as in the configuration; without what is secret."""
    approved: tuple[Call, ...] = ()
    """Calls of the conversation's last assistant message that are run before the first turn."""
    background: bool = False
    store: bool = True
    last: bool = False
    """Nobody can go on with its program: its memory is given back at the end."""
    previous: str | None = None
    """The run whose conversation this one goes on with."""
    echo: dict[str, Any] = {}
    """What the API repeats in its answer and the run does not look at."""


class Fault(_Word, frozen=True):
    """Why a run failed."""

    code: str
    message: str
    status: int = 500
    """The HTTP status of it."""
    param: str | None = None


class Accepted(_Event, frozen=True):
    """The first entry of a log."""

    spec: RunSpec


class TurnIntent(_Event, frozen=True):
    """A turn is about to be asked for. Answers of asynchronous tools that came meanwhile are in its prompt."""

    turn: int
    attempt: int = 1


class Generated(_Event, frozen=True):
    """What a turn has generated since the last such event."""

    turn: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class TurnResult(_Event, frozen=True):
    """A turn that ran its course."""

    turn: int
    continued: bool
    """Its prompt began with all ids before it; else it was rendered anew, and `added_ids` are the whole prompt."""
    rendering: str
    """`cluster.core.turn.PromptMode`."""
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
    """Those that are complete: `cluster.core.tools.split_complete`."""
    unfinished: tuple[Call, ...] = ()
    """The call within which the turn was cut."""


class ToolIntent(_Event, frozen=True):
    """These calls are about to be run."""

    places: tuple[tuple[int, int], ...]


class ToolAnswer(_Event, frozen=True):
    """What became of a call. ``outcome``: `cluster.core.tools.Outcome`; STARTED: a `LateAnswer` follows."""

    turn: int
    index: int
    outcome: str
    text: str
    truncated: bool = False
    queue_s: float = 0.0
    run_s: float = 0.0
    attempts: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Of the call."""
        return self.turn, self.index


class LateAnswer(_Event, frozen=True):
    """The answer of an asynchronous tool."""

    answer: ToolAnswer


class TakenOver(_Event, frozen=True):
    """Another runner goes on with the run: the one before it is gone."""

    runner: str
    after_s: float = 0.0
    """Seconds since the run was accepted, as far as runners have worked on it."""


class Ended(_Event, frozen=True):
    """The last entry of a log."""

    status: Status
    reason: str | None = None
    fault: Fault | None = None
    at_s: float = 0.0
    """Unix time."""


RunEvent = Accepted | TurnIntent | Generated | TurnResult | ToolIntent | ToolAnswer | LateAnswer | TakenOver | Ended

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RunEvent] = msgspec.msgpack.Decoder(RunEvent)


def encode(event: RunEvent) -> bytes:
    """An entry as the log holds it."""
    return _encoder.encode(event)


def decode(entry: bytes) -> RunEvent:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: ``entry`` is not what :func:`encode` writes.
    """
    return _decoder.decode(entry)
