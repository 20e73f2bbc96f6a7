"""What the deviations of the policies from their papers change: ``python -m benchmarks.deviations --traces FOLDER``.

`deviations.yaml` has those that a parameter or a setting can undo. A policy runs as it is here, and with each of them,
at the same shares of the engine's capacity and with the same seeds. ``python -m benchmarks.papers`` writes the table of
each paper's page from the results.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.results import kept_rows, save
from cluster.offline.simulator.run import bound_of, simulate_all
from cluster.offline.simulator.settings import SimulationSettings

PLAN = Path(__file__).with_suffix(".yaml")
HERE = "as here"
"""What the first row of a table is called."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy in a setting: as it is here, or with one deviation undone."""

    what: str
    policy: str
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces, NAME.jsonl.gz")
    parser.add_argument("--papers", default="", help="names with commas; the rows of the others stay as they are")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time")
    arguments = parser.parse_args()
    plan = yaml.safe_load(PLAN.read_text())
    papers = [name for name in arguments.papers.split(",") if name] or list(plan["papers"])
    if unknown := {*papers} - plan["papers"].keys():
        parser.error(f"--papers {', '.join(sorted(unknown))}: there are {', '.join(plan['papers'])}")
    rows = [row for row in kept_rows("deviations") if row["paper"] not in papers]
    for paper in papers:
        for variant in variants_of(paper, plan["papers"][paper]):
            rows += measured(paper, variant, plan, arguments.traces, arguments.jobs)
            save("deviations", rows)
    return 0


def variants_of(paper: str, plan: Mapping[str, Any]) -> Iterator[Variant]:
    """Yield the policy as it is here, in each setting that a row needs, each before its first row."""
    settings = plan["settings"]
    yield Variant(HERE, paper, {}, settings)
    seen: list[Mapping[str, Any]] = [{}]
    for row in plan["rows"]:
        engine = row.get("on", {})
        if engine not in seen:
            seen.append(engine)
            yield Variant(f"{HERE}, {_described(engine)}", paper, {}, settings | engine)
        changed = settings | engine | row.get("settings", {})
        yield Variant(row["what"], row.get("policy", paper), row.get("parameters", {}), changed)


def _described(engine: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in engine.items())


def measured(paper: str, variant: Variant, plan: Mapping[str, Any], traces: Path, jobs: int) -> list[dict[str, Any]]:
    """Simulate a variant with all shares and seeds. Return a row for each share, with means over the seeds."""
    chosen = {key: value for key, value in variant.settings.items() if key not in ("trace", "preset")}
    settings = SimulationSettings(
        policies=(variant.policy,),
        rates_per_s=rates_of(traces, variant.settings["trace"], variant.settings["preset"], tuple(plan["shares"])),
        preset=variant.settings["preset"],
        trace=traces / f"{variant.settings['trace']}.jsonl.gz",
        seeds=tuple(plan["seeds"]),
        parameters={variant.policy: dict(variant.parameters)} if variant.parameters else {},
        **chosen,
    )
    results = list(simulate_all(settings, jobs))
    rows = []
    for share, rate in zip(plan["shares"], settings.rates_per_s, strict=True):
        summaries = [result.summary for result in results if result.run.rate_per_s == rate]
        completions = [summary.distributions["completion_all_s"].mean or 0.0 for summary in summaries]
        row = {
            "paper": paper,
            "what": variant.what,
            "share": share,
            "rate_per_s": rate,
            "good_per_s": round(fmean(summary.goodput.programs_per_s for summary in summaries), 3),
            "completion_s": round(fmean(completions), 2),
        }
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


@cache
def rates_of(traces: Path, trace: str, preset: str, shares: tuple[float, ...]) -> tuple[float, ...]:
    """Return the rates at shares of the capacity of a preset, in programs per second."""
    settings = SimulationSettings(
        policies=("vllm",), rates_per_s=(1.0,), preset=preset, trace=traces / f"{trace}.jsonl.gz"
    )
    capacity = bound_of(settings, 0).capacity_per_s
    return tuple(round(share * capacity, 3) for share in shares)


def table_of(paper: str) -> list[str]:
    """Return the lines of a paper's table; none if nothing is kept of it."""
    rows = [row for row in kept_rows("deviations") if row["paper"] == paper]
    if not rows:
        return []
    plan = yaml.safe_load(PLAN.read_text())
    shares = list(dict.fromkeys(row["share"] for row in rows))
    columns = [f"{name} at {share:g}" for share in shares for name in ("good/s", "completion, s")]
    settings = plan["papers"][paper]["settings"]
    lines = [
        "## What the deviations change",
        "",
        f"Trace `{settings['trace']}` on `{settings['preset']}`, {settings['minutes']} minutes after "
        f"{settings['warmup_minutes']}, seeds {', '.join(map(str, plan['seeds']))}, with a prefix cache. good/s: good "
        "programs a second. completion: the mean, with unfinished programs in it. Both are at shares of the capacity.",
        "`python -m benchmarks.deviations` makes the numbers.",
        "",
        f"| | {' | '.join(columns)} |",
        f"| --- {'| --- ' * len(columns)}|",
    ]
    for what in dict.fromkeys(row["what"] for row in rows):
        lines.append(f"| {what} | {' | '.join(_cells([row for row in rows if row['what'] == what]))} |")
    return lines


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [text for row in rows for text in (f"{row['good_per_s']:.2f}", f"{row['completion_s']:.1f}")]


if __name__ == "__main__":
    sys.exit(main())
