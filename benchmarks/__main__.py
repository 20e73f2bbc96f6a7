"""All micro-benchmarks, one after the other, each in a process of its own; exit status 1 if one misses its target."""

import subprocess
import sys

BENCHMARKS = (
    "silicon",
    "schedule_overhead",
    "schedule_overhead --evictions",
    "resume_latency",
    "pause_work",
    "front_end",
    "aiperf",
    "ingresses",
    "flood",
    "stream_failover",
    "replica_footprint",
    "tool_executor",
    "turn_gap",
    "router_decisions",
    "lineage",
    "scale",
    "predictor",
    "metrics_cost",
)


def main() -> int:
    """Run them."""
    missed = []
    for name in BENCHMARKS:
        print(f"\n== python -m benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", *f"benchmarks.{name}".split()], check=False).returncode:
            missed.append(name)
    if missed:
        print(f"\nTargets missed or not run: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
