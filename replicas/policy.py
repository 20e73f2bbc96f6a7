"""The plug-points of a replica's scheduler: order, pause and budget, each a pure function of a frozen view.

A policy keeps no state and reads no clock: what it may know is in the view, and the scheduler does the work. Times are
seconds on the scheduler's clock, lengths tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cluster.lifecycle import ProgramState
from cluster.program import Hints
from cluster.statistics import DurationTable

RankKey = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn that waits to be admitted."""

    program: ProgramState
    hints: Hints
    arrived_s: float
    """When this turn came (not its program: that is ``program.arrived_s``)."""
    tokens: int
    """Prompt tokens, and those generated before a preemption."""
    preempted: bool
    """It ran already and lost its place for want of memory."""
    pinned: bool
    """Its program's KV is held and the hold is not broken."""


@dataclass(frozen=True, slots=True)
class PauseView:
    """A program at the end of a turn that is not its last."""

    program: ProgramState
    hints: Hints
    tools: tuple[str, ...]
    """The tools that the turn asked for; never empty (see ``cluster.program.USER_REPLY``)."""
    context_tokens: int
    """Tokens whose KV the program has in memory."""
    durations: DurationTable
    """What is known of tool durations: this replica's observations and the others'."""
    average_turns: float | None
    """Turns of an ended program in the mean; None before the first one ended."""
    now_s: float


@dataclass(frozen=True, slots=True)
class HoldView:
    """A paused program whose KV blocks stay allocated."""

    program: ProgramState
    context_tokens: int
    since_s: float
    until_s: float
    owner_waits: bool
    """Its next turn has come and waits to be admitted."""


class Claimant(Enum):
    """Who needs the memory that a hold occupies."""

    RUNNING = "running"
    """A running turn grows; without memory it would be preempted."""
    WAITING = "waiting"
    """A waiting turn, while others run and will free memory by themselves."""
    STARVED = "starved"
    """A waiting turn, while nothing runs: nobody else will ever free memory."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the blocks allocated until ``until_s``, unless they are broken or used before."""

    until_s: float
    reason: str = "policy"


@dataclass(frozen=True, slots=True)
class Release:
    """Give the blocks back: the prefix cache may still have them when the program comes back."""

    reason: str = "policy"


PauseDecision = Hold | Release


@dataclass(frozen=True, slots=True)
class StepView:
    """The batch before a step."""

    running: int
    waiting: int
    free_tokens: int
    held_tokens: int
    max_tokens: int
    """vLLM's max_num_batched_tokens: no budget may exceed it."""


class OrderPolicy(Protocol):
    """In which order may waiting turns be admitted?"""

    def key(self, turn: TurnView) -> RankKey:
        """A rank: least first, ties by arrival. It changes only with an event of the program."""
        ...


class PausePolicy(Protocol):
    """What becomes of a paused program's KV, and whose goes first when memory is short?"""

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold or release, at the end of a turn that is not the last."""
        ...

    def victim_key(self, hold: HoldView) -> RankKey:
        """Least is broken first."""
        ...

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """May ``claimant`` break this hold? It must be True for STARVED, or the replica would stop for ever."""
        ...


class BudgetPolicy(Protocol):
    """How many tokens may this step schedule?"""

    def tokens(self, step: StepView) -> int:
        """Between 1 and ``step.max_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice for each question. ``name`` is what the registry calls it."""

    name: str
    order: OrderPolicy
    pause: PausePolicy
    budget: BudgetPolicy


PolicyFactory = Callable[[], Policy]
