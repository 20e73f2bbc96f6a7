"""SLOs and goodput: the only definition of a good turn and a good program, for live runs and for simulations.

Every latency counts from the *intended* start. For a program's first turn that is its intended arrival, for a later
one the end of the turn before plus the tool's duration. Latencies therefore include the delay of a late client or a
full server (no coordinated omission). Times are seconds on one clock with any origin, lengths are tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

T = TypeVar("T", int, float)


class Outcome(Enum):
    """How a turn or a program ended. Each has exactly one."""

    OK = "ok"
    FAILED = "failed"
    """An error, a broken stream or a wrong number of tokens."""
    REJECTED = "rejected"
    """The server was overloaded and rejected it."""
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"
    """Still under way when the measurement ended, or when its client went away."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One generation: what was intended, and its result."""

    program_id: str
    index: int
    """0 for a program's first turn; a later one *resumes* the program."""
    intended_start_s: float
    outcome: Outcome
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens received, whatever the outcome."""
    previous_context_tokens: int = 0
    """Leading tokens of this prompt that the program's turn before had sent or generated."""
    cached_tokens: int | None = None
    """Prompt tokens that the server did not compute; None: it did not report them."""
    fetched_tokens: int | None = None
    """The part of them that came from a host tier; None: the server did not report it."""
    queue_s: float | None = None
    """Seconds that the turn waited in the server's queue; None: unknown."""
    sent_s: float | None = None
    """When the client did send it; None: never, or simulated."""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended start to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_start_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the intended start to the last token; None unless the turn is OK."""
        if self.outcome is not Outcome.OK or self.last_token_s is None:
            return None
        return self.last_token_s - self.intended_start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens after the first; None for a turn of one token, or one that is not OK."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end seconds divided by output tokens."""
        return None if self.e2e_s is None or self.output_tokens < 1 else self.e2e_s / self.output_tokens

    @property
    def reused_tokens(self) -> int | None:
        """Tokens of the previous context whose KV the server still had; None: the server did not report it."""
        return None if self.cached_tokens is None else min(self.cached_tokens, self.previous_context_tokens)

    @property
    def recomputed_tokens(self) -> int | None:
        """Tokens of the previous context that the server recomputed.

        Never quite 0 on a block-wise prefix cache: the last, partial block is always recomputed.
        """
        return None if self.reused_tokens is None else self.previous_context_tokens - self.reused_tokens


@dataclass(frozen=True, slots=True)
class ProgramRecord:
    """One program: the turns that became due, in order. Turns after a failed one never did."""

    program_id: str
    arrival_s: float
    """Intended."""
    outcome: Outcome
    turns: tuple[TurnRecord, ...]
    planned_turns: int
    kind: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens received over all turns."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def jct_wall_s(self) -> float | None:
        """Job completion time with tool time: intended arrival to the last token; None unless the program is OK."""
        last_token_s = self.turns[-1].last_token_s if self.turns else None
        return last_token_s - self.arrival_s if self.outcome is Outcome.OK and last_token_s is not None else None

    @property
    def jct_s(self) -> float | None:
        """Job completion time without tool time: the sum of its turns' end-to-end times."""
        parts = _all_known(turn.e2e_s for turn in self.turns)
        return sum(parts) if self.outcome is Outcome.OK and parts is not None else None

    @property
    def normalized_latency_s(self) -> float | None:
        """(completion - arrival - tool time) / output tokens, of the whole program."""
        return None if self.jct_s is None or self.output_tokens < 1 else self.jct_s / self.output_tokens

    @property
    def bubble_s(self) -> float | None:
        """Scheduling bubble: seconds that resumed turns waited in the server's queue; None: some are unknown."""
        parts = _all_known(turn.queue_s for turn in self.turns[1:])
        return None if parts is None else float(sum(parts))

    @property
    def reused_tokens(self) -> int | None:
        """Over the resumed turns; None: some are unknown."""
        parts = _all_known(turn.reused_tokens for turn in self.turns[1:])
        return None if parts is None else sum(parts)

    @property
    def recomputed_tokens(self) -> int | None:
        """Over the resumed turns; None: some are unknown."""
        parts = _all_known(turn.recomputed_tokens for turn in self.turns[1:])
        return None if parts is None else sum(parts)

    @property
    def fetched_tokens(self) -> int | None:
        """From a host tier, over all turns; None: some are unknown."""
        parts = _all_known(turn.fetched_tokens for turn in self.turns)
        return None if parts is None else sum(parts)


