"""Memory of a CPU replica, and the cold start of two.

    python -m benchmarks.replica_footprint

A replica is its actor's process and vLLM's EngineCore below it. PSS counts what processes share once, among them; RSS
counts it in each. The start is timed from nothing (no Ray, no Redis) to a model that answers at /ready.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.results import save
from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster

MEMORY_TARGET_GB = 0.7
START_TARGET_S = 60.0
CONFIG = {
    "http": {"port": 0},
    "replicas": {"count": 2, "kv_cache_bytes": 16 << 20},
    "engine": {"max_model_len": 4096, "max_num_seqs": 64},
}


def memory_of(replica: dict[str, Any]) -> dict[str, Any]:
    """RSS and PSS of a replica's processes together, in GB."""
    actor = psutil.Process(replica["pid"])
    infos = [process.memory_full_info() for process in (actor, *actor.children(recursive=True))]
    return {
        "replica": replica["replica"],
        "processes": len(infos),
        "pss_gb": sum(info.pss for info in infos) / 1e9,
        "rss_gb": sum(info.rss for info in infos) / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    begun_s = time.perf_counter()
    with LocalCluster(CaesuraConfig.model_validate(CONFIG)) as cluster:
        start_s = time.perf_counter() - begun_s
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 64, "ignore_eos": True}
        for number in range(8):
            httpx.post(f"{cluster.url}/v1/completions", json=body, headers={"x-session-id": str(number)}, timeout=60)
        replicas = httpx.get(f"{cluster.url}/admin/statistics").json()["replicas"]
        rows = [memory_of(replica) for replica in replicas]
    table = Table("replica", "processes", "PSS GB", "RSS GB")
    for row in rows:
        table.add_row(row["replica"], str(row["processes"]), f"{row['pss_gb']:.2f}", f"{row['rss_gb']:.2f}")
    Console().print(table)
    print(f"cold start of two replicas: {start_s:.1f} s")
    save("replica_footprint", [*rows, {"cold_start_s": start_s}], arguments.out)
    missed = start_s > START_TARGET_S or any(row["pss_gb"] > MEMORY_TARGET_GB for row in rows)
    if missed:
        print(f"missed: the targets are {MEMORY_TARGET_GB} GB (PSS) a replica and {START_TARGET_S:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
