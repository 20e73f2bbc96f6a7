"""The plug-points of a replica's scheduler: order, pause and budget, each a pure function of a frozen view.

A policy keeps no state and reads no clock: what it may know is in the view, and the scheduler does the work. Times are
seconds on the scheduler's clock, lengths tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol

from cluster.config.schema import SloConfig
from cluster.core.lifecycle.events import PauseReason
from cluster.core.lifecycle.machine import ProgramState
from cluster.core.program import Hints
from cluster.durations.table import DurationTable
from replicas.cost_model import CostModel

RankKey = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What does not change while a replica lives, but for its pace."""

    cost: CostModel
    """Learns: see `replicas.step_pace`."""
    slo: SloConfig
    capacity_tokens: int
    """Tokens whose KV fits the replica's memory."""
    max_tokens: int
    """vLLM's max_num_batched_tokens: no step schedules more."""
    host_tokens: int = 0
    """Tokens that the host tier takes; 0: there is none."""


@dataclass(frozen=True)
class LoadView:
    """The replica now. One view serves a whole step: what policies ask of it for every turn is worked out once."""

    facts: ReplicaFacts
    now_s: float
    step: int
    """Steps scheduled since the start."""
    running: int
    running_tokens: int
    """KV of the running turns."""
    waiting: int
    held_tokens: int
    free_tokens: int
    """Not owned by anybody; the prefix cache may still have something there."""
    on_time_share: float = 1.0
    """Of the turns that ended of late, those whose programs were never late with a first token; 0 before the first."""
    waiting_late: int = 0
    """Of those that wait, turns that the order policy puts off: see ``Policy.late_rank``."""
    lost_queue_s: float = 0.0
    """Recent mean seconds from arrival to admission of turns whose programs had lost their KV; 0 before the first."""
    prefill_tokens: int = 0
    """Tokens that the running turns still need computed before they generate, without turns that are put off."""

    @property
    def waiting_in_time(self) -> int:
        """Turns that wait and can still meet the SLO."""
        return self.waiting - self.waiting_late

    @cached_property
    def iteration_s(self) -> float:
        """T_fwd: seconds of a decode iteration of the running turns, or of one where none runs."""
        return self.facts.cost.decode_step_s(max(1, self.running), self.running_tokens)

    @cached_property
    def joined_iteration_s(self) -> float:
        """Seconds of a decode iteration with one more turn than run now."""
        return self.facts.cost.decode_step_s(self.running + 1, self.running_tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a turn and of what follows it: the client's hints, or else what was learnt (means)."""

    output_tokens: float
    """Tokens that the turn generates."""
    pause_s: float
    """Seconds of the tool call after it; 0 for a last turn."""
    returned_tokens: float
    """Prompt tokens that the next turn brings; 0 for a last turn."""
    later_tokens: float
    """Tokens that the program's turns after this one will have computed for them, prompts and outputs."""
    later_turns: float
    """Turns after this one."""
    pause_hinted: bool = False
    """``pause_s`` is the client's own hint."""


NOTHING_EXPECTED = Forecast(0.0, 0.0, 0.0, 0.0, 0.0)


class KvPlace(Enum):
    """Where the KV of a waiting turn's program is."""

    HELD = "held"
    SWAPPED = "swapped"
    NONE = "none"
    """Released, or never there; the prefix cache may still have some."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn that waits to be admitted."""

    program: ProgramState
    hints: Hints
    forecast: Forecast
    load: LoadView
    arrived_s: float
    """When this turn came (not its program: that is ``program.arrived_s``)."""
    arrived_step: int
    """The step count when it came."""
    tokens: int
    """Prompt tokens, and those generated before a preemption."""
    cached_tokens: int
    """Of these, tokens whose KV is held or swapped."""
    preempted: bool
    """It ran already and lost its place for want of memory."""
    kv: KvPlace
    generated_tokens: int = 0
    """Of ``tokens``, those that it generated before a preemption."""
    first_token_s: float | None = None
    """When its first token came; None: not yet."""

    @property
    def pinned(self) -> bool:
        """Its program's KV is held and the hold is not broken."""
        return self.kv is KvPlace.HELD


@dataclass(frozen=True, slots=True)
class PauseView:
    """A program at the end of a turn that is not its last."""

    program: ProgramState
    hints: Hints
    forecast: Forecast
    load: LoadView
    tools: tuple[str, ...]
    """The tools that the turn asked for; never empty (see ``cluster.core.program.USER_REPLY``)."""
    context_tokens: int
    """Tokens whose KV the program has in memory."""
    durations: DurationTable
    """What is known of tool durations: this replica's observations and the others'."""
    average_turns: float | None
    """Turns of an ended program in the mean; None before the first one ended."""

    @property
    def now_s(self) -> float:
        """When it paused."""
        return self.load.now_s


@dataclass(frozen=True, slots=True)
class HoldView:
    """A paused program whose KV blocks stay allocated."""

    program: ProgramState
    forecast: Forecast
    load: LoadView
    durations: DurationTable
    context_tokens: int
    since_s: float
    until_s: float
    owner_waits: bool
    """Its next turn has come and waits to be admitted."""
    asked: bool = False
    """The client asked for the hold."""


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
    reason: PauseReason = PauseReason.POLICY


@dataclass(frozen=True, slots=True)
class Swap:
    """Give the blocks back, the host tier has a copy; it is fetched when the tool has finished."""

    reason: PauseReason = PauseReason.POLICY


@dataclass(frozen=True, slots=True)
class Release:
    """Give the blocks back: the prefix cache may still have them when the program comes back."""

    reason: PauseReason = PauseReason.POLICY


PauseDecision = Hold | Swap | Release


class OrderPolicy(Protocol):
    """In which order may waiting turns be admitted?"""

    @property
    def refresh_steps(self) -> int | None:
        """Ranks that change by themselves are taken again every so many steps; None: they change with events only."""
        ...

    def key(self, turn: TurnView) -> RankKey:
        """A rank: least first, ties by arrival."""
        ...


class PausePolicy(Protocol):
    """What becomes of a paused program's KV, and whose goes first when memory is short?"""

    @property
    def review_steps(self) -> int | None:
        """Holds are looked at again every so many steps; None: never."""
        ...

    def decide(self, pause: PauseView) -> PauseDecision:
        """Hold or release, at the end of a turn that is not the last."""
        ...

    def review(self, hold: HoldView) -> PauseDecision:
        """Go on holding, swap or release, while the pause lasts; asked every ``review_steps``."""
        ...

    def victim_key(self, hold: HoldView) -> RankKey:
        """Least is broken first."""
        ...

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """May ``claimant`` break this hold? It must be True for STARVED, or the replica would stop for ever."""
        ...


class AdmissionPolicy(Protocol):
    """How much of the memory has to be left to others when a turn is admitted? Where nothing runs, nothing has to."""

    def room_share(self, turn: TurnView) -> float:
        """The share of the memory, in [0, 1], that running turns leave together, this one being one of them.

        The turn that ranks first is asked; where it has to wait, so do all that rank after it. Held memory counts as
        left: what is worth holding is not there for admissions anyway.
        """
        ...


class BudgetPolicy(Protocol):
    """How many tokens may this step schedule?"""

    def tokens(self, load: LoadView) -> int:
        """Between 1 and ``load.facts.max_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice for each question. ``name`` is what the registry calls it."""

    name: str
    order: OrderPolicy
    pause: PausePolicy
    budget: BudgetPolicy
    reserve_share: float = 0.0
    """Part of the memory that admissions leave free while others run: what running turns grow into, else they would
    break holds or be preempted. vLLM's watermark; the larger of the two counts."""
    admission: AdmissionPolicy | None = None
    """None: whatever fits is admitted."""
    late_rank: RankKey | None = None
    """Turns of this rank and of later ones are put off: ``LoadView.waiting_late`` while they wait, behind all others
    while their prompts are computed (`replicas.prefill_scheduling`); None: no turn is."""

    @property
    def guards_memory(self) -> bool:
        """Its admissions keep the memory from thrashing, however many programs come."""
        return self.admission is not None


PolicyFactory = Callable[[], Policy]
