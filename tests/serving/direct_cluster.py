"""A cluster in the direct data plane, in a process of its own: Ray reads at its import which plane it is to be.

The process prints the cluster's URL, then calls a method of all replicas for each line of its input, ``[method,
argument...]`` as JSON, and prints a line of JSON: what every replica answered. It ends with its input.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config import CaesuraConfig
from cluster.serving import LocalCluster

STOP_WITHIN_S = 60.0

Ask = Callable[..., list[Any]]
"""Calls a method of every replica."""


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

        tell(cluster.url)
        replicas = serve.get_deployment_handle(f"ProgramServer:{cluster.config.model.id}", "caesura")
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            tell(replicas.broadcast(method, *arguments).results(timeout_s=30))


def tell(what: Any) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
