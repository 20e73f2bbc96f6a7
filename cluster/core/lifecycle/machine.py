"""The state machine of a program on its replica: a table of transitions from events to states and actions, without I/O.

    RUNNING --TurnEnded--> DECIDING --Held--> HELD --TurnArrived--> RESUMING --Admitted--> RUNNING
                               |               |                        |
                            Released        HoldEnded                HoldEnded (no blocks; the turn waits)
                               v               v                        v
                            RELEASED <---------+                     RUNNING
                               |
                          TurnArrived --> RUNNING          the last turn's end, or Ended --> ENDED

With a host tier, a paused program can also be swapped out, directly or after a hold, and fetched into a hold again:

    DECIDING or HELD --Swapped--> SWAPPED --ToolFinished--> FETCHING --Fetched--> HELD, or RESUMING if a turn waits
                                     |                         |
                                TurnArrived (the turn      FetchFailed --> SWAPPED    CopyLost --> RELEASED
                                 loads by itself)          with a turn that waits, both --> RUNNING
                                     v
                                  RUNNING

RUNNING includes turns that wait in vLLM's queue: whether vLLM computes a turn or lets it wait is not part of the
program's state. A program may have several turns in flight (parallel sub-requests). It pauses when the last one ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cluster.core.errors import IllegalTransition
from cluster.core.lifecycle.events import (
    Action,
    Admitted,
    CancelFetch,
    Conclude,
    CopyLost,
    Decide,
    Ended,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    FreeHold,
    Held,
    HoldEnded,
    Observe,
    Released,
    ReleaseReason,
    Swapped,
    ToolFinished,
    ToolStarted,
    TurnAborted,
    TurnArrived,
    TurnEnded,
)
from cluster.core.program import tool_key

MAX_HISTORY = 48
"""Maximum number of events in a program's history. Older events are dropped."""


class Phase(StrEnum):
    """The phase of a program, see the module's diagrams."""

    RUNNING = "running"
    DECIDING = "deciding"
    HELD = "held"
    RELEASED = "released"
    RESUMING = "resuming"
    SWAPPED = "swapped"
    """The host has a copy of the program's KV, and the device keeps none."""
    FETCHING = "fetching"
    """The copy is being loaded to the device, where it will be held. The program's next turn may be waiting for it."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PastEvent:
    """An event of a program, and its phase after the event."""

    event: Event
    phase: Phase

    @property
    def detail(self) -> str:
        """The event's reason, or the tools that it names; empty: it has neither."""
        if isinstance(self.event, HoldEnded) and self.event.policy_reason is not None:
            return self.event.policy_reason
        return getattr(self.event, "reason", "") or ",".join(getattr(self.event, "tools", ()))

    def __str__(self) -> str:
        detail = f"({self.detail})" if self.detail else ""
        return f"{type(self.event).__name__}{detail} -> {self.phase}"


@dataclass(frozen=True, slots=True)
class ProgramState:
    """The state of a program in its lifecycle. Times are seconds on its replica's clock."""

    key: str
    arrived_s: float
    phase: Phase = Phase.RUNNING
    turns: int = 0
    """Number of turns that have arrived, including those in flight."""
    active: int = 0
    """Number of turns in flight."""
    served_tokens: int = 0
    """Tokens computed for the turns that have ended (Autellix's attained service)."""
    context_tokens: int = 0
    """Length of the context after the last turn that ended."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Seconds that the ended turns took from arrival to last token, without tool time."""
    on_time: bool = True
    """Whether every ended turn met the SLO's bound on the TTFT."""
    last_served_s: float | None = None
    """The time at which a turn last ended; None: no turn has ended."""
    ending: bool = False
    """Whether the program ends when its turns in flight have ended."""
    tools: tuple[str, ...] = ()
    """The tools that the pause waits for."""
    paused_s: float | None = None
    tool_started_s: float | None = None
    observed: bool = True
    """Whether the length of the pause is already in the statistics."""
    last_event_s: float = 0.0
    history: tuple[PastEvent, ...] = ()
    """The last events, at most `MAX_HISTORY`, oldest first."""


Step = tuple[ProgramState, tuple[Action, ...]]


def begin(key: str, at_s: float) -> ProgramState:
    """Make the state of a new program. Its first event must be a TurnArrived."""
    return ProgramState(key=key, arrived_s=at_s, phase=Phase.RELEASED, last_event_s=at_s)


def step(state: ProgramState, event: Event) -> Step:
    """Return the state after ``event``, and the actions that the caller has to carry out.

    Raises:
        IllegalTransition: `TRANSITIONS` has no such event in this phase. The message has the program's history.
    """
    handler = TRANSITIONS.get((state.phase, type(event)))
    if handler is None:
        history = "; ".join(f"{past.event.at_s:.3f}s {past}" for past in state.history)
        raise IllegalTransition(f"{state.key}: {event} while {state.phase}. History: {history or 'none'}")
    after, actions = handler(state, event)
    past = PastEvent(event, after.phase)
    return replace(after, last_event_s=event.at_s, history=(*state.history, past)[-MAX_HISTORY:]), actions


