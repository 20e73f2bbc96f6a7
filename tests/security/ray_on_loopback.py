"""Starts Ray as a local cluster does, prints its listeners and its address as JSON, and waits for its input to end."""

import json
import sys

import psutil

from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster


def main() -> None:
    """Start, print, wait."""
    config = CaesuraConfig.model_validate({"http": {"port": 0}, "redis": {"url": "redis://127.0.0.1:1"}})
    cluster = LocalCluster(config)
    try:
        cluster._enter_environment()
        cluster._start_ray()
        import ray

        @ray.remote(num_cpus=0)
        def nothing() -> None:
            """Run, so that there is a worker."""

        ray.get(nothing.remote())
        listening = [
            (process.name(), connection.laddr.ip)
            for process in (psutil.Process(), *cluster.processes)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        address = ray.get_runtime_context().gcs_address
        print(json.dumps({"listening": listening, "address": address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.stop()


main()
