"""SLOs and goodput. Live runs and simulations use the same definitions of a good turn and a good program.

Every latency counts from the *intended* start. For a program's first turn this is its intended arrival. For a later
turn it is the end of the turn before plus the tool's duration. Latencies therefore include the delay of a late client
or a full server (no coordinated omission). Times are seconds on one clock with any origin. Lengths are tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

T = TypeVar("T", int, float)

AT_ONCE_S = 1.0
"""Seconds within which a program has to be refused so that it does not count as waiting."""


class Outcome(Enum):
    """The outcome of a turn or a program. Each has exactly one."""

    OK = "ok"
    FAILED = "failed"
    """It ended with an error, a broken stream or a wrong number of tokens."""
    REJECTED = "rejected"
    """The server was overloaded and rejected it."""
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"
    """It was still in progress when the measurement ended or the client disconnected."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn: its intended start and its result."""

    program_id: str
    index: int
    """Index of the turn in its program, from 0. A turn with an index above 0 *resumes* the program."""
    intended_start_s: float
    outcome: Outcome
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Number of tokens received, with any outcome."""
    previous_context_tokens: int = 0
    """Leading tokens of this prompt that were prompt or output of the program's turn before."""
    cached_tokens: int | None = None
    """Prompt tokens that the server did not compute; None: the server did not report it."""
    fetched_tokens: int | None = None
    """The part of `cached_tokens` that came from a host tier; None: the server did not report it."""
    queue_s: float | None = None
    """Seconds that the turn waited in the server's queue; None: unknown."""
    sent_s: float | None = None
    """The time at which the client sent the turn; None: it was not sent, or it was simulated."""
    error: str | None = None
    rejected_s: float | None = None
    """Seconds from the intended start to the rejection; None: it was not rejected."""
    alone_s: float | None = None
    """Seconds that its first token would take alone, with the KV of `previous_context_tokens`; None: unknown."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended start to the first token; None: there was no token."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_start_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the intended start to the last token; None: the turn is not OK."""
        if self.outcome is not Outcome.OK or self.last_token_s is None:
            return None
        return self.last_token_s - self.intended_start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens after the first; None: the turn has fewer than two tokens or is not OK."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end seconds divided by output tokens; None: the turn has no tokens or is not OK."""
        return None if self.e2e_s is None or self.output_tokens < 1 else self.e2e_s / self.output_tokens

    @property
    def reused_tokens(self) -> int | None:
        """Tokens of the previous context whose KV the server still had; None: the server did not report it."""
        return None if self.cached_tokens is None else min(self.cached_tokens, self.previous_context_tokens)

    @property
    def recomputed_tokens(self) -> int | None:
        """Tokens of the previous context that the server recomputed; None: the server did not report it.

        With a prefix cache of blocks it is rarely 0, since the last, partial block is always recomputed.
        """
        return None if self.reused_tokens is None else self.previous_context_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program with the turns that became due, in order. Turns after a failed turn never become due."""

    program_id: str
    arrival_s: float
    """The intended arrival of the program."""
    outcome: Outcome
    turns: tuple[TurnRecord, ...]
    planned_turns: int
    kind: str = ""
    until_s: float | None = None
    """The end of the run. What did not complete counts with its time up to then; None: unknown."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens received, over all turns."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def jct_wall_s(self) -> float | None:
        """Job completion time with tool time: from the intended arrival to the last token; None: the program is not
        OK.
        """
        last_token_s = self.turns[-1].last_token_s if self.turns else None
        return last_token_s - self.arrival_s if self.outcome is Outcome.OK and last_token_s is not None else None

    @property
    def jct_s(self) -> float | None:
        """Job completion time without tool time: the sum of the turns' `e2e_s`; None: the program is not OK."""
        parts = _all_known(turn.e2e_s for turn in self.turns)
        return sum(parts) if self.outcome is Outcome.OK and parts is not None else None

    @property
    def spent_s(self) -> float | None:
        """Seconds without tool time up to the completion, or up to `until_s` if a turn is not OK; None: unknown.

        A failed or rejected turn counts up to `until_s`, so that no server gains by failing early.
        """
        parts = _all_known(
            turn.e2e_s if turn.outcome is Outcome.OK else self._since_s(turn.intended_start_s) for turn in self.turns
        )
        return None if parts is None else sum(parts)

    @property
    def spent_wall_s(self) -> float | None:
        """Seconds with tool time up to the completion, or up to `until_s`; None: unknown."""
        return self.jct_wall_s if self.outcome is Outcome.OK else self._since_s(self.arrival_s)

    @property
    def is_refused(self) -> bool:
        """Whether it was rejected at its first turn and at once. Any other rejection costs the client time or work."""
        if self.outcome is not Outcome.REJECTED or len(self.turns) != 1:
            return False
        rejected_s = self.turns[0].rejected_s
        return rejected_s is not None and rejected_s <= AT_ONCE_S

    @property
    def first_tokens_s(self) -> tuple[float | None, ...]:
        """TTFT of each turn that became due. A turn without a token counts with its time up to `until_s`."""
        return tuple(
            self._since_s(turn.intended_start_s) if turn.ttft_s is None else turn.ttft_s for turn in self.turns
        )

    @property
    def longest_wait_s(self) -> float | None:
        """The largest of `first_tokens_s` over the turns that were not rejected; None: there is none."""
        waits = zip(self.turns, self.first_tokens_s, strict=True)
        known = [wait for turn, wait in waits if turn.outcome is not Outcome.REJECTED and wait is not None]
        return max(known, default=None)

    def _since_s(self, start_s: float) -> float | None:
        return None if self.until_s is None else max(0.0, self.until_s - start_s)

    @property
    def normalized_latency_s(self) -> float | None:
        """(completion - arrival - tool time) / output tokens, for the whole program; None: it is not OK or has no
        tokens.
        """
        return None if self.jct_s is None or self.output_tokens < 1 else self.jct_s / self.output_tokens

    @property
    def bubble_s(self) -> float | None:
        """Scheduling bubble: seconds that resumed turns waited in the server's queue; None: unknown for some turn."""
        parts = _all_known(turn.queue_s for turn in self.turns[1:])
        return None if parts is None else float(sum(parts))

    @property
    def reused_tokens(self) -> int | None:
        """Sum of `TurnRecord.reused_tokens` over the resumed turns; None: unknown for some turn."""
        parts = _all_known(turn.reused_tokens for turn in self.turns[1:])
        return None if parts is None else sum(parts)

    @property
    def recomputed_tokens(self) -> int | None:
        """Sum of `TurnRecord.recomputed_tokens` over the resumed turns; None: unknown for some turn."""
        parts = _all_known(turn.recomputed_tokens for turn in self.turns[1:])
        return None if parts is None else sum(parts)

    @property
    def fetched_tokens(self) -> int | None:
        """Sum of `TurnRecord.fetched_tokens` over all turns; None: unknown for some turn."""
        parts = _all_known(turn.fetched_tokens for turn in self.turns)
        return None if parts is None else sum(parts)