class Bound(Enum):
    """A latency that an SLO bounds."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    NORMALIZED = "normalized"


class Verdict(Enum):
    """The result of a program. Each has exactly one."""

    GOOD = "good"
    """Every turn is OK and within its bounds, and the program within the normalised one."""
    LATE = "late"
    """Every turn is OK, but some bound is not met."""
    FAILED = "failed"
    """A turn failed, was rejected or timed out."""
    ABANDONED = "abandoned"
    """A client did not wait for a turn."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of a program's turns, in any order; the verdict needs nothing else."""

    turns: int = 0
    late: int = 0
    """OK, but not within the bounds for turns."""
    failed: int = 0
    unfinished: int = 0
    output_tokens: int = 0
    e2e_s: float = 0.0
    """Of the turns that are OK."""

    def __add__(self, other: "Tally") -> "Tally":
        """The turns of both."""
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
        """Time without tools divided by all tokens; None without any."""
        return None if self.output_tokens < 1 else self.e2e_s / self.output_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """The bounds that make a turn good, in seconds; None: that bound does not apply (see ``config.SloConfig``)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    normalized_latency_s: float | None = None

    def turn_is_good(self, turn: TurnRecord) -> bool:
        """The turn is OK and meets every bound that is given (goodput of requests, as in vLLM's own benchmark)."""
        return turn.outcome is Outcome.OK and not self.missed(turn)

    def missed(self, turn: TurnRecord) -> tuple[Bound, ...]:
        """The bounds that a turn, which is OK, does not meet."""
        met = {
            Bound.TTFT: _within(turn.ttft_s, self.ttft_s),
            Bound.TPOT: turn.output_tokens < 2 or _within(turn.tpot_s, self.tpot_s),
            Bound.E2E: _within(turn.e2e_s, self.e2e_s),
            Bound.NORMALIZED: _within(turn.normalized_latency_s, self.normalized_latency_s),
        }
        return tuple(bound for bound, is_met in met.items() if not is_met)

    def tally(self, turn: TurnRecord) -> Tally:
        """One turn, as a part of its program."""
        if turn.outcome is not Outcome.OK:
            unfinished = turn.outcome is Outcome.UNFINISHED
            return Tally(1, 0, int(not unfinished), int(unfinished), turn.output_tokens)
        # The normalised latency bounds the program as a whole.
        late = any(bound is not Bound.NORMALIZED for bound in self.missed(turn))
        return Tally(1, int(late), 0, 0, turn.output_tokens, turn.e2e_s or 0.0)

    def verdict(self, program: Tally) -> Verdict:
        """Of a program that has ended."""
        if program.failed:
            return Verdict.FAILED
        if program.unfinished:
            return Verdict.ABANDONED
        in_time = not program.late and _within(program.normalized_latency_s, self.normalized_latency_s)
        return Verdict.GOOD if in_time else Verdict.LATE

    def program_is_good(self, program: ProgramRecord) -> bool:
        """All planned turns are OK and meet the bounds for turns; the program meets the normalised one.

        The normalised latency bounds the program as a whole, as in AugServe's evaluation: time without tools divided
        by all its tokens. A program whose every turn meets that bound meets it too, not the other way round: a turn of
        four tokens after a long tool result may be slow per token in a program that is fast.
        """
        if program.outcome is not Outcome.OK:
            return False
        return self.verdict(sum(map(self.tally, program.turns), Tally())) is Verdict.GOOD


@dataclass(frozen=True, slots=True)
class Goodput:
    """Good programs and requests of one measured window. ``programs`` are those that were meant to arrive in it."""

    window_s: float
    offered_programs: int
    completed_programs: int
    good_programs: int
    offered_requests: int
    """Turns that became due."""
    good_requests: int

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, window_s: float) -> "Goodput":
        """Count, over every program offered in a window of ``window_s`` seconds: the failed and the unfinished too.

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
            offered_requests=len(turns),
            good_requests=sum(slo.turn_is_good(turn) for turn in turns),
        )

    @property
    def programs_per_s(self) -> float:
        """Good programs per second of the window."""
        return self.good_programs / self.window_s

    @property
    def requests_per_s(self) -> float:
        """Good requests per second of the window."""
        return self.good_requests / self.window_s

    @property
    def attainment(self) -> float | None:
        """Good programs over offered ones; None if none was offered."""
        return self.good_programs / self.offered_programs if self.offered_programs else None

    @property
    def attainment_requests(self) -> float | None:
        """Good requests over those that became due; None if none did."""
        return self.good_requests / self.offered_requests if self.offered_requests else None


def _within(value: float | None, bound: float | None) -> bool:
    return bound is None or (value is not None and value <= bound)


def _all_known(values: Iterable[T | None]) -> list[T] | None:
    known = list(values)
    return None if None in known else [value for value in known if value is not None]
