"""`caesura serve`: a local cluster in the foreground."""

import json
import signal
import threading
from collections.abc import Callable
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING

import typer

from cluster.core.clock import Clock, MonotonicClock
from cluster.offline.commands._common import timed_steps
from cluster.offline.commands.config import Assignments, ConfigFile

if TYPE_CHECKING:
    from cluster.local.cluster import LocalCluster


def serve(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Serve a model on this machine, in the foreground, until Ctrl-C. Prints refused requests by route and code.

    Ctrl-C and SIGTERM let requests in flight end for `http.shutdown_s`. A second signal ends them at once.
    """
    from rich.console import Console

    from cluster.config.loader import read_config
    from cluster.local.cluster import ClusterFailed, LocalCluster, StartFailed

    console = Console(highlight=False)
    clock = MonotonicClock()

    stopped, hurried = threading.Event(), threading.Event()
    _on_signals(stopped, hurried)
    begun_s = clock.now_s()
    try:
        settings = read_config(config, assignments)
        with LocalCluster(settings, step=timed_steps(console), hurried=hurried) as cluster:
            console.print(f"\nServing after {clock.now_s() - begun_s:.1f} s at {cluster.url} (Ctrl-C stops it). Try:\n")
            console.print(_curl(cluster.url, cluster.config.model.id), soft_wrap=True)
            console.print(f"\nLogs: {cluster.logs}", markup=False, soft_wrap=True)
            console.print("It has the ingresses and replicas. The folder above has vLLM, the tools and Ray.")
            console.print("Refused requests are printed here, by route and error code.")
            report = _refusals(cluster, clock)
            while not stopped.wait(timeout=1.0):
                cluster.check()
                for line in report():
                    console.print(f"{datetime.now():%H:%M:%S}  {line}", markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        pass
    except (StartFailed, ClusterFailed) as error:
        console.print(f"caesura serve: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print("stopped")


def _refusals(cluster: "LocalCluster", clock: Clock) -> Callable[[], list[str]]:
    """Return a function that returns a line for each kind of new refusals. Without metrics, it returns none."""
    from cluster.local.refusals import RefusalReport

    if not cluster.config.metrics.enabled:
        return list
    return RefusalReport(clock, lambda: cluster.metrics_addresses).lines


def _on_signals(stopped: threading.Event, hurried: threading.Event) -> None:
    """Let the first SIGINT or SIGTERM end the start or the waiting. Later ones set ``hurried`` and do not interrupt the
    stop.
    """

    def handle(_: int, __: FrameType | None) -> None:
        if stopped.is_set():
            hurried.set()
        else:
            stopped.set()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _curl(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    headers = "-H 'content-type: application/json' -H 'x-session-id: first'"
    return f"  curl {url}/v1/chat/completions {headers} -d '{json.dumps(body)}'"
