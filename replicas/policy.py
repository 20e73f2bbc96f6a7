"""The interfaces of a scheduling policy: order, pause and budget. Each is a pure function of a frozen view.

A policy keeps no state and reads no clock. The view has everything that it may know, and the scheduler acts on its
result. Times are in seconds on the scheduler's clock, and lengths in tokens.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import Enum
from functools import cached_property
from math import inf, isclose
from typing import Protocol

from cluster.config.schema import SloConfig
from cluster.core.kv_price import KvRates, Place
from cluster.core.lifecycle.events import PauseReason
from cluster.core.lifecycle.machine import ProgramState
from cluster.core.program import Hints
from cluster.core.slo import NO_BOUNDS, Slo
from cluster.durations.table import DurationTable
from replicas.cost_model import CostModel

RankKey = tuple[float, ...]
IsLate = Callable[[RankKey], bool]
"""Whether a turn of this rank is deferred."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts that do not change while a replica lives, except for the measured speed in ``cost``."""

    cost: CostModel
    """The cost model, scaled by measured step times: see `replicas.step_pace`."""
    slo: SloConfig
    capacity_tokens: int
    """Tokens whose KV fits into the replica's memory."""
    max_tokens: int
    """vLLM's max_num_batched_tokens: the largest number of tokens of a step."""
    host_tokens: int = 0
    """Capacity of the host tier, in tokens. 0 means that there is none."""
    prefix_cache: bool = True
    """Whether released KV can be found again until others need its memory."""

    def alone_s(self, tokens: int, context_tokens: int) -> float:
        """Return the seconds that the first token of a turn takes alone.

        Args:
            tokens: tokens of the prompt that the program did not have before.
            context_tokens: the other tokens of the prompt.
        """
        return self.cost.prefill_s(max(1, tokens), context_tokens, self.max_tokens)


@dataclass(frozen=True)
class LoadView:
    """The replica's load. One view serves a whole step, so that values needed for every turn are computed once."""

    facts: ReplicaFacts
    now_s: float
    step: int
    """Number of steps scheduled since the start."""
    running: int
    running_tokens: int
    """Tokens of the running turns that have KV. Tokens that several turns share count for each, as each reads them."""
    waiting: int
    held_tokens: int
    """Tokens of memory of the holds. A block that several programs hold counts once."""
    free_tokens: int
    """Tokens of memory that nobody owns. The prefix cache may still have contents there."""
    waiting_late: int = 0
    """Number of waiting turns that the order policy defers: see ``Policy.is_late``."""
    waiting_tokens: int = 0
    """Tokens that the other waiting turns have to compute, without held ones."""
    lost_queue_s: float = 0.0
    """Recent mean of the seconds from arrival to admission of turns whose programs had lost their KV. It is 0 before
    the first."""
    prefill_tokens: int = 0
    """Tokens that the running turns have to compute before they generate, without deferred turns."""
    disk_read_s: float = inf
    """Measured seconds to read one token's KV from the disk tier. Infinite: nothing can be read."""

    def rates(self, context_tokens: int) -> KvRates:
        """Return the seconds of one token of a context, by which the places of its KV are compared."""
        cost, tokens = self.facts.cost, max(1, context_tokens)
        return KvRates(cost.prefill_s(tokens) / tokens, cost.swap_s(tokens) / tokens, self.disk_read_s)

    @property
    def waiting_in_time(self) -> int:
        """Number of waiting turns that can still meet the SLO."""
        return self.waiting - self.waiting_late

    @cached_property
    def iteration_s(self) -> float:
        """T_fwd: seconds of a decode iteration of the running turns, or of one turn if none runs."""
        return self.facts.cost.decode_step_s(max(1, self.running), self.running_tokens)

    @cached_property
    def joined_iteration_s(self) -> float:
        """Seconds of a decode iteration with one more turn than run now."""
        return self.facts.cost.decode_step_s(self.running + 1, self.running_tokens)

    @cached_property
    def joined_share_s(self) -> float:
        """One turn's share of such an iteration, without the reading of KV."""
        turns = self.running + 1
        return self.facts.cost.decode_step_s(turns) / turns


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of a turn and of what follows it, by the client's hints or by learnt means."""

    output_tokens: float
    """Tokens that the turn generates."""
    pause_s: float
    """Seconds of the tool call after the turn. It is 0 for a last turn."""
    returned_tokens: float
    """New prompt tokens of the next turn. It is 0 for a last turn."""
    later_tokens: float
    """Tokens that will be computed for the program's turns after this one, prompts and outputs."""
    later_turns: float
    """Number of the program's turns after this one."""
    pause_hinted: bool = False
    """Whether ``pause_s`` is the client's hint."""


