"""Writes the frontier of the policies into docs/policies.md: ``python -m benchmarks.frontier``.

The runs are those of `tables.yaml`, kept in ``results/``. The part of the page after `MARK` is replaced: where ours is
behind, what rejections change, one plot for each setting of the host tier, and for each workload a table of `caesura`
against the best other policy, measure by measure.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import DIRECTORY, simulated_command

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"
IMAGES = PAGE.parent / "images"
MARK = "<!-- Written by `python -m benchmarks.frontier`. -->"
OURS = "caesura"
PATIENT = "augserve"
"""A policy that rejects nobody. The page compares it with ours at the loads at which ours rejects programs."""
TARGET = 1.05
"""A measure within this factor of the best other policy's counts as near the best."""
LEGEND_ENTRY_IN = (1.5, 0.22)
"""Width and height of an entry of a plot's legend, in inches."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace on a device. Its results are `simulate_NAME.jsonl`, with a host tier `simulate_NAME_host200.jsonl`."""

    name: str
    title: str


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a run, by its dotted field in the results. ``A/B`` is the field A divided by the field B."""

    field: str
    title: str
    unit: str = "s"
    most: bool = False
    """Whether the largest value is the best."""
    admitted: bool = False
    """Whether programs that were rejected at once are left out."""
    plotted: bool = False

    def of(self, row: Row) -> float | None:
        """Return a run's value; None: it has none."""
        values = [_field(row, field) for field in self.field.split("/")]
        if None in values:
            return None
        value, *over = [one for one in values if one is not None]
        return value if not over else value / over[0] if over[0] else None


def _field(row: Row, field: str) -> float | None:
    value: Any = row
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


WORKLOADS = (
    Workload("merge", "Merge, OPT-13B on one H800"),
    Workload("merge_a100", "Merge, Llama-3.1-8B on one A100 40 GB"),
    Workload("iso_bench", "coding agents (iso_bench_trae), Llama-3.1-8B on one H100"),
    Workload("kvtester", "coding sessions (kvtester_cc), pauses at a twentieth, Llama-3.1-8B on one H100"),
    Workload("agentcgroup", "coding agents in containers (agentcgroup_cc), Llama-3.1-8B on one H100"),
)
TIERS = {"": "without a host tier", "_host200": "with 200 GiB of host memory"}
GOOD = Measure("goodput_programs", "good programs", "1/s", most=True, plotted=True)
GOOD_REQUESTS = Measure("goodput_requests", "good requests", "1/s", most=True)
REJECTED = Measure("refused/offered", "rejected", "share of offered", plotted=True)
OFFERED = Measure("completion_offered_s.mean", "completion mean of all offered", plotted=True)
ADMITTED = Measure("completion_all_s.mean", "completion mean of the admitted", admitted=True, plotted=True)
MEASURES = (
    GOOD,
    Measure("goodput_programs_first", "good by AugServe's bounds", "1/s", most=True),
    GOOD_REQUESTS,
    REJECTED,
    OFFERED,
    ADMITTED,
    Measure("completion_all_s.p95", "completion p95 of the admitted", admitted=True),
    Measure("completion_all_s.p99", "completion p99 of the admitted", admitted=True),
    Measure("ttft_all_s.p50", "TTFT p50 of the admitted", admitted=True),
    Measure("ttft_all_s.p99", "TTFT p99 of the admitted", admitted=True, plotted=True),
)

Means = Mapping[tuple[str, float], Mapping[str, float]]
"""By policy and share of the capacity: the mean over the seeds of each measure, by its field; NaN if there is none."""


def main() -> int:
    """Write the page and its plots. Exit status 1: no result is kept."""
    kept = {tier: {load: rows for load in WORKLOADS if (rows := rows_of(load, tier))} for tier in TIERS}
    if not any(kept.values()):
        print(f"{DIRECTORY} has none of the results: run benchmarks.tables", file=sys.stderr)
        return 1
    means = {
        f"{workload.title}, {TIERS[tier]}": means_of(rows)
        for tier, workloads in kept.items()
        for workload, rows in workloads.items()
    }
    lines = [MARK, "", *where_behind(means), *rejections(means)]
    for tier, workloads in kept.items():
        if workloads:
            lines += section(tier, workloads)
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(MARK)[0] + "\n".join(lines), encoding="utf-8")
    return 0


def rows_of(workload: Workload, tier: str) -> list[Row]:
    """Return the kept runs of a workload that name their share of the capacity."""
    path = DIRECTORY / f"simulate_{workload.name}{tier}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["simulation"].get("share_of_capacity") is not None]


