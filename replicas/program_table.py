"""The programs that a replica knows: their lifecycle states, the story of their turns, and how many turns they have."""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.lifecycle import Phase, ProgramState, begin, step
from cluster.lifecycle_events import (
    Action,
    Conclude,
    Ended,
    Event,
)
from cluster.statistics import DurationStatistics

MAX_STORIES = 4096
"""Programs whose turns are kept for telling; of older ones only the state is."""
MAX_TURNS_TOLD = 512
"""Turns kept of one program; earlier ones are dropped."""


@dataclass(frozen=True, slots=True)
class TurnStory:
    """What happened to one turn. Times in seconds on the replica's clock, lengths in tokens."""

    request_id: str
    arrived_s: float
    queue_s: float
    """From arrival to the first admission."""
    run_s: float
    """From the first admission to the last token."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that needed no computation at the first admission."""
    output_tokens: int
    preemptions: int
    priority: int | None
    """As the client gave it."""
    tools: tuple[str, ...]
    """What the turn asked for."""
    outcome: str
    decision: str
    """What became of the KV afterwards, and why."""


@dataclass(slots=True)
class _Entry:
    state: ProgramState
    turns: deque[TurnStory] = field(default_factory=lambda: deque(maxlen=MAX_TURNS_TOLD))


class ProgramTable:
    """States by program key, least recently used first.

    Args:
        max_programs: above it, the least recently used program that has no turn in flight is ended.
        idle_s: a program without an event for so long has ended.
    """

    def __init__(self, max_programs: int, idle_s: float) -> None:
        self._max_programs = max_programs
        self._idle_s = idle_s
        self._live: OrderedDict[str, _Entry] = OrderedDict()
        self._told: OrderedDict[str, _Entry] = OrderedDict()
        self._turns = DurationStatistics()
        self.abandoned = 0
        """Programs that ended without saying so: they were idle for too long."""

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: str) -> ProgramState | None:
        """The program's state, unless it has ended or was never seen."""
        entry = self._live.get(key)
        return entry.state if entry else None

    def __getitem__(self, key: str) -> ProgramState:
        """The state of a program that is known to be here."""
        return self._live[key].state

    def recent(self) -> Iterator[ProgramState]:
        """The states of all programs that have not ended, those with the latest event first."""
        return (entry.state for entry in reversed(self._live.values()))

    @property
    def average_turns(self) -> float | None:
        """Turns of an ended program in the mean (Continuum's AvgTurns)."""
        return self._turns.mean_s if self._turns.count else None

    @property
    def concluded(self) -> int:
        """Programs that have ended."""
        return self._turns.count

    def apply(self, key: str, event: Event) -> Sequence[Action]:
        """Take the program through ``event``; what has to be done.

        Raises:
            IllegalTransition: see ``cluster.lifecycle.step``; nothing was changed.
        """
        entry = self._live.get(key)
        if entry is None:
            entry = _Entry(begin(key, event.at_s))
        entry.state, actions = step(entry.state, event)
        if entry.state.phase is Phase.ENDED:
            self._live.pop(key, None)
        else:
            self._live[key] = entry
            self._live.move_to_end(key)
        self._remember(key, entry)
        for action in actions:
            if isinstance(action, Conclude):
                self._turns.observe(action.turns)
        return actions

    def tell(self, key: str, turn: TurnStory) -> None:
        """Add a turn to the program's story."""
        entry = self._told.get(key)
        if entry is not None:
            entry.turns.append(turn)

    def story(self, key: str) -> dict[str, Any] | None:
        """The program's state and turns as plain values; None if it is not known (any more)."""
        entry = self._told.get(key)
        if entry is None:
            return None
        state = entry.state
        return {
            "key": key,
            "phase": str(state.phase),
            "arrived_s": state.arrived_s,
            "num_turns": state.turns,
            "served_tokens": state.served_tokens,
            "tools": list(state.tools),
            "turns": [asdict(turn) for turn in entry.turns],
            "events": [{"at_s": at_s, "event": words} for at_s, words in state.story],
        }

    def sweep(self, now_s: float) -> list[tuple[str, Sequence[Action]]]:
        """End what was idle for too long and, above the bound, what was used least recently; the actions of each."""
        done: list[tuple[str, Sequence[Action]]] = []
        excess = len(self._live) - self._max_programs
        for key in list(self._live):
            state = self._live[key].state
            idle = now_s - state.last_event_s >= self._idle_s
            if not idle and excess <= 0:
                break
            if state.active == 0:
                self.abandoned += idle
                done.append((key, self.apply(key, Ended(now_s, "idle" if idle else "table full"))))
                excess -= 1
        return done

    def _remember(self, key: str, entry: _Entry) -> None:
        self._told[key] = entry
        self._told.move_to_end(key)
        while len(self._told) > MAX_STORIES:
            self._told.popitem(last=False)
