"""What the records of a run amount to: one summary a policy, the same for live runs and simulated ones."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cluster.bench.result import BenchResult
from cluster.goodput import Goodput, Outcome, ProgramRecord, Slo, TurnRecord


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some values: all None if there are none."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        """Of the values that are known."""
        known = [value for value in values if value is not None]
        if not known:
            return cls(None, None, None, None)
        p50, p95, p99 = (float(value) for value in np.percentile(known, (50, 95, 99)))
        return cls(float(np.mean(known)), p50, p95, p99)


TURN_METRICS: dict[str, Callable[[TurnRecord], float | None]] = {
    "ttft_s": lambda turn: turn.ttft_s,
    "tpot_s": lambda turn: turn.tpot_s,
    "client_lag_s": lambda turn: None if turn.sent_s is None else turn.sent_s - turn.intended_start_s,
}
"""Over the turns that are OK."""

PROGRAM_METRICS: dict[str, Callable[[ProgramRecord], float | None]] = {
    "norm_latency_s": lambda program: program.normalized_latency_s,
    "jct_s": lambda program: program.jct_s,
    "jct_wall_s": lambda program: program.jct_wall_s,
    "bubble_s": lambda program: program.bubble_s,
    "recomputed_tokens": lambda program: program.recomputed_tokens,
    "reused_tokens": lambda program: program.reused_tokens,
    "fetched_tokens": lambda program: program.fetched_tokens,
}
"""Over the programs that completed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy over some windows of measurement. ``distributions`` has the keys of the two tables above."""

    policy: str
    goodput: Goodput
    outcomes: Counter[Outcome]
    """Of the measured programs: sums up to the offered ones."""
    distributions: dict[str, Distribution]


def summarize(policy: str, programs: Sequence[ProgramRecord], slo: Slo, window_s: float) -> Summary:
    """Sum up ``programs``, all that were meant to arrive within ``window_s`` measured seconds."""
    turns = [turn for program in programs for turn in program.turns if turn.outcome is Outcome.OK]
    completed = [program for program in programs if program.outcome is Outcome.OK]
    distributions = {key: Distribution.of(map(metric, turns)) for key, metric in TURN_METRICS.items()}
    distributions |= {key: Distribution.of(map(metric, completed)) for key, metric in PROGRAM_METRICS.items()}
    return Summary(
        policy=policy,
        goodput=Goodput.of(programs, slo, window_s),
        outcomes=Counter(program.outcome for program in programs),
        distributions=distributions,
    )


def by_policy(result: BenchResult) -> list[Summary]:
    """One summary a policy, over all its blocks, in the order in which the policies were named."""
    settings = result.settings
    return [
        summarize(
            policy,
            [program for block in result.blocks if block.policy == policy for program in block.measured],
            settings.slo,
            settings.window_s * settings.blocks,
        )
        for policy in settings.policy_names
    ]


def by_block(result: BenchResult, policy: str) -> list[Summary]:
    """One summary for each block of ``policy``, so that noise can be seen."""
    return [
        summarize(policy, block.measured, result.settings.slo, result.settings.window_s)
        for block in result.blocks
        if block.policy == policy
    ]


def as_json(summary: Summary, result: BenchResult) -> dict[str, Any]:
    """One JSON line, with the keys of `caesura simulate`; what only a simulator knows is null.

    ``bubble_s``, ``recomputed_tokens``, ``reused_tokens`` and ``fetched_tokens`` (from a host tier) are means over
    completed programs. Times are seconds, ``goodput_*`` per second.
    """
    settings = result.settings
    return {
        "policy": summary.policy,
        "preset": f"live/{result.model}",
        "rate": settings.rate_per_s,
        "seed": settings.seed,
        "host_gib": None,
        **measures(summary),
        "wasted_gib_s": None,
        "schedule_ms": None,
        "wall_s_per_minute": None,
        "command": settings.command,
    }


def measures(summary: Summary) -> dict[str, Any]:
    """The part of a JSON line that live and simulated runs have in common; see :func:`as_json`."""
    goodput, found = summary.goodput, summary.distributions
    return {
        "offered": goodput.offered_programs,
        "completed": goodput.completed_programs,
        "goodput_programs": goodput.programs_per_s,
        "goodput_requests": goodput.requests_per_s,
        "attainment": goodput.attainment,
        "ttft_s": asdict(found["ttft_s"]),
        "tpot_s": asdict(found["tpot_s"]),
        "jct_s": asdict(found["jct_s"]),
        "jct_wall_s": asdict(found["jct_wall_s"]),
        "norm_latency_s": asdict(found["norm_latency_s"]),
        "bubble_s": found["bubble_s"].mean,
        "recomputed_tokens": found["recomputed_tokens"].mean,
        "reused_tokens": found["reused_tokens"].mean,
        "fetched_tokens": found["fetched_tokens"].mean,
    }
