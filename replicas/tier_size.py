"""The size of a replica's host tier, where the configuration has none."""

import shutil
from pathlib import Path

import psutil

MEMORY_SHARE = 0.5
"""Share of the machine's available memory that the tiers of all its replicas take together."""

CPU_CACHES = 2
"""Largest size of a tier on a CPU machine, as a multiple of the KV cache. Host and device memory are the same there,
and the tier only serves to try it out."""

SHARED_MEMORY = Path("/dev/shm")
"""Directory in which vLLM's CUDA worker keeps the tier."""


def fitting_bytes(replicas: int, kv_cache_bytes: int | None) -> int:
    """Return the size in bytes of a replica's tier, where the configuration has none.

    Args:
        replicas: number of replicas that share this machine.
        kv_cache_bytes: KV cache size of a CPU replica. None on CUDA, where the tier is in shared memory.
    """
    share = int(psutil.virtual_memory().available * MEMORY_SHARE) // max(1, replicas)
    if kv_cache_bytes is not None:
        return min(share, CPU_CACHES * kv_cache_bytes)
    if SHARED_MEMORY.is_dir():
        share = min(share, int(shutil.disk_usage(SHARED_MEMORY).free * MEMORY_SHARE) // max(1, replicas))
    return share