NOTHING_EXPECTED = Forecast(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Work that is expected, in units that a cost model turns into seconds. Works of several programs add up."""

    missing_tokens: float = 0.0
    """Prompt tokens to compute."""
    output_tokens: float = 0.0
    output_contexts: float = 0.0
    """Sum, over the output tokens, of the length of the context that each reads."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.missing_tokens + other.missing_tokens,
            self.output_tokens + other.output_tokens,
            self.output_contexts + other.output_contexts,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.missing_tokens - other.missing_tokens,
            self.output_tokens - other.output_tokens,
            self.output_contexts - other.output_contexts,
        )

    def is_close(self, other: "Work") -> bool:
        """Return whether both are equal up to the rounding of sums."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(isclose(one, two, rel_tol=1e-6, abs_tol=1e-2) for one, two in pairs)


@dataclass(frozen=True, slots=True)
class TreeView:
    """The tree of programs to which a turn belongs, see `replicas.program_trees`."""

    others: Work
    """What is ahead of its other programs: ancestors, siblings and descendants."""


class KvPlace(Enum):
    """Where the KV of a waiting turn's program is."""

    HELD = "held"
    SWAPPED = "swapped"
    NONE = "none"
    """The KV is released or was never computed. The prefix cache may still have some of it."""


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn that waits for admission."""

    program: ProgramState
    hints: Hints
    forecast: Forecast
    load: LoadView
    arrived_s: float
    """Time at which this turn arrived. ``program.arrived_s`` is the time of its program."""
    queued_step: int
    """Number of the step at which it began to wait: its arrival, or its last preemption."""
    tokens: int
    """Tokens of its prompt, and those that it generated before a preemption."""
    cached_tokens: int
    """Those of ``tokens`` whose KV is held or swapped."""
    preempted: bool
    """Whether it has run and was preempted for lack of memory."""
    kv: KvPlace
    generated_tokens: int = 0
    """Those of ``tokens`` that it generated before a preemption."""
    first_token_s: float | None = None
    """Time of its first token, or None if there is none yet."""
    bounds: Slo = NO_BOUNDS
    """Its own bounds: those of its tenant, and its client's deadline."""
    longest_wait_steps: int = 0
    """Largest number of steps that its program waited before, since it was first scheduled."""
    tree: TreeView | None = None
    """The tree of its program. None: the program is alone."""
    waited_s: float = 0.0
    """Seconds that it has waited for admission: after its arrival, and after its preemptions."""

    @property
    def begun(self) -> bool:
        """Whether its program has been scheduled before."""
        return self.preempted or self.program.last_served_s is not None

    @property
    def pinned(self) -> bool:
        """Whether its program's KV is held, and the hold has not been evicted."""
        return self.kv is KvPlace.HELD


@dataclass(frozen=True, slots=True)
class RunningView:
    """A turn that runs while another one lacks memory or a place in the batch."""

    request_id: str
    sheddable: bool
    """See `Hints.sheddable`."""
    missing_tokens: int
    """Prompt tokens that are still to be computed."""
    left_tokens: float
    """Tokens that it is still expected to generate."""
    freed_tokens: int
    """Memory that becomes free when it ends or is preempted, in tokens. What others use, too, does not count."""
    computed_tokens: int
    """Tokens whose KV it would lose."""
    copied_tokens: int = 0
    """Those of ``computed_tokens``, from the first one on, of which the host tier has a copy."""
    waited_s: float = 0.0
    """Seconds that it has waited: for its first token if it has none, else for its admissions."""
    again_s: float | None = None
    """Seconds that it has run since it was admitted after a preemption. None: it was never preempted."""


@dataclass(frozen=True, slots=True)
class ShortageView:
    """The waiting turn that is admitted next, which lacks memory or a place in the batch, and the turns that run."""

    turn: TurnView
    lacking_tokens: int
    """Tokens of memory that it lacks. 0: it lacks a place in the batch."""
    running: tuple[RunningView, ...]


@dataclass(frozen=True, slots=True)
class PauseView:
    """A program at the end of a turn that is not its last."""

    program: ProgramState
    hints: Hints
    forecast: Forecast
    load: LoadView
    tools: tuple[str, ...]
    """Tools that the turn asked for. It is never empty (see ``cluster.core.program.USER_REPLY``)."""
    context_tokens: int
    """Tokens whose KV the program has in memory."""
    durations: DurationTable
    """Known tool durations: observations of this replica and of the others."""
    average_turns: float | None
    """Mean number of turns of the programs that have ended, or None before the first has."""
    turns_correlation: float | None = None
    """Correlation, over the pauses of the programs that have ended, of the turns before a pause with the turns after
    it. None where it is not defined, as before the first such pause."""
    host_room: bool = True
    """Whether the host tier, if there is one, has the context or has room for it."""
    on_disk: bool = False
    """Whether the disk tier has the context, or is about to write it."""
    returns: float = 1.0
    """Probability that the program comes back at all."""

    @property
    def now_s(self) -> float:
        """Time of the pause's beginning."""
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
    """Whether its next turn has arrived and waits for admission."""
    asked: bool = False
    """Whether the client asked for the hold."""
    children_s: float | None = None
    """Seconds that the programs which the pause waits for are expected to take from now on. None: there are none."""
    bounds: Slo = NO_BOUNDS
    """The bounds of the turn that waits, or else those of its tenant."""
    host_room: bool = True
    """As in a `PauseView`."""
    on_disk: bool = False
    """As in a `PauseView`."""
    returns: float = 1.0
    """As in a `PauseView`, as of the beginning of the pause."""


