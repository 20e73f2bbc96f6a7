"""The life of a program on its replica: events in, actions out, one transition table, no I/O.

    RUNNING --TurnEnded--> DECIDING --Held--> HELD --TurnArrived--> RESUMING --Admitted--> RUNNING
                               |               |                        |
                            Released        HoldEnded                HoldEnded (no blocks; the turn waits)
                               v               v                        v
                            RELEASED <---------+                     RUNNING
                               |
                          TurnArrived --> RUNNING          the last turn's end, or Ended --> ENDED

RUNNING covers every turn from its arrival on: whether vLLM computes it or lets it wait is vLLM's state, not the
program's. A program may have several turns in flight (parallel sub-requests); it pauses when the last of them ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cluster.errors import IllegalTransition
from cluster.program import tool_key

STORY_LINES = 48
"""Events that a program's story keeps; older ones are dropped."""


class Phase(StrEnum):
    """Where a program stands."""

    RUNNING = "running"
    DECIDING = "deciding"
    HELD = "held"
    RELEASED = "released"
    RESUMING = "resuming"
    ENDED = "ended"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnArrived:
    """A turn was accepted. ``last``: the client says that no other will follow."""

    at_s: float
    last: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler gave a waiting turn its memory; a hold has been used."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn generated its last token. ``served_tokens``: computed for it; ``tools``: what it asked for."""

    at_s: float
    tools: tuple[str, ...]
    served_tokens: int
    context_tokens: int = 0
    """Of the program after the turn."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """From the turn's arrival to its last token."""
    on_time: bool = True
    """Its first token came within the SLO's bound."""


@dataclass(frozen=True, slots=True)
class TurnAborted:
    """A turn ended without a result that the program can go on from."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """Decided: the blocks stay allocated until ``until_s``."""

    at_s: float
    until_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """Decided: the blocks are given back."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """A hold ended unused: expired, broken for somebody who needed the memory, or asked for."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """The executor started the tools of the pause."""

    at_s: float
    tools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """The slowest tool of the pause has finished; the next turn is on its way."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The program will not come back: its client said so, or it was idle for too long."""

    at_s: float
    reason: str


Event = (
    TurnArrived | Admitted | TurnEnded | TurnAborted | Held | Released | HoldEnded | ToolStarted | ToolFinished | Ended
)


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decide:
    """Ask the pause policy, and answer with Held or Released."""


@dataclass(frozen=True, slots=True)
class Observe:
    """A pause of this length for this tool key was seen."""

    tool: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FreeHold:
    """Give the held blocks back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """The program is over after so many turns, for which so many tokens were computed."""

    turns: int
    served_tokens: int = 0


Action = Decide | Observe | FreeHold | Conclude


@dataclass(frozen=True, slots=True)
class ProgramState:
    """All that the lifecycle knows of a program. Times are seconds on its replica's clock."""

    key: str
    arrived_s: float
    phase: Phase = Phase.RUNNING
    turns: int = 0
    """Turns that have arrived, this one included."""
    active: int = 0
    """Turns in flight."""
    served_tokens: int = 0
    """Tokens computed for the turns that have ended (Autellix's attained service)."""
    context_tokens: int = 0
    """After its last turn that ended."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Time that its ended turns took, their waiting included and the tools' not."""
    on_time: bool = True
    """No ended turn was late with its first token."""
    last_served_s: float | None = None
    """When its last turn ended."""
    ending: bool = False
    """Its last turn has arrived."""
    tools: tuple[str, ...] = ()
    """What the pause waits for."""
    paused_s: float | None = None
    tool_started_s: float | None = None
    observed: bool = True
    """The pause's length is already in the statistics."""
    last_event_s: float = 0.0
    story: tuple[tuple[float, str], ...] = ()
    """What happened last: (seconds, words)."""


Step = tuple[ProgramState, tuple[Action, ...]]


def begin(key: str, at_s: float) -> ProgramState:
    """A program that nobody has seen; its first event is a TurnArrived."""
    return ProgramState(key=key, arrived_s=at_s, phase=Phase.RELEASED, last_event_s=at_s)


def step(state: ProgramState, event: Event) -> Step:
    """The state after ``event``, and what has to be done.

    Raises:
        IllegalTransition: the table has no such event in this phase; the message tells the program's story.
    """
    handler = TRANSITIONS.get((state.phase, type(event)))
    if handler is None:
        story = "; ".join(f"{at:.3f}s {words}" for at, words in state.story)
        raise IllegalTransition(f"{state.key}: {event} while {state.phase}. Story: {story or 'none'}")
    after, actions = handler(state, event)
    line = (event.at_s, _words(event, after))
    return replace(after, last_event_s=event.at_s, story=(*state.story, line)[-STORY_LINES:]), actions


def _words(event: Event, after: ProgramState) -> str:
    detail = getattr(event, "reason", "") or ",".join(getattr(event, "tools", ()))
    name = type(event).__name__
    return f"{name}({detail}) -> {after.phase}" if detail else f"{name} -> {after.phase}"


