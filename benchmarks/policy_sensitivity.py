"""How the results of `caesura` move if one of its constants is halved or doubled.

``python -m benchmarks.policy_sensitivity --trace infercept_merge.jsonl.gz``. Each constant is changed alone, and each
run has the same programs. The exit status is 1 if a half or a double changes a headline by more than 5%.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.results import save
from cluster.offline.bench.results import measures
from cluster.offline.simulator.run import rates_of, runs_of, simulate
from cluster.offline.simulator.settings import SimulationSettings
from replicas import load_shedding
from replicas.policies import caesura
from replicas.policies.caesura import CaesuraParameters
from replicas.policy import Policy

Change = Callable[[float], None]
"""Multiplies a constant by a factor, in this process and for good."""
FACTORS = (0.5, 2.0)
HEADLINES = (("goodput_programs",), ("completion_all_s", "mean"))
SHOWN = (
    *HEADLINES,
    ("goodput_programs_first",),
    ("goodput_requests",),
    ("completion_all_s", "p95"),
    ("completion_all_s", "p99"),
    ("ttft_all_s", "p50"),
    ("ttft_all_s", "p99"),
    ("longest_wait_s",),
    ("refused",),
)
MOST = 0.05
"""Largest change of a headline, as a share of its value with the default."""


def of_parameter(name: str) -> Change:
    """Return the change of a parameter of the policy."""

    def change(factor: float) -> None:
        build = CaesuraParameters.build

        def built(self: CaesuraParameters) -> Policy:
            return build(self.model_copy(update={name: factor * getattr(self, name)}))

        CaesuraParameters.build = built  # type: ignore[method-assign]

    return change


def of_axis(axis: str, name: str) -> Change:
    """Return the change of a constant of the policy's axis (order, pause or budget)."""

    def change(factor: float) -> None:
        build = CaesuraParameters.build

        def built(self: CaesuraParameters) -> Policy:
            policy = build(self)
            part: Any = getattr(policy, axis)
            return replace(policy, **{axis: replace(part, **{name: factor * getattr(part, name)})})

        CaesuraParameters.build = built  # type: ignore[method-assign]

    return change


def of_module(module: Any, name: str) -> Change:
    """Return the change of a module's constant that is read where it is used."""
    return lambda factor: setattr(module, name, factor * getattr(module, name))


CONSTANTS: Mapping[str, Change] = {
    "turn_value": of_parameter("turn_value"),
    "program_value": of_parameter("program_value"),
    "max_wait_s": of_parameter("max_wait_s"),
    "PROMPT_SHARE": of_axis("budget", "prompt_share"),
    "PROMPT_SLOWDOWN": of_axis("budget", "prompt_slowdown"),
    "HOLD_WORTH": of_axis("pause", "worth"),
    "HINT_SLACK": of_module(caesura, "HINT_SLACK"),
    "STARVING": of_module(load_shedding, "STARVING"),
    "MAX_BACKLOG": of_module(load_shedding, "MAX_BACKLOG"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--preset", default="opt-13b/h800")
    parser.add_argument("--shares", default="0.9,1.2", help="rates, as shares of the capacity")
    parser.add_argument("--host-gib", type=float, default=200.0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--only", default="", help="constants, with commas; all by default")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if name] or list(CONSTANTS)
    if unknown := [name for name in chosen if name not in CONSTANTS]:
        parser.error(f"--only: there is no {unknown[0]}; there are: {', '.join(CONSTANTS)}")
    settings = SimulationSettings(
        policies=("caesura",),
        rates_per_s=(1.0,),
        preset=arguments.preset,
        trace=arguments.trace,
        minutes=arguments.minutes,
        host_gib=arguments.host_gib,
        seeds=(arguments.seed,),
    )
    shares = [float(share) for share in arguments.shares.split(",")]
    rates = rates_of(settings, ",".join(f"{share}x" for share in shares))
    settings = replace(settings, rates_per_s=rates)
    jobs = [(settings, None, 1.0), *((settings, name, factor) for name in chosen for factor in FACTORS)]
    rows: list[dict[str, Any]] = []
    with get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(measured, jobs, chunksize=1):
            rows += [compared(row, rows) for row in found]
            for row in rows[-len(found) :]:
                print(" ".join(f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in row.values()))
                sys.stdout.flush()
    print(f"wrote {save('policy_sensitivity', rows)}")
    return int(any(abs(row["x " + ".".join(path)] - 1) > MOST for row in rows for path in HEADLINES))


def measured(job: tuple[SimulationSettings, str | None, float]) -> list[dict[str, Any]]:
    """Simulate all rates with a changed constant, in a process of its own. None: no constant is changed."""
    settings, name, factor = job
    if name is not None:
        CONSTANTS[name](factor)
    rows = []
    for run in runs_of(settings):
        values: Any = measures(simulate(settings, run).summary)
        row: dict[str, Any] = {"constant": name or "none", "factor": factor, "rate_per_s": run.rate_per_s}
        for path in SHOWN:
            value = values
            for key in path:
                value = value[key]
            row[".".join(path)] = float(value)
        rows.append(row)
    return rows


def compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with its headlines as multiples of those without a change at the same rate."""
    alike = (one for one in rows if one["constant"] == "none" and one["rate_per_s"] == row["rate_per_s"])
    plain = next(alike, row)
    return row | {"x " + ".".join(path): row[".".join(path)] / max(1e-9, plain[".".join(path)]) for path in HEADLINES}


if __name__ == "__main__":
    sys.exit(main())