def _arrive(state: ProgramState, event: TurnArrived) -> Step:
    actions: tuple[Action, ...] = ()
    if state.paused_s is not None and not state.observed:
        actions = (Observe(tool_key(state.tools), max(0.0, event.at_s - state.paused_s)),)
    after = replace(
        state,
        phase=_ARRIVALS.get(state.phase, Phase.RUNNING),
        turns=state.turns + 1,
        active=state.active + 1,
        ending=state.ending or event.last,
        paused_s=None,
        tool_started_s=None,
        observed=True,
    )
    return after, actions


_ARRIVALS = {Phase.HELD: Phase.RESUMING, Phase.RESUMING: Phase.RESUMING, Phase.FETCHING: Phase.FETCHING}
"""The phase after the arrival of a turn, for phases that differ from RUNNING: the turn has a hold or waits for a
load."""


def _admit(state: ProgramState, _: Admitted) -> Step:
    if state.phase is Phase.RESUMING:
        return replace(state, phase=Phase.RUNNING), (FreeHold(ReleaseReason.USED),)
    if state.phase is Phase.FETCHING:
        return replace(state, phase=Phase.RUNNING), (CancelFetch(),)
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
    freed = _freed(state, ReleaseReason.ABORTED)
    if after.ending:
        ended, concluded = _conclude(after)
        return ended, freed + concluded
    return replace(after, phase=Phase.RELEASED, tools=()), freed


def _hold(state: ProgramState, _: Held) -> Step:
    return replace(state, phase=Phase.HELD), ()


def _release(state: ProgramState, _: Released) -> Step:
    return replace(state, phase=Phase.RELEASED), ()


def _swap(state: ProgramState, _: Swapped) -> Step:
    return replace(state, phase=Phase.SWAPPED), _freed(state, ReleaseReason.SWAPPED)


def _fetch_done(state: ProgramState, _: Fetched) -> Step:
    return replace(state, phase=Phase.RESUMING if state.active else Phase.HELD), ()


def _fetch_failed(state: ProgramState, _: FetchFailed) -> Step:
    return replace(state, phase=Phase.RUNNING if state.active else Phase.SWAPPED), ()


def _lose_copy(state: ProgramState, _: CopyLost) -> Step:
    cancelled = (CancelFetch(),) if state.phase is Phase.FETCHING else ()
    return replace(state, phase=Phase.RUNNING if state.active else Phase.RELEASED), cancelled


def _freed(state: ProgramState, reason: ReleaseReason) -> tuple[Action, ...]:
    """Return the actions that release the memory that the program has in its phase."""
    if state.phase in (Phase.HELD, Phase.RESUMING):
        return (FreeHold(reason),)
    return (CancelFetch(),) if state.phase is Phase.FETCHING else ()


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


def _fetch(state: ProgramState, event: ToolFinished) -> Step:
    after, observed = _finish_tool(state, event)
    return replace(after, phase=Phase.FETCHING), (*observed, Fetch())


def _end_paused(state: ProgramState, event: Ended) -> Step:
    if state.active:
        return _end_later(state, event)
    ended, concluded = _conclude(state)
    return ended, _freed(state, event.reason) + concluded


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
    (Phase.DECIDING, Swapped): _swap,
    (Phase.HELD, TurnArrived): _arrive,
    (Phase.HELD, HoldEnded): _lose_hold,
    (Phase.HELD, Swapped): _swap,
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
    (Phase.SWAPPED, TurnArrived): _arrive,
    (Phase.SWAPPED, ToolStarted): _start_tool,
    (Phase.SWAPPED, ToolFinished): _fetch,
    (Phase.SWAPPED, CopyLost): _lose_copy,
    (Phase.SWAPPED, Ended): _end_paused,
    (Phase.FETCHING, TurnArrived): _arrive,
    (Phase.FETCHING, Admitted): _admit,
    (Phase.FETCHING, TurnAborted): _abort_turn,
    (Phase.FETCHING, Fetched): _fetch_done,
    (Phase.FETCHING, FetchFailed): _fetch_failed,
    (Phase.FETCHING, CopyLost): _lose_copy,
    (Phase.FETCHING, ToolStarted): _start_tool,
    (Phase.FETCHING, ToolFinished): _finish_tool,
    (Phase.FETCHING, Ended): _end_paused,
}
"""The handler of every event that is legal in a phase. For any other pair, `step` raises IllegalTransition."""
