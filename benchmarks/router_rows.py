"""The rows of the routers' comparison: one a run, and their means over the seeds."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.router_subjects import Subject
from cluster.offline.simulator.run import RunResult

DRAIN_S = 1200.0
"""Seconds after the last arrival within which programs may end: as `tables.yaml` has for these sessions, whose pauses
take minutes."""


def row_of(subject: Subject, result: RunResult) -> dict[str, Any]:
    """The interface's columns, and what explains them."""
    routing = result.routing
    return {
        "router": subject.router,
        "replicas": result.replicas,
        "policy": subject.shown_policy,
        "goodput_programs": result.summary.goodput.programs_per_s,
        "jct_mean_s": result.summary.distributions["completion_all_s"].mean,
        "completion_offered_s": result.summary.distributions["completion_offered_s"].mean,
        "hit_rate": routing.hit_of_infinite,
        "load_max_over_mean": routing.load_max_over_mean,
        "jct_with_tools_s": result.summary.distributions["completion_wall_all_s"].mean,
        "offered": result.summary.goodput.offered_programs,
        "completed": result.summary.goodput.completed_programs,
        "tokens_per_s": result.summary.tokens_per_s,
        "refused": routing.refused,
        "moves": routing.moves,
        "split": routing.split,
        "waited": routing.waited,
        "wait_s": routing.wait_s,
        "decisions": dict(routing.decisions),
        "bound_programs": result.bound_per_s,
        "wall_s": round(result.wall_s, 1),
    }


def completion_s(row: dict[str, Any]) -> float:
    """Return the mean completion of all offered programs; of the admitted ones in rows that have only that."""
    found: float = row.get("completion_offered_s", row["jct_mean_s"])
    return found


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all seeds of a router at a load, in the order of the first ones. Each number is the runs' mean, and
    None where one of them has none.
    """
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row.get(name) for name in SAME), []).append(row)
    return [_mean(runs) for runs in alike.values()]


def _mean(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(runs) == 1:
        return runs[0]
    numbers = {name: [run[name] for run in runs] for name in runs[0] if name not in (*SAME, "seed", "decisions")}
    return {name: runs[0].get(name) for name in SAME} | {
        name: None if None in values else fmean(values) for name, values in numbers.items()
    }


SAME = ("rate_per_replica", "router", "replicas", "policy", "memory")
"""What rows of one mean have in common."""
SHOWN = ("router", "replicas", "policy", "ended", "goodput_programs", "jct_mean_s", "hit_rate", "load_max_over_mean")
MORE = ("completion_offered_s", "refused", "moves", "split", "waited")


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The interface's columns first. `ended` is how many of the offered programs completed before the run's end."""
    columns = (*SHOWN, *MORE)
    print("  " + "  ".join(f"{column:>{_width(column)}}" for column in columns))
    for row in rows:
        ended = {"ended": f"{row['completed']:.0f} / {row['offered']:.0f}"}
        print("  " + "  ".join(f"{cell((row | ended)[column]):>{_width(column)}}" for column in columns))


def _width(column: str) -> int:
    return max(len(column), 16 if column in ("router", "ended") else 8)


def cell(value: Any) -> str:
    """A number with three digits after its point."""
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