def _arrive(state: ProgramState, event: TurnArrived) -> Step:
    actions: tuple[Action, ...] = ()
    if state.paused_s is not None and not state.observed:
        actions = (Observe(tool_key(state.tools), max(0.0, event.at_s - state.paused_s)),)
    resuming = state.phase in (Phase.HELD, Phase.RESUMING)
    after = replace(
        state,
        phase=Phase.RESUMING if resuming else Phase.RUNNING,
        turns=state.turns + 1,
        active=state.active + 1,
        ending=state.ending or event.last,
        paused_s=None,
        tool_started_s=None,
        observed=True,
    )
    return after, actions


def _admit(state: ProgramState, _: Admitted) -> Step:
    if state.phase is Phase.RESUMING:
        return replace(state, phase=Phase.RUNNING), (FreeHold("used"),)
    return state, ()


def _end_turn(state: ProgramState, event: TurnEnded) -> Step:
    after = replace(
        state,
        active=state.active - 1,
        served_tokens=state.served_tokens + event.served_tokens,
        context_tokens=event.context_tokens,
        generated_tokens=state.generated_tokens + event.generated_tokens,
        busy_s=state.busy_s + event.busy_s,
        on_time=state.on_time and event.on_time,
        last_served_s=event.at_s,
    )
    if after.active > 0:
        return after, ()
    if after.ending:
        return _conclude(after)
    paused = replace(after, phase=Phase.DECIDING, tools=event.tools, paused_s=event.at_s, observed=False)
    return paused, (Decide(),)


def _abort_turn(state: ProgramState, _: TurnAborted) -> Step:
    after = replace(state, active=state.active - 1)
    if after.active > 0:
        return after, ()
    freed: tuple[Action, ...] = (FreeHold("aborted"),) if state.phase is Phase.RESUMING else ()
    if after.ending:
        ended, concluded = _conclude(after)
        return ended, freed + concluded
    return replace(after, phase=Phase.RELEASED, tools=()), freed


def _hold(state: ProgramState, _: Held) -> Step:
    return replace(state, phase=Phase.HELD), ()


def _release(state: ProgramState, _: Released) -> Step:
    return replace(state, phase=Phase.RELEASED), ()


def _lose_hold(state: ProgramState, event: HoldEnded) -> Step:
    phase = Phase.RUNNING if state.phase is Phase.RESUMING else Phase.RELEASED
    return replace(state, phase=phase), (FreeHold(event.reason),)


def _start_tool(state: ProgramState, event: ToolStarted) -> Step:
    return replace(state, tools=event.tools, tool_started_s=event.at_s), ()


def _finish_tool(state: ProgramState, event: ToolFinished) -> Step:
    since = state.tool_started_s if state.tool_started_s is not None else state.paused_s
    if since is None or state.observed:
        return state, ()
    return replace(state, observed=True), (Observe(tool_key(state.tools), max(0.0, event.at_s - since)),)


def _end_paused(state: ProgramState, event: Ended) -> Step:
    ended, concluded = _conclude(state)
    return ended, ((FreeHold(event.reason),) if state.phase is Phase.HELD else ()) + concluded


def _end_later(state: ProgramState, _: Ended) -> Step:
    return replace(state, ending=True), ()


def _conclude(state: ProgramState) -> Step:
    return replace(state, phase=Phase.ENDED), (Conclude(state.turns, state.served_tokens),)


TRANSITIONS: dict[tuple[Phase, type[Event]], Callable[[ProgramState, Any], Step]] = {
    (Phase.RUNNING, TurnArrived): _arrive,
    (Phase.RUNNING, Admitted): _admit,
    (Phase.RUNNING, TurnEnded): _end_turn,
    (Phase.RUNNING, TurnAborted): _abort_turn,
    (Phase.RUNNING, Ended): _end_later,
    (Phase.DECIDING, Held): _hold,
    (Phase.DECIDING, Released): _release,
    (Phase.HELD, TurnArrived): _arrive,
    (Phase.HELD, HoldEnded): _lose_hold,
    (Phase.HELD, ToolStarted): _start_tool,
    (Phase.HELD, ToolFinished): _finish_tool,
    (Phase.HELD, Ended): _end_paused,
    (Phase.RESUMING, TurnArrived): _arrive,
    (Phase.RESUMING, Admitted): _admit,
    (Phase.RESUMING, TurnAborted): _abort_turn,
    (Phase.RESUMING, HoldEnded): _lose_hold,
    (Phase.RESUMING, Ended): _end_later,
    (Phase.RELEASED, TurnArrived): _arrive,
    (Phase.RELEASED, ToolStarted): _start_tool,
    (Phase.RELEASED, ToolFinished): _finish_tool,
    (Phase.RELEASED, Ended): _end_paused,
}
"""Every legal event of every phase; what is not here raises."""
