"""Chooses AugServe's parameters that its paper does not print: ``python -m benchmarks.augserve_profile --trace FILE``.

AugServe section 4.4 gets the target of a step's tokens by "offline profiling", and prints neither the bounds around it
nor alpha. Each parameter in turn takes the value with which most requests are good by the paper's bounds: the first
token of the request within 1 s, and ten iterations a token. The time of tools does not count, since no parameter can
change it; in the paper it does. The seeds are not those of any reported table.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import kept_rows, save
from cluster.offline.simulator.run import bound_of, simulate_all
from cluster.offline.simulator.settings import SimulationSettings

POLICY = "augserve"
VALUES: Mapping[str, tuple[float | None, ...]] = {
    "target_tokens": (512, 1024, 2048, 4096, None),
    "beta_low": (0.1, 0.25, 0.5, 1.0),
    "beta_high": (1.0, 1.5),
    "alpha_tokens": (0.0, 1.0, 10.0, 100.0, 1000.0),
}
"""Values that are tried, by parameter, in the order in which the parameters are chosen."""
START: Mapping[str, float | None] = {
    "target_tokens": None,
    "beta_low": 0.25,
    "beta_high": 1.0,
    "alpha_tokens": 10.0,
}
SEEDS = (100, 101)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--preset", default="opt-13b/h800")
    parser.add_argument("--shares", default="0.9,1.1", help="rates, as shares of the capacity")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    settings = SimulationSettings(
        policies=(POLICY,),
        rates_per_s=(1.0,),
        preset=arguments.preset,
        trace=arguments.trace,
        minutes=arguments.minutes,
        seeds=SEEDS,
    )
    capacity = bound_of(settings, SEEDS[0]).capacity_per_s
    rates = tuple(round(float(share) * capacity, 3) for share in arguments.shares.split(","))
    settings = replace(settings, rates_per_s=rates)
    chosen, rows, tried = dict(START), [], {}
    for name, values in VALUES.items():
        for value in values:
            parameters = {**chosen, name: value}
            key = tuple(parameters.values())
            if key not in tried:
                tried[key] = measured(settings, parameters, arguments.jobs)
                rows.append({"preset": arguments.preset, **parameters, **tried[key], "chosen": False})
                print(rows[-1], flush=True)
        chosen[name] = max(values, key=lambda value: score(tried[tuple({**chosen, name: value}.values())]))
    for row in rows:
        row["chosen"] = all(row[name] == value for name, value in chosen.items())
    others = [row for row in kept_rows("augserve_profile") if row["preset"] != arguments.preset]
    print(f"wrote {save('augserve_profile', [*others, *rows])}")
    return 0


def measured(settings: SimulationSettings, parameters: Mapping[str, Any], jobs: int) -> dict[str, float]:
    """Simulate all rates and seeds. Return the mean share of good requests and the mean seconds of completion."""
    results = list(simulate_all(replace(settings, parameters={POLICY: parameters}), jobs))
    goods = [result.summary.goodput.attainment_first or 0.0 for result in results]
    completions = [result.summary.distributions["completion_all_s"].mean or 0.0 for result in results]
    return {"good": round(sum(goods) / len(goods), 4), "completion_s": round(sum(completions) / len(completions), 2)}


def score(measures: Mapping[str, float]) -> tuple[float, float]:
    """Return what is maximised: the share of good requests, then the speed of completion."""
    return measures["good"], -measures["completion_s"]


if __name__ == "__main__":
    sys.exit(main())
