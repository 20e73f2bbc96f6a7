"""The results of a benchmark: the record of every program, and a summary of the records for each policy."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from cluster.core.slo import Goodput, Outcome, ProgramRecord, Slo, TurnRecord
from cluster.offline.bench.history import MemorySample, ProgramHistory
from cluster.offline.bench.settings import BenchSettings
from cluster.offline.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Every program of one block under one policy."""

    policy: str
    block: int
    warmup: tuple[ProgramRecord, ...]
    """Programs with an intended arrival in the warm-up. They are reported, but not measured."""
    measured: tuple[ProgramRecord, ...]
    start_s: float = 0.0
    """Start of the block, on the clock of its records."""
    histories: Mapping[str, ProgramHistory] = field(default_factory=dict)
    """History of each program by its id, if the server has one."""
    memory: tuple[MemorySample, ...] = ()
    """Memory samples, if the run is recorded."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All results of a benchmark."""

    settings: BenchSettings
    model: str
    workload: Workload
    blocks: tuple[BlockResult, ...]
    """Blocks in the order in which they ran."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the server's software, if it reports them."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of some values. All are None if there are no values."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Distribution":
        """Compute the distribution of the known values."""
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
"""Metrics over the turns with the outcome OK."""

PROGRAM_METRICS: dict[str, Callable[[ProgramRecord], float | None]] = {
    "norm_latency_s": lambda program: program.normalized_latency_s,
    "jct_s": lambda program: program.jct_s,
    "jct_wall_s": lambda program: program.jct_wall_s,
    "bubble_s": lambda program: program.bubble_s,
    "recomputed_tokens": lambda program: program.recomputed_tokens,
    "reused_tokens": lambda program: program.reused_tokens,
    "fetched_tokens": lambda program: program.fetched_tokens,
}
"""Metrics over the programs that completed."""

SPREADS = (
    *("ttft_s", "ttft_all_s", "tpot_s", "client_lag_s"),
    *("jct_s", "completion_all_s", "completion_offered_s", "jct_wall_s", "completion_wall_all_s", "norm_latency_s"),
)
"""Metrics of which a result contains the mean and the percentiles."""
MEANS = ("bubble_s", "recomputed_tokens", "reused_tokens", "fetched_tokens")
"""Metrics of which a result contains only the mean."""


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Summary of the programs of one kind. Its programs are those of the measured windows, with any outcome."""

    goodput: Goodput
    completion_all_s: Distribution
    completion_wall_all_s: Distribution
    """The same with tool time, and with the time of the programs that a program starts and waits for."""
    ttft_all_s: Distribution

    @classmethod
    def of(cls, programs: Sequence[ProgramRecord], slo: Slo, window_s: float) -> "dict[str, KindSummary]":
        """Return one summary for each kind, by its name. Programs without a kind have none."""
        kinds = sorted({program.kind for program in programs if program.kind})
        found: dict[str, KindSummary] = {}
        for kind in kinds:
            alike = [program for program in programs if program.kind == kind]
            admitted = [program for program in alike if not program.is_refused]
            completion_s = Distribution.of(program.spent_s for program in admitted)
            wall_s = Distribution.of(program.spent_wall_s for program in admitted)
            found[kind] = cls(Goodput.of(alike, slo, window_s), completion_s, wall_s, _ttft_all_s(admitted))
        return found


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of one policy over its measured windows.

    ``distributions`` has the keys of the two tables above, and four over programs with any outcome: ``ttft_all_s``
    over all turns that became due, ``completion_all_s`` and ``completion_wall_all_s`` over all programs, these three
    without the programs that were refused at once, and ``completion_offered_s`` over all programs with these. What has
    not ended counts there with its time so far, see `cluster.core.slo.ProgramRecord.spent_s`.
    """

    policy: str
    goodput: Goodput
    longest_wait_s: float | None
    """Longest time from the intended start to the first token, over the turns that were not rejected."""
    kinds: Mapping[str, "KindSummary"]
    """Summary of the programs of each kind, if the workload has kinds."""
    outcomes: Counter[Outcome]
    """Number of measured programs by outcome. The sum is the number of offered programs."""
    distributions: dict[str, Distribution]
    attainment_ttft: float | None
    """Share of due turns whose TTFT met the SLO's bound; None if there is no bound."""
    cached_share: float | None
    """Share of prompt tokens that needed no computation, over the turns for which the server reports it."""
    tokens_per_s: float
    """Tokens of turns that ended within the windows, per second."""


def summarize(
    policy: str, programs: Sequence[ProgramRecord], slo: Slo, window_s: float, generated_tokens: int
) -> Summary:
    """Summarize a measurement.

    Args:
        policy: the policy of the measurement.
        programs: all programs with an intended arrival within the measured windows.
        slo: the bounds.
        window_s: total length of all windows in seconds.
        generated_tokens: see `tokens_between`. It includes tokens of programs that arrived before a window.
    """
    due = [turn for program in programs for turn in program.turns]
    turns = [turn for turn in due if turn.outcome is Outcome.OK]
    completed = [program for program in programs if program.outcome is Outcome.OK]
    distributions = {key: Distribution.of(map(metric, turns)) for key, metric in TURN_METRICS.items()}
    distributions |= {key: Distribution.of(map(metric, completed)) for key, metric in PROGRAM_METRICS.items()}
    admitted = [program for program in programs if not program.is_refused]
    distributions |= {
        "ttft_all_s": _ttft_all_s(admitted),
        "completion_all_s": Distribution.of(program.spent_s for program in admitted),
        "completion_offered_s": Distribution.of(program.spent_s for program in programs),
        "completion_wall_all_s": Distribution.of(program.spent_wall_s for program in admitted),
    }
    waits_s = [program.longest_wait_s for program in programs]
    return Summary(
        policy=policy,
        goodput=Goodput.of(programs, slo, window_s),
        longest_wait_s=max((wait_s for wait_s in waits_s if wait_s is not None), default=None),
        kinds=KindSummary.of(programs, slo, window_s),
        outcomes=Counter(program.outcome for program in programs),
        distributions=distributions,
        attainment_ttft=_share_in_time(due, slo),
        cached_share=cached_share(due),
        tokens_per_s=generated_tokens / window_s,
    )


