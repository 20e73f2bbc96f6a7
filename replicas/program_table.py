"""The programs that a replica knows: their lifecycle states, records of their turns, and how many turns they have."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from heapq import nsmallest
from typing import Any

from cluster.core.errors import IntegrityError
from cluster.core.lifecycle.events import (
    Action,
    Conclude,
    Ended,
    Event,
    PauseReason,
    ReleaseReason,
    TurnArrived,
    TurnEnded,
)
from cluster.core.lifecycle.machine import Phase, ProgramState, begin, step
from cluster.core.program import tenant_of, tool_key
from cluster.durations.statistics import DurationStatistics
from replicas.gpu_time import TurnTime
from replicas.returns import Returns

SWEEP_PERIOD_S = 10.0
"""Seconds between two searches for programs that will not come back."""

MAX_RECORDED = 4096
"""Largest number of programs whose turns are recorded. Of older ones only the state is kept."""
MAX_TURN_RECORDS = 512
"""Largest number of turns that are kept of one program. Earlier ones are dropped."""


class KvDecision(StrEnum):
    """What happens to a paused program's KV."""

    HOLD = "hold"
    SWAP = "swap"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What happened to one turn. Times are in seconds on the replica's clock, and lengths in tokens."""

    request_id: str
    arrived_s: float
    queue_s: float
    """Seconds from arrival to the first admission."""
    run_s: float
    """Seconds from the first admission to the last token."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that needed no computation at the first admission."""
    output_tokens: int
    preemptions: int
    priority: int | None
    """The client's priority, or None if it gave none."""
    tools: tuple[str, ...]
    """Tools that the turn asked for."""
    outcome: str
    """How it ended: the name of vLLM's RequestStatus without its prefix."""
    decision: KvDecision = KvDecision.RELEASE
    """What happened to the KV after the turn."""
    reason: PauseReason | None = None
    """The reason of the decision, or None if no policy was asked."""
    hold_s: float | None = None
    """Planned seconds of the hold, or None if the KV was not held."""
    gpu: TurnTime = field(default_factory=TurnTime)
    disk_tokens: int = 0
    """Those of ``cached_tokens`` that were loaded from the disk tier."""
    weights: tuple[str, ...] = ()
    """Versions of the model's weights that computed the output, in order."""

    @property
    def is_complete(self) -> bool:
        """Whether the turn leaves a context to continue from. One that was aborted or failed leaves none."""
        return self.outcome in ("stopped", "length_capped", "repetition")

    @property
    def decision_text(self) -> str:
        """The decision and its reason in English."""
        decided = _PARTICIPLES[self.decision]
        if self.hold_s is not None:
            decided = f"{decided} {self.hold_s:.3f}s"
        return decided if self.reason is None else f"{decided} ({self.reason})"

    def to_public_dict(self, tenant: str) -> dict[str, Any]:
        """Return plain values. ``decision`` is for people; ``kv`` and ``reason`` are for programs.

        ``tenant`` reads them, so that they do not name programs of others.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values |= {"decision": self.decision_text, "kv": str(self.decision), "gpu": self.gpu.shown_to(tenant)}
        values |= {"weights": list(self.weights)}
        return values | {"tools": list(self.tools), "reason": self.reason and str(self.reason)}


_PARTICIPLES = {KvDecision.HOLD: "held", KvDecision.SWAP: "swapped", KvDecision.RELEASE: "released"}


@dataclass(slots=True)
class _Entry:
    state: ProgramState
    turns: deque[TurnRecord] = field(default_factory=lambda: deque(maxlen=MAX_TURN_RECORDS))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Sums over all recorded turns, including those that were dropped."""
    longest_wait_steps: int = 0
    concluded: bool = False
    """Whether its number of turns has been learnt, because it counts as ended."""