class Bound(Enum):
    """A latency that an SLO bounds."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    NORMALIZED = "normalized"


class Verdict(Enum):
    """The result of a program that has ended. Each program has exactly one."""

    GOOD = "good"
    """Every turn is OK and meets its bounds, and the program meets the bound of the normalised latency."""
    LATE = "late"
    """Every turn is OK, but a turn or the program does not meet a bound."""
    FAILED = "failed"
    """A turn failed, was rejected or timed out."""
    ABANDONED = "abandoned"
    """The client disconnected before the end of a turn."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The sums over a program's turns, from which the verdict follows. The order of turns does not matter."""

    turns: int = 0
    late: int = 0
    """Number of turns that are OK but do not meet the bounds for turns."""
    failed: int = 0
    unfinished: int = 0
    output_tokens: int = 0
    e2e_s: float = 0.0
    """Sum of `TurnRecord.e2e_s` over the turns that are OK."""

    def __add__(self, other: "Tally") -> "Tally":
        """Return the sums over the turns of both."""
        return Tally(
            self.turns + other.turns,
            self.late + other.late,
            self.failed + other.failed,
            self.unfinished + other.unfinished,
            self.output_tokens + other.output_tokens,
            self.e2e_s + other.e2e_s,
        )

    @property
    def normalized_latency_s(self) -> float | None:
        """Seconds without tool time divided by output tokens; None: there are no tokens."""
        return None if self.output_tokens < 1 else self.e2e_s / self.output_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds of a good turn in seconds, see ``config.SloConfig``; None: this bound does not apply."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    normalized_latency_s: float | None = None
    slowdown: float | None = None
    """A prompt that takes long alone gets a longer bound on its TTFT: so many times `TurnRecord.alone_s`."""

    def ttft_bound_s(self, alone_s: float | None) -> float | None:
        """Return the bound on the TTFT of a turn; None: there is none.

        Args:
            alone_s: see `TurnRecord.alone_s`.
        """
        if self.slowdown is None or alone_s is None:
            return self.ttft_s
        return max(self.ttft_s or 0.0, self.slowdown * alone_s)

    def turn_is_good(self, turn: TurnRecord) -> bool:
        """Return whether the turn is OK and meets every bound that applies, as in vLLM's own benchmark of goodput."""
        return turn.outcome is Outcome.OK and not self.missed(turn)

    def missed(self, turn: TurnRecord) -> tuple[Bound, ...]:
        """Return the bounds that a turn does not meet. The turn must be OK."""
        met = {
            Bound.TTFT: _within(turn.ttft_s, self.ttft_bound_s(turn.alone_s)),
            Bound.TPOT: turn.output_tokens < 2 or _within(turn.tpot_s, self.tpot_s),
            Bound.E2E: _within(turn.e2e_s, self.e2e_s),
            Bound.NORMALIZED: _within(turn.normalized_latency_s, self.normalized_latency_s),
        }
        return tuple(bound for bound, is_met in met.items() if not is_met)

    def tally(self, turn: TurnRecord) -> Tally:
        """Return the sums of a program that has only this turn."""
        if turn.outcome is not Outcome.OK:
            unfinished = turn.outcome is Outcome.UNFINISHED
            return Tally(1, 0, int(not unfinished), int(unfinished), turn.output_tokens)
        # The normalised latency bounds the program as a whole.
        late = any(bound is not Bound.NORMALIZED for bound in self.missed(turn))
        return Tally(1, int(late), 0, 0, turn.output_tokens, turn.e2e_s or 0.0)

    def verdict(self, program: Tally) -> Verdict:
        """Return the verdict on a program that has ended."""
        if program.failed:
            return Verdict.FAILED
        if program.unfinished:
            return Verdict.ABANDONED
        in_time = not program.late and _within(program.normalized_latency_s, self.normalized_latency_s)
        return Verdict.GOOD if in_time else Verdict.LATE

    def program_is_good(self, program: ProgramRecord) -> bool:
        """Return whether all planned turns are OK and meet the bounds for turns, and the program meets the normalised
        one.

        The normalised latency bounds the program as a whole, as in AugServe's evaluation. It is the time without tools
        divided by all tokens of the program. (In AugServe's evaluation the time of tools counts.) If every turn meets
        this bound, the program meets it too. The reverse is not true: a turn of four tokens after a long tool result
        may be slow per token in a program that is fast.
        """
        if program.outcome is not Outcome.OK:
            return False
        return self.verdict(sum(map(self.tally, program.turns), Tally())) is Verdict.GOOD

    def program_begins_in_time(self, program: ProgramRecord) -> bool:
        """Return whether a program is good by the bounds of AugServe's evaluation, where a request is a whole program.

        All planned turns are OK, the *first* turn meets the bound of the TTFT, and the program meets the bound of the
        normalised latency. The TTFT of later turns has no bound, nor have `tpot_s` and `e2e_s` (AugServe, section 5.1).
        The time of tools does not count here, because no scheduler can change it. It does in AugServe's evaluation:
        `cluster.offline.reproduce.measures` has that measure.
        """
        return (
            program.outcome is Outcome.OK
            and _within(program.turns[0].ttft_s, self.ttft_bound_s(program.turns[0].alone_s))
            and _within(program.normalized_latency_s, self.normalized_latency_s)
        )