class Claimant(Enum):
    """Who needs the memory that a hold occupies."""

    RUNNING = "running"
    """A running turn that grows and would be preempted without memory."""
    WAITING = "waiting"
    """A waiting turn, while others run and will free memory."""
    STARVED = "starved"
    """A waiting turn, while nothing runs and so nothing else will free memory."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the blocks allocated until ``until_s``, unless the hold is evicted or used before."""

    until_s: float
    reason: PauseReason = PauseReason.POLICY


@dataclass(frozen=True, slots=True)
class Swap:
    """Free the blocks, of which a tier has a copy. The copy is loaded when the tool has finished."""

    reason: PauseReason = PauseReason.POLICY
    place: Place = Place.HOST
    """The tier: `Place.HOST` or `Place.DISK`."""


@dataclass(frozen=True, slots=True)
class Release:
    """Free the blocks. The prefix cache may still have them when the program comes back."""

    reason: PauseReason = PauseReason.POLICY


PauseDecision = Hold | Swap | Release


class OrderPolicy(Protocol):
    """Orders the waiting turns for admission."""

    @property
    def refresh_steps(self) -> int | None:
        """Number of steps within which time-dependent ranks are computed again. None: ranks change only with events."""
        ...

    def key(self, turn: TurnView) -> RankKey:
        """Return the rank of a turn. The least is admitted first, and ties are in order of arrival."""
        ...


class PausePolicy(Protocol):
    """Decides what happens to a paused program's KV, and whose KV is evicted first when memory is short."""

    @property
    def review_steps(self) -> int | None:
        """Number of steps after which a hold is reviewed again. None: holds are not reviewed."""
        ...

    def decide(self, pause: PauseView) -> PauseDecision:
        """Decide between hold, swap and release, at the end of a turn that is not the last."""
        ...

    def review(self, hold: HoldView) -> PauseDecision:
        """Decide between hold, swap and release while the pause lasts. It is called every ``review_steps`` steps."""
        ...

    def victim_key(self, hold: HoldView) -> RankKey:
        """Return the rank of a hold for eviction. The least is evicted first."""
        ...

    def yields(self, hold: HoldView, claimant: Claimant) -> bool:
        """Return whether the hold may be evicted for ``claimant``.

        It must return True for STARVED, because the replica would otherwise never run a turn again.
        """
        ...


class PreemptionPolicy(Protocol):
    """Decides which running turns give their memory to a waiting turn."""

    def victims(self, shortage: ShortageView) -> tuple[str, ...]:
        """Return the ids of the running turns to preempt. It is empty if the waiting turn shall wait."""
        ...

    def is_protected(self, running: RunningView, load: LoadView) -> bool:
        """Return whether a sheddable turn is not preempted now, whoever lacks memory."""
        ...


class BudgetPolicy(Protocol):
    """Decides how many tokens a step may schedule."""

    def tokens(self, load: LoadView) -> int:
        """Return the number of tokens, between 1 and ``load.facts.max_tokens``.

        A turn that generates counts one. What speculative decoding drafts is added to it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A complete policy. ``name`` is its name in the registry."""

    name: str
    order: OrderPolicy
    pause: PausePolicy
    budget: BudgetPolicy
    reserve_share: float = 0.0
    """Share of the memory that admissions leave free while other turns run. Running turns grow into it; otherwise they
    would evict holds or be preempted. It corresponds to vLLM's watermark, and the larger of the two is used."""
    is_late: IsLate | None = None
    """Whether turns of a rank are deferred, or None to defer no turn. While they wait, ``LoadView.waiting_late`` counts
    them. Their prompts are computed after all others (`replicas.prefill_scheduling`)."""
    max_wait_s: float | None = None
    """Bound on the seconds from a turn's arrival to its first token, by which `replicas.load_shedding` refuses new
    programs. None: there is no bound, and nothing is refused."""
    skips_swapped: bool = False
    """Whether waiting turns whose context is on the host are passed over while they do not fit, as in engines with a
    queue of their own for swapped turns (InferCept section 4.3, AugServe algorithm 1)."""
    single_flight: bool = False
    """Whether waiting turns wait for blocks that a running prompt is about to compute, see `replicas.single_flight`."""
    preemption: PreemptionPolicy | None = None
    """None: running turns are preempted as in vLLM, where another running turn lacks memory."""
    evicts_ends: bool = False
    """Whether a turn that lacks memory gets only the end of a hold, as much as it lacks. False: the whole hold ends."""
    meets_requests: bool = True
    """Whether a context is held for as long as its client asks, whatever the pause policy would decide."""
    guards_memory: bool = False
    """Whether the memory does not thrash under it, however many programs arrive. The router then sends more of them."""
    ranks_running: bool = False
    """Whether running turns have ranks, too: a step computes their prompts in this order, a waiting turn that ranks
    before a running prompt is computed first, and the turn that ranks last is preempted. False: all of this is in the
    order of admission, but prompts have ranks where ``is_late`` is set."""
