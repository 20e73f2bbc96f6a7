"""A cluster in the direct data plane, in a process of its own: Ray reads at its import which plane it is to be.

The process prints the cluster's URL once its router knows the replicas. Then it calls a method of all replicas for each
line of its input, ``[method, argument...]`` as JSON, or asks the router for its view (``["router"]``), and prints the
answers as a line of JSON. It ends with its input.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config.schema import CaesuraConfig
from cluster.direct.note import ROUTER_DEPLOYMENT
from cluster.local.cluster import LocalCluster

STOP_WITHIN_S = 60.0
HEARD_WITHIN_S = 30.0

Ask = Callable[..., list[Any]]
"""Calls a method of every replica, or asks the router."""


@contextmanager
def direct_cluster(config: Mapping[str, Any]) -> Iterator[tuple[str, Ask]]:
    """Its URL, and what asks its replicas."""
    here = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, __file__, json.dumps(config)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here)
    to, said = process.stdin, process.stdout
    assert to is not None and said is not None

    def ask(*call: Any) -> list[Any]:
        print(json.dumps(call), file=to, flush=True)
        answers: list[Any] = json.loads(said.readline())
        return answers

    try:
        yield json.loads(said.readline()), ask
    finally:
        to.close()
        status = process.wait(STOP_WITHIN_S)
        said.close()
    assert status == 0


def main() -> None:
    """Serve what the first argument configures."""
    with LocalCluster(CaesuraConfig.model_validate_json(sys.argv[1])) as cluster:
        from ray import serve

        router = serve.get_deployment_handle(ROUTER_DEPLOYMENT, "caesura")
        await_snapshots(router)
        tell(cluster.url)
        replicas = serve.get_deployment_handle(f"ProgramServer:{cluster.config.model.id}", "caesura")
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            asked = router.broadcast("view") if method == "router" else replicas.broadcast(method, *arguments)
            tell(asked.results(timeout_s=30))


def await_snapshots(router: Any) -> None:
    """Until the router has heard of every replica: what it does not know it does not bound."""
    deadline = time.monotonic() + HEARD_WITHIN_S
    while True:
        (view,) = router.broadcast("view").results(timeout_s=30)
        ages = [replica["snapshot_age_s"] for replica in view["replicas"].values()]
        if ages and None not in ages:
            return
        assert time.monotonic() < deadline, view
        time.sleep(0.1)


def tell(what: Any) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