NO_BOUNDS = Slo()


@dataclass(frozen=True, slots=True)
class Goodput:
    """The good programs and requests of one measured window. Its programs are those whose intended arrival is in it.

    There are three definitions of good, which are always reported together: a program all of whose turns are in time,
    a program whose first turn is in time (AugServe's bounds), and a request (a turn) in time.
    """

    window_s: float
    offered_programs: int
    completed_programs: int
    good_programs: int
    """Number of programs for which `Slo.program_is_good`."""
    good_programs_first: int
    """Number of programs for which `Slo.program_begins_in_time`, by AugServe's bounds."""
    offered_requests: int
    """Number of turns that became due."""
    good_requests: int
    is_bounded: bool = True
    """Whether the SLO bounds anything. Else every program that completes is good, which says nothing."""

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, window_s: float) -> "Goodput":
        """Count over all programs that were offered in a window, including failed and unfinished ones.

        Args:
            programs: the programs whose intended arrival is in the window.
            slo: the bounds of good turns and programs.
            window_s: length of the window in seconds.

        Raises:
            ValueError: ``window_s`` is not positive.
        """
        if window_s <= 0:
            raise ValueError(f"a measured window of {window_s} s")
        turns = [turn for program in programs for turn in program.turns]
        return cls(
            window_s=window_s,
            offered_programs=len(programs),
            completed_programs=sum(program.outcome is Outcome.OK for program in programs),
            good_programs=sum(slo.program_is_good(program) for program in programs),
            good_programs_first=sum(slo.program_begins_in_time(program) for program in programs),
            offered_requests=len(turns),
            good_requests=sum(slo.turn_is_good(turn) for turn in turns),
            is_bounded=slo != Slo(),
        )

    @property
    def programs_per_s(self) -> float:
        """Good programs per second of the window."""
        return self.good_programs / self.window_s

    @property
    def programs_first_per_s(self) -> float:
        """Programs per second of the window that are good by AugServe's bounds."""
        return self.good_programs_first / self.window_s

    @property
    def requests_per_s(self) -> float:
        """Good requests per second of the window."""
        return self.good_requests / self.window_s

    @property
    def attainment(self) -> float | None:
        """Fraction of the offered programs that are good; None: none was offered."""
        return self.good_programs / self.offered_programs if self.offered_programs else None

    @property
    def attainment_first(self) -> float | None:
        """Fraction of the offered programs that are good by AugServe's bounds; None: none was offered."""
        return self.good_programs_first / self.offered_programs if self.offered_programs else None

    @property
    def attainment_requests(self) -> float | None:
        """Fraction of the requests due that are good; None: none became due."""
        return self.good_requests / self.offered_requests if self.offered_requests else None


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or (value is not None and value <= bound)


def _all_known(values: Iterable[T | None]) -> list[T] | None:
    known = list(values)
    return None if None in known else [value for value in known if value is not None]