def means_of(rows: Sequence[Row]) -> Means:
    """Return the means over the seeds."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["policy"], row["simulation"]["share_of_capacity"]), []).append(row)
    return {key: {one.field: _mean(one.of, of) for one in MEASURES} for key, of in groups.items()}


def _mean(value: Callable[[Row], float | None], rows: Sequence[Row]) -> float:
    found = [one for row in rows if (one := value(row)) is not None]
    return statistics.fmean(found) if found else math.nan


def loads_of(means: Means) -> list[float]:
    """Return the loads, in ascending order."""
    return sorted({load for _, load in means})


def where_behind(means: Mapping[str, Means]) -> Iterator[str]:
    """Yield, for each setting, the measures by which ours is behind the best other policy, and the loads."""
    yield from (
        f"`{OURS}` is more than {TARGET - 1:.0%} worse than the best other policy, or rejects more (the stars below):",
        "",
    )
    for title, of in means.items():
        starred = {
            measure.title: [f"{load:g}" for load in loads_of(of) if cell(of, measure, load).endswith("*")]
            for measure in MEASURES
        }
        found = [f"{measure} at {', '.join(loads)}" for measure, loads in starred.items() if loads]
        yield f"- {title}: {'; '.join(found) or 'by no measure'}."
    yield ""


def rejections(means: Mapping[str, Means]) -> Iterator[str]:
    """Yield a table of ours against `PATIENT` at the loads at which ours rejects programs."""
    measures = (OFFERED, ADMITTED, GOOD_REQUESTS, GOOD)
    rows = [
        f"| {title} | {load:g} | {of[OURS, load][REJECTED.field]:.1%} | "
        + f"{' | '.join(_over(of, measure, load) for measure in measures)} |"
        for title, of in means.items()
        for load in loads_of(of)
        if (PATIENT, load) in of and of[OURS, load][REJECTED.field] > 0 == of[PATIENT, load][REJECTED.field]
    ]
    if rows:
        yield f"`{OURS}` beside `{PATIENT}`, which rejects nobody, at the loads at which `{OURS}` rejects programs:"
        yield ""
        yield f"| setting | load | rejected | {' | '.join(f'{one.title}, {one.unit}' for one in measures)} |"
        yield "| --- " * (3 + len(measures)) + "|"
        yield from (*rows, "")


def _over(means: Means, measure: Measure, load: float) -> str:
    ours, other = (means[policy, load][measure.field] for policy in (OURS, PATIENT))
    return f"{ours:.3g} / {other:.3g} = {ours / other:.2f}" if other else f"{ours:.3g} / {other:.3g}"


def section(tier: str, workloads: Mapping[Workload, Sequence[Row]]) -> Iterator[str]:
    """Yield the lines of one setting of the host tier. Its plot is written."""
    means = {workload: means_of(rows) for workload, rows in workloads.items()}
    image = plot(means, IMAGES / f"frontier{tier}.svg")
    yield from (
        f"### Frontier {TIERS[tier]}",
        "",
        f"![The measures of each policy over the load](images/{image.name})",
        "",
    )
    for workload, rows in workloads.items():
        yield from (f"**{workload.title}**", "", *table(means[workload]), "", made(rows), "")


def table(means: Means) -> Iterator[str]:
    """Yield a table of `OURS` against the best of the others: a row for each measure, a column for each load."""
    loads = loads_of(means)
    yield f"| measure | {' | '.join(f'at {load:g}' for load in loads)} |"
    yield "| --- |" + " --- |" * len(loads)
    for measure in MEASURES:
        yield f"| {measure.title}, {measure.unit} | {' | '.join(cell(means, measure, load) for load in loads)} |"


def cell(means: Means, measure: Measure, load: float) -> str:
    """Return ours and the best other policy's.

    A star follows if ours is more than `TARGET` times worse, or rejects more. Else a dagger follows if the measure is
    of the admitted programs, and ours rejects more programs than that policy: the programs are not the same.
    """
    others = {policy: values[measure.field] for (policy, at), values in means.items() if at == load and policy != OURS}
    others = {policy: value for policy, value in others.items() if not math.isnan(value)}
    ours = means[OURS, load][measure.field]
    if not others or math.isnan(ours):
        return "-"
    best = (max if measure.most else min)(others, key=others.__getitem__)
    ratio = behind(ours, others[best], most=measure.most)
    far = ours > others[best] if measure is REJECTED else ratio is not None and ratio > TARGET
    mark = " *" if far else " †" if measure.admitted and not rejects_no_more(means, best, load) else ""
    return f"{ours:.3g} (`{best}` {others[best]:.3g}){mark}"


def rejects_no_more(means: Means, policy: str, load: float) -> bool:
    """Return whether ours is known to reject no larger share of the offered programs than ``policy``."""
    return means[OURS, load][REJECTED.field] <= means[policy, load][REJECTED.field]


def behind(ours: float, best: float, *, most: bool) -> float | None:
    """Return how many times worse ours is than the best other: below 1 if it is better. None: the best is 0."""
    if best <= 0:
        return None
    if ours <= 0:
        return math.inf if most else 0.0
    return best / ours if most else ours / best


def made(rows: Sequence[Row]) -> str:
    """Return where the rows come from."""
    seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    return f"Seeds {seeds}; {rows[0]['date']}, commit {commits}; `{simulated_command(rows)}`."


def plot(means: Mapping[Workload, Means], path: Path) -> Path:
    """Draw the plotted measures over the load: a row for each measure, a column for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    from matplotlib import pyplot

    shown = [measure for measure in MEASURES if measure.plotted]
    size = (3.2 * len(means) + 0.6, 2.4 * len(shown))
    figure, axes = pyplot.subplots(len(shown), len(means), figsize=size, sharex="col", squeeze=False)
    for column, (workload, of) in enumerate(means.items()):
        policies = dict.fromkeys(policy for policy, _ in of)
        loads = loads_of(of)
        for row, measure in enumerate(shown):
            one = axes[row][column]
            for policy in policies:
                values = [of[policy, load][measure.field] for load in loads]
                one.plot(loads, values, marker=".", label=policy, linewidth=2.4 if policy == OURS else 1.1)
            one.set_yscale("log" if measure.unit == "s" else "linear")
            one.grid(visible=True, alpha=0.3)
            one.set_ylabel(f"{measure.title}, {measure.unit}" if column == 0 else "", fontsize=8)
        axes[0][column].set_title(workload.title.replace(", ", ",\n"), fontsize=8)
        axes[-1][column].set_xlabel("share of the capacity")
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = int(size[0] // LEGEND_ENTRY_IN[0])
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    lines = math.ceil(len(labels) / columns)
    figure.tight_layout(rect=(0, (lines + 1) * LEGEND_ENTRY_IN[1] / size[1], 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
