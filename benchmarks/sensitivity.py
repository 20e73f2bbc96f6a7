"""How the comparison of policies moves with the cost model: each step 20% faster or slower, and prompts 1.5 times.

``python -m benchmarks.sensitivity --trace infercept_merge.jsonl.gz``. The rate is the same share of each cost model's
own capacity, because a policy is compared at a load and not at a number of programs.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.augserve_profile import POLICY as AUGSERVE
from benchmarks.augserve_profile import chosen
from benchmarks.results import save
from cluster.offline.simulator.run import RunResult, bound_of, simulate_all
from cluster.offline.simulator.settings import SimulationSettings
from replicas.cost_model import CostModel
from replicas.presets import preset

STEP_FIELDS = ("overhead_s", "sequence_s", "weights_s", "token_s", "context_s", "pair_s")
PROMPT_FIELDS = ("token_s", "pair_s")
CHANGES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "as fitted": (1.0, ()),
    "steps x 0.8": (0.8, STEP_FIELDS),
    "steps x 1.2": (1.2, STEP_FIELDS),
    "prompts x 1.5": (1.5, PROMPT_FIELDS),
}
"""Factor, and the fields of the cost model that it multiplies."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--preset", default="opt-13b/h800")
    parser.add_argument("--policies", default="vllm,augserve,caesura")
    parser.add_argument("--shares", default="0.85,1", help="rates, as shares of the capacity of each cost model")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    shares = [float(share) for share in arguments.shares.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (factor, fields) in CHANGES.items():
            file = Path(folder) / "model.json"
            changed(preset(arguments.preset), factor, fields).save(file)
            policies = tuple(arguments.policies.split(","))
            settings = SimulationSettings(
                policies=policies,
                rates_per_s=(1.0,),
                preset=str(file),
                trace=arguments.trace,
                minutes=arguments.minutes,
                seeds=tuple(int(seed) for seed in arguments.seed.split(",")),
                parameters={AUGSERVE: chosen(arguments.preset)} if AUGSERVE in policies else {},
            )
            capacity = bound_of(settings, settings.seeds[0]).capacity_per_s
            loaded = replace(settings, rates_per_s=tuple(round(share * capacity, 3) for share in shares))
            named = dict(zip(loaded.rates_per_s, shares, strict=True))
            for result in simulate_all(loaded, arguments.jobs):
                rows.append(row(name, capacity, named[result.run.rate_per_s], result))
                print(
                    " ".join(f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in rows[-1].values())
                )
                sys.stdout.flush()
    print(f"wrote {save('sensitivity', rows)}")
    return 0


def changed(model: CostModel, factor: float, fields: tuple[str, ...]) -> CostModel:
    return replace(model, **{field: factor * getattr(model, field) for field in fields})


def row(change: str, capacity: float, share: float, result: RunResult) -> dict[str, Any]:
    rate, summary = result.run.rate_per_s, result.summary
    return {
        "change": change,
        "policy": result.run.policy,
        "share": share,
        "seed": result.run.seed,
        "rate_per_s": rate,
        "capacity_per_s": round(capacity, 3),
        "share_good": round(summary.goodput.good_programs / summary.goodput.offered_programs, 4),
        "completion_all_s": round(summary.distributions["completion_all_s"].mean or 0.0, 3),
        "wall_s": round(result.wall_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