@dataclass(slots=True)
class TurnsBeforeAndAfter:
    """The turns before and after each pause of the programs that have ended, as sums.

    A program of N turns has pauses after turn k = 1 to N - 1, with N - k turns after them. Over a program, both
    numbers take the same values, so that their sums are equal.
    """

    count: int = 0
    total: int = 0
    squares: int = 0
    products: int = 0

    def observe(self, turns: int) -> None:
        """Add the pauses of a program of ``turns`` turns."""
        pauses = max(0, turns - 1)
        total = pauses * (pauses + 1) // 2
        squares = total * (2 * pauses + 1) // 3
        self.count += pauses
        self.total += total
        self.squares += squares
        self.products += turns * total - squares

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation of both numbers, in [-1, 1]. None: one of them was always the same."""
        variance = self.count * self.squares - self.total**2
        return (self.count * self.products - self.total**2) / variance if variance else None


def _idle_s(state: ProgramState, now_s: float) -> float:
    """Return the seconds since the program's last turn ended; 0: a turn is in flight."""
    if state.active:
        return 0.0
    return now_s - (state.last_event_s if state.last_served_s is None else state.last_served_s)


class ProgramTable:
    """States by program key, the least recently used first.

    Args:
        max_programs: above this number, the least recently used program without a turn in flight is ended.
        idle_s: seconds without an event after which a program is ended.
    """

    def __init__(self, max_programs: int, idle_s: float) -> None:
        self._max_programs = max_programs
        self._idle_s = idle_s
        self._next_sweep_s = 0.0
        self._live: OrderedDict[str, _Entry] = OrderedDict()
        self._recorded: OrderedDict[str, _Entry] = OrderedDict()
        self._turns = DurationStatistics()
        self._pauses = TurnsBeforeAndAfter()
        self._ended = 0
        self.returns = Returns()
        self.abandoned = 0
        """Number of programs that were ended because they were idle for too long."""

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: str) -> ProgramState | None:
        """Return the program's state, or None if it has ended or was never seen."""
        entry = self._live.get(key)
        return entry.state if entry else None

    def __getitem__(self, key: str) -> ProgramState:
        """Return the state of a program that is known to be here."""
        return self._live[key].state

    def recent(self) -> Iterator[ProgramState]:
        """Yield the states of all programs that have not ended, those with the latest event first."""
        return (entry.state for entry in reversed(self._live.values()))

    def waited(self, key: str, steps: int) -> None:
        """Note that a turn of a program, which had been scheduled before, waited for so many steps."""
        entry = self._live[key]
        entry.longest_wait_steps = max(entry.longest_wait_steps, steps)

    def longest_wait_steps(self, key: str) -> int:
        """Return the largest number of steps that :meth:`waited` noted; 0 for a program that has ended."""
        entry = self._live.get(key)
        return entry.longest_wait_steps if entry else 0

    @property
    def average_turns(self) -> float | None:
        """Mean number of turns of the programs that have ended or are likely to (Continuum's AvgTurns), or None before
        the first has.
        """
        return self._turns.mean_s if self._turns.count else None

    @property
    def turns_correlation(self) -> float | None:
        """Correlation of the turns before and after a pause, see `TurnsBeforeAndAfter`."""
        return self._pauses.correlation

    @property
    def concluded(self) -> int:
        """Number of programs that have ended."""
        return self._ended

    def apply(self, key: str, event: Event) -> Sequence[Action]:
        """Apply ``event`` to the program. Return the actions that have to be done.

        Raises:
            IllegalTransition: see ``cluster.core.lifecycle.machine.step``; nothing was changed.
        """
        entry = self._live.get(key)
        if entry is None:
            entry = _Entry(begin(key, event.at_s))
        entry.state, actions = step(entry.state, event)
        self._learn_returns(key, entry.state, event)
        if entry.state.phase is Phase.ENDED:
            self._live.pop(key, None)
        else:
            self._live[key] = entry
            self._live.move_to_end(key)
        self._remember(key, entry)
        if isinstance(event, TurnArrived):
            entry.concluded = False
        for action in actions:
            if isinstance(action, Conclude):
                self._ended += 1
                self._conclude(entry)
        return actions

    def likely_ended(self) -> Iterator[ProgramState]:
        """Yield the programs that have begun to count as ended, because they are silent, since the last call.

        They stay in the table, because one in twenty comes back (`replicas.returns.SURE`).
        """
        for key in self.returns.take_given_up():
            entry = self._live.get(key)
            if entry is not None and not entry.state.active:
                self._conclude(entry)
                yield entry.state

    def _conclude(self, entry: _Entry) -> None:
        if not entry.concluded:
            entry.concluded = True
            self._turns.observe(entry.state.turns)
            self._pauses.observe(entry.state.turns)

    def _learn_returns(self, key: str, state: ProgramState, event: Event) -> None:
        match event:
            case TurnArrived():
                self.returns.returned(key)
            case TurnEnded(tools=tools) if not state.active and state.phase is not Phase.ENDED:
                self.returns.paused(key, tool_key(tools), event.at_s)
            case Ended(reason=reason):
                self.returns.ended(key, reported=reason not in (ReleaseReason.IDLE, ReleaseReason.TABLE_FULL))

    def record(self, key: str, turn: TurnRecord) -> None:
        """Add a turn that has ended, if the program is known."""
        entry = self._recorded.get(key)
        if entry is not None:
            entry.turns.append(turn)
            entry.prompt_tokens += turn.prompt_tokens
            entry.cached_tokens += turn.cached_tokens

    def to_public_dict(self, key: str) -> dict[str, Any] | None:
        """Return the program's state, turns and last events as plain values, or None if it is not known (any more)."""
        entry = self._recorded.get(key)
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
            "turns": [turn.to_public_dict(tenant_of(key)) for turn in entry.turns],
            "events": [
                {"at_s": past.event.at_s, "event": str(past), "phase": str(past.phase), "reason": past.detail}
                for past in state.history
            ],
        }

    def sessions(self, tenant: str, limit: int, now_s: float) -> list[dict[str, Any]]:
        """Return plain values of a tenant's programs, those with turns in flight first, then the one served last.

        Args:
            tenant: the tenant's name.
            limit: largest number of programs.
            now_s: the current time of the replica's clock in seconds.
        """
        prefix = f"{tenant}/"
        own = [
            (_idle_s(entry.state, now_s), key, entry) for key, entry in self._recorded.items() if key.startswith(prefix)
        ]
        return [
            {
                "program": key.removeprefix(prefix),
                "phase": str(entry.state.phase),
                "turns": entry.state.turns,
                "age_s": now_s - entry.state.arrived_s,
                "idle_s": idle_s,
                "prompt_tokens": entry.prompt_tokens,
                "cached_tokens": entry.cached_tokens,
            }
            for idle_s, key, entry in nsmallest(limit, own, key=lambda one: one[0])
        ]

    def sweep(self, now_s: float) -> list[tuple[str, Sequence[Action]]]:
        """End programs that were idle for too long and, above the bound, the least recently used ones.

        Nothing is done where the last sweep is less than SWEEP_PERIOD_S ago.

        Returns:
            The actions of each program that was ended.
        """
        done: list[tuple[str, Sequence[Action]]] = []
        if now_s < self._next_sweep_s:
            return done
        self._next_sweep_s = now_s + SWEEP_PERIOD_S
        excess = len(self._live) - self._max_programs
        for key in list(self._live):
            state = self._live[key].state
            idle = now_s - state.last_event_s >= self._idle_s
            if not idle and excess <= 0:
                break
            if state.active == 0:
                self.abandoned += idle
                done.append(
                    (key, self.apply(key, Ended(now_s, ReleaseReason.IDLE if idle else ReleaseReason.TABLE_FULL)))
                )
                excess -= 1
        return done

    def check_held(self, keys: Iterable[str]) -> None:
        """Raise IntegrityError unless these programs, which have holds, are in a phase with a hold."""
        for key in keys:
            state = self.get(key)
            if state is None or state.phase not in (Phase.HELD, Phase.RESUMING):
                raise IntegrityError(f"{key} is held but {state and state.phase}")

    def _remember(self, key: str, entry: _Entry) -> None:
        self._recorded[key] = entry
        self._recorded.move_to_end(key)
        while len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
