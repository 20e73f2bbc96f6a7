"""Chooses AugServe's parameters that its paper does not print: `python -m benchmarks.augserve_profile --traces DIR`.

AugServe section 4.4 gets the target of a step's tokens by "offline profiling", and prints neither the bounds around it
nor alpha. Each parameter in turn takes the value with which most requests are good by the paper's bounds: the first
token of the request within 1 s, and ten iterations a token. The time of tools does not count, since no parameter can
change it. The seeds are not those of any reported table.

With ``--figure ID`` the engine and the measure are those of a figure of `caesura reproduce augserve`: no prefix cache,
and the time of tools counts, as in the paper.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results import kept_rows, save
from cluster.offline.reproduce.plan import Load, System, jobs_of, paper_of
from cluster.offline.reproduce.running import run_all
from cluster.offline.simulator.run import bound_of, simulate_all
from cluster.offline.simulator.settings import SimulationSettings

POLICY = "augserve"
VALUES: Mapping[str, tuple[float | None, ...]] = {
    "target_tokens": (256, 384, 512, 1024),
    "beta_low": (0.1, 0.25),
    "beta_high": (1.0,),
    "alpha_tokens": (1.0, 10.0, 100.0),
}
"""Values that are tried, by parameter, in the order in which the parameters are chosen. Alpha is above 0, since the
paper's policy prevents starvation."""
START: Mapping[str, float | None] = {
    "target_tokens": None,
    "beta_low": 0.1,
    "beta_high": 1.0,
    "alpha_tokens": 1.0,
}
SEEDS = (100, 101)


Measure = Callable[[Mapping[str, Any]], dict[str, float]]
"""Simulates AugServe with some parameters. Returns the share of good requests, and the mean seconds of completion."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--trace", default="infercept_merge")
    parser.add_argument("--preset", default="opt-13b/h800")
    parser.add_argument("--shares", default="0.9,1.1", help="rates, as shares of the capacity")
    parser.add_argument("--figure", help="of `caesura reproduce augserve`, in place of --trace, --preset and --shares")
    parser.add_argument("--loads", default="2,3", help="names of the figure's loads")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    measure = _today(arguments) if arguments.figure is None else _reproduced(arguments)
    name = arguments.preset if arguments.figure is None else f"reproduce {arguments.figure}"
    rows = profile(measure, name)
    others = [row for row in kept_rows("augserve_profile") if row["preset"] != name]
    print(f"wrote {save('augserve_profile', [*others, *rows])}")
    return 0


def profile(measure: Measure, name: str) -> list[dict[str, Any]]:
    """Choose the parameters one after another. Return all that was tried, and what was chosen."""
    best, rows, tried = dict(START), [], {}
    for parameter, values in VALUES.items():
        for value in values:
            parameters = {**best, parameter: value}
            key = tuple(parameters.values())
            if key not in tried:
                tried[key] = measure(parameters)
                rows.append({"preset": name, **parameters, **tried[key], "chosen": False})
                print(rows[-1], flush=True)
        best[parameter] = max(values, key=lambda value: score(tried[tuple({**best, parameter: value}.values())]))
    for row in rows:
        row["chosen"] = all(row[parameter] == value for parameter, value in best.items())
    return rows


def chosen(name: str) -> dict[str, Any]:
    """Return the parameters that are kept as chosen for a preset, or for ``reproduce FIGURE``; or none."""
    found = [row for row in kept_rows("augserve_profile") if row["preset"] == name and row["chosen"]]
    return {parameter: found[0][parameter] for parameter in VALUES} if found else {}


def _today(arguments: argparse.Namespace) -> Measure:
    """Return the measure on an engine of today, at shares of its capacity."""
    settings = SimulationSettings(
        policies=(POLICY,),
        rates_per_s=(1.0,),
        preset=arguments.preset,
        trace=arguments.traces / f"{arguments.trace}.jsonl.gz",
        minutes=arguments.minutes,
        seeds=SEEDS,
    )
    capacity = bound_of(settings, SEEDS[0]).capacity_per_s
    rates = tuple(round(float(share) * capacity, 3) for share in arguments.shares.split(","))
    loaded = replace(settings, rates_per_s=rates)

    def measure(parameters: Mapping[str, Any]) -> dict[str, float]:
        results = list(simulate_all(replace(loaded, parameters={POLICY: parameters}), arguments.jobs))
        goods = [result.summary.goodput.attainment_first or 0.0 for result in results]
        completions = [result.summary.distributions["completion_all_s"].mean or 0.0 for result in results]
        return _means(goods, completions)

    return measure


def _reproduced(arguments: argparse.Namespace) -> Measure:
    """Return the measure in the setting of a figure of the paper."""
    figure = paper_of(POLICY).figures[arguments.figure]
    loads = {load: Load(rate=figure.loads[load].rate) for load in arguments.loads.split(",")}
    measures: dict[str, Any] = {
        "good": {"name": "attainment", "ttft_s": 1, "iterations": 10, "tools": True},
        "completion_s": "latency_s.mean",
    }

    def measure(parameters: Mapping[str, Any]) -> dict[str, float]:
        changed = {
            "settings": figure.settings | {"minutes": arguments.minutes, "drain_s": 600},
            "systems": {POLICY: System(policy=POLICY, parameters=dict(parameters))},
            "loads": loads,
            "measures": measures,
        }
        figures = {arguments.figure: figure.model_copy(update=changed)}
        runs = jobs_of(figures, SEEDS, quick=False, factors=())
        results = [run.values for run in run_all(runs, figures, arguments.traces, arguments.jobs)]
        return _means(
            [(values["good"] or 0.0) / 100 for values in results], [values["completion_s"] or 0.0 for values in results]
        )

    return measure


def _means(goods: Sequence[float], completions: Sequence[float]) -> dict[str, float]:
    """Return the means over rates and seeds."""
    return {"good": round(fmean(goods), 4), "completion_s": round(fmean(completions), 2)}


def score(measures: Mapping[str, float]) -> tuple[float, float]:
    """Return what is maximised: the share of good requests, then the speed of completion."""
    return measures["good"], -measures["completion_s"]


if __name__ == "__main__":
    sys.exit(main())
