"""The quantities by which policies are compared, on terminals and in `caesura report`.

A result is a line of ``--json``. A quantity has the path of its keys in a result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]

COMPLETION = (
    "Completion: seconds from arrival to the last token, without tools. Programs that have not ended count with their "
    "time so far, and so do turns without a first token in TTFT. Programs that were refused within a second count only "
    "in completion of all offered."
)
UNKNOWN = "-"
PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a result."""

    label: str
    path: tuple[str, ...]
    better: int = 0
    """1 if higher is better, -1 if lower is better, 0 if neither is."""
    scale: float = 1.0
    deciding: bool = False
    """Whether the quantity is shown without ``--verbose``."""


def _distribution(label: str, unit: str, key: str, deciding: Sequence[str] = ()) -> tuple[Quantity, ...]:
    return tuple(
        Quantity(f"{label} {name}, {unit}", (key, name), -1, deciding=name in deciding)
        for name in ("mean", "p50", "p95", "p99")
    )


ROUTING = "Routing"
"""Name of the group that is shown only with several replicas."""

QUANTITIES: Mapping[str, tuple[Quantity, ...]] = {
    "Goodput": (
        Quantity("good programs/s", ("goodput_programs",), 1, deciding=True),
        Quantity("good by first turn/s", ("goodput_programs_first",), 1, deciding=True),
        Quantity("good requests/s", ("goodput_requests",), 1, deciding=True),
        Quantity("programs in SLO, %", ("attainment",), 1, PERCENT, deciding=True),
        Quantity("by first turn, %", ("attainment_first",), 1, PERCENT),
        Quantity("turns in SLO, %", ("attainment_requests",), 1, PERCENT),
        Quantity("turns with TTFT in SLO, %", ("attainment_ttft",), 1, PERCENT),
        Quantity("programs offered", ("offered",)),
        Quantity("programs completed", ("completed",), 1, deciding=True),
        Quantity("programs failed", ("outcomes", "failed"), -1),
        Quantity("programs rejected", ("outcomes", "rejected"), -1, deciding=True),
        Quantity("programs timed out", ("outcomes", "timed_out"), -1),
        Quantity("programs unfinished", ("outcomes", "unfinished"), -1),
        Quantity("output tokens/s", ("tokens_per_s",), 1, deciding=True),
    ),
    "Completion of programs": (
        *_distribution("completion", "s", "completion_all_s", ("mean", "p99")),
        *_distribution("of all offered", "s", "completion_offered_s"),
        *_distribution("with tools", "s", "completion_wall_all_s"),
        *_distribution("of completed programs", "s", "jct_s"),
        *_distribution("of completed, with tools", "s", "jct_wall_s"),
        *_distribution("per token", "s", "norm_latency_s"),
        Quantity("Jain's index of slowdown", ("jain",), 1),
    ),
    "Latency of turns": (
        *_distribution("TTFT", "s", "ttft_all_s", ("p50", "p99")),
        *_distribution("TTFT of turns that are ok", "s", "ttft_s"),
        Quantity("longest wait for a first token, s", ("longest_wait_s",), -1),
        *_distribution("TPOT", "s", "tpot_s"),
        *_distribution("client lag", "s", "client_lag_s"),
        Quantity("scheduling bubble, s/program", ("bubble_s",), -1),
    ),
    "KV memory": (
        Quantity("prompt tokens cached, %", ("cached_share",), 1, PERCENT, deciding=True),
        Quantity("of an infinite cache's, %", ("simulation", "routing", "hit_of_infinite"), 1, PERCENT),
        Quantity("reused tokens/program", ("reused_tokens",), 1),
        Quantity("of them from the host", ("fetched_tokens",)),
        Quantity("recomputed tokens/program", ("recomputed_tokens",), -1, deciding=True),
        Quantity("KV wasted, GiB s", ("wasted_gib_s",), -1, deciding=True),
        Quantity("of it held", ("wasted_by_cause_gib_s", "held"), -1),
        Quantity("of it recomputed", ("wasted_by_cause_gib_s", "recomputed"), -1),
        Quantity("preemptions", ("simulation", "preemptions"), -1),
    ),
    "Scheduler": (
        Quantity("schedule() mean, ms", ("schedule_ms", "mean"), -1),
        Quantity("schedule() p99, ms", ("schedule_ms", "p99"), -1),
        Quantity("real s per simulated minute", ("wall_s_per_minute",)),
    ),
    ROUTING: (
        Quantity("turns per replica, max/mean", ("simulation", "routing", "load_max_over_mean"), -1),
        Quantity("computing s, max/mean", ("simulation", "routing", "busy_max_over_mean"), -1),
        Quantity("programs moved", ("simulation", "routing", "moves")),
        Quantity("programs split", ("simulation", "routing", "split"), -1),
        Quantity("turns that waited", ("simulation", "routing", "waited"), -1),
        Quantity("their wait, mean, s", ("simulation", "routing", "wait_s"), -1),
        Quantity("their wait, longest, s", ("simulation", "routing", "longest_wait_s"), -1),
    ),
}
"""Quantities by group, in the order in which they are shown."""


def of_kinds(results: Iterable[Result]) -> tuple[Quantity, ...]:
    """Return the quantities of each kind of program that some result has."""
    kinds = dict.fromkeys(kind for result in results for kind in result.get("kinds") or ())
    return tuple(
        quantity
        for kind in kinds
        for quantity in (
            Quantity(f"{kind}: programs", ("kinds", kind, "offered")),
            Quantity(f"{kind}: in SLO, %", ("kinds", kind, "attainment"), 1, PERCENT),
            Quantity(f"{kind}: completion mean, s", ("kinds", kind, "completion_all_s", "mean"), -1),
            Quantity(f"{kind}: completion with tools mean, s", ("kinds", kind, "completion_wall_all_s", "mean"), -1),
            Quantity(f"{kind}: TTFT p99, s", ("kinds", kind, "ttft_all_s", "p99"), -1),
        )
    )


def number(result: Result, *path: str) -> float | None:
    """Return the number at a path of keys; None if there is none."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def value_of(quantity: Quantity, results: Sequence[Result]) -> float | None:
    """Return the quantity's mean over seeds or blocks, in the shown unit; None if no result has it."""
    found = mean([number(result, *quantity.path) for result in results])
    return None if found is None else quantity.scale * found


def shown(value: float | None) -> str:
    """Format a number with its significant digits."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 0.001 else f"{value:.1e}"