def _ttft_all_s(programs: Sequence[ProgramRecord]) -> Distribution:
    return Distribution.of(chain.from_iterable(program.first_tokens_s for program in programs))


def _share_in_time(due: Sequence[TurnRecord], slo: Slo) -> float | None:
    bounded = [(turn.ttft_s, bound) for turn in due if (bound := slo.ttft_bound_s(turn.alone_s)) is not None]
    return sum(ttft is not None and ttft <= bound for ttft, bound in bounded) / len(bounded) if bounded else None


def cached_share(turns: Iterable[TurnRecord]) -> float | None:
    """Return the share of prompt tokens that needed no computation; None if the server did not report it."""
    known = [(turn.cached_tokens, turn.prompt_tokens) for turn in turns if turn.cached_tokens is not None]
    prompts = sum(prompt for _, prompt in known)
    return sum(cached for cached, _ in known) / prompts if prompts else None


def tokens_between(programs: Iterable[ProgramRecord], begin_s: float, end_s: float) -> int:
    """Return the output tokens of all turns that ended with the outcome OK between two times."""
    turns = (turn for program in programs for turn in program.turns if turn.outcome is Outcome.OK)
    return sum(t.output_tokens for t in turns if t.last_token_s is not None and begin_s <= t.last_token_s < end_s)


def by_policy(result: BenchResult) -> list[Summary]:
    """Return one summary for each policy over all its blocks, in the order of the policies."""
    blocks = {policy: [b for b in result.blocks if b.policy == policy] for policy in result.settings.policy_names}
    return [summary_of(result.settings, policy, its) for policy, its in blocks.items()]


def by_block(result: BenchResult, policy: str) -> list[Summary]:
    """Return one summary for each block of ``policy``, which shows the noise."""
    return [summary_of(result.settings, policy, [block]) for block in result.blocks if block.policy == policy]


def summary_of(settings: BenchSettings, policy: str, blocks: Sequence[BlockResult]) -> Summary:
    """Return one summary of several blocks of a policy."""
    tokens = 0
    for block in blocks:
        begin_s = block.start_s + settings.warmup_s
        tokens += tokens_between((*block.warmup, *block.measured), begin_s, begin_s + settings.window_s)
    measured = [program for block in blocks for program in block.measured]
    return summarize(policy, measured, settings.slo, settings.window_s * len(blocks), tokens)


def as_json(summary: Summary, result: BenchResult) -> dict[str, Any]:
    """Return one JSON line with the keys of `caesura simulate`. Values that only a simulator knows are null.

    ``bubble_s``, ``recomputed_tokens``, ``reused_tokens`` and ``fetched_tokens`` (from a host tier) are means over
    completed programs. Times are in seconds, and ``goodput_*`` is per second.
    """
    settings = result.settings
    return {
        "policy": summary.policy,
        "preset": f"live/{result.model}",
        "rate": settings.rate_per_s,
        "seed": settings.seed,
        "host_gib": None,
        "disk_gib": None,
        "restart_every_s": None,
        "disaggregation": None,
        **measures(summary),
        "jain": None,
        "wasted_gib_s": None,
        "wasted_by_cause_gib_s": None,
        "schedule_ms": None,
        "wall_s_per_minute": None,
        "command": settings.command,
    }


def measures(summary: Summary) -> dict[str, Any]:
    """Return the part of a JSON line that live and simulated runs share; see :func:`as_json`.

    What needs a bound is null where the SLO bounds nothing.
    """
    found = summary.distributions
    return {
        **_good(summary.goodput),
        "outcomes": {outcome.value: summary.outcomes[outcome] for outcome in Outcome},
        "refused": summary.outcomes[Outcome.REJECTED],
        "longest_wait_s": summary.longest_wait_s,
        "attainment_ttft": summary.attainment_ttft,
        "tokens_per_s": summary.tokens_per_s,
        "cached_share": summary.cached_share,
        **{key: asdict(found[key]) for key in SPREADS},
        **{key: found[key].mean for key in MEANS},
        "kinds": {
            name: {
                **_good(kind.goodput),
                "completion_all_s": asdict(kind.completion_all_s),
                "completion_wall_all_s": asdict(kind.completion_wall_all_s),
                "ttft_all_s": asdict(kind.ttft_all_s),
            }
            for name, kind in summary.kinds.items()
        },
    }


def _good(goodput: Goodput) -> dict[str, Any]:
    good = {
        "goodput_programs": goodput.programs_per_s,
        "goodput_programs_first": goodput.programs_first_per_s,
        "goodput_requests": goodput.requests_per_s,
        "attainment": goodput.attainment,
        "attainment_first": goodput.attainment_first,
        "attainment_requests": goodput.attainment_requests,
    }
    counts = {"offered": goodput.offered_programs, "completed": goodput.completed_programs}
    return counts | (good if goodput.is_bounded else dict.fromkeys(good))
