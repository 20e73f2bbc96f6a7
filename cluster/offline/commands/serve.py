"""`caesura serve`: a local cluster in the foreground."""

import json
import signal
import threading
from types import FrameType

import typer

from cluster.core.clock import MonotonicClock
from cluster.offline.commands._common import timed_steps
from cluster.offline.commands.config import Assignments, ConfigFile


def serve(config: ConfigFile = None, assignments: Assignments = None) -> None:
    """Serve a model on this machine, in the foreground, until Ctrl-C."""
    from rich.console import Console

    from cluster.config.loader import read_config
    from cluster.local.cluster import ClusterFailed, LocalCluster, StartFailed

    console = Console(highlight=False)
    clock = MonotonicClock()

    stopped = threading.Event()
    _on_signals(stopped)
    begun_s = clock.now_s()
    try:
        with LocalCluster(read_config(config, assignments), step=timed_steps(console)) as cluster:
            console.print(f"\nServing after {clock.now_s() - begun_s:.1f} s at {cluster.url} (Ctrl-C stops it). Try:\n")
            console.print(_curl(cluster.url, cluster.config.model.id), soft_wrap=True)
            console.print(f"\nLogs: {cluster.logs}", markup=False, soft_wrap=True)
            while not stopped.wait(timeout=1.0):
                cluster.check()
    except KeyboardInterrupt:
        pass
    except (StartFailed, ClusterFailed) as error:
        console.print(f"caesura serve: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print("stopped")


def _on_signals(stopped: threading.Event) -> None:
    """Let the first SIGINT or SIGTERM end the start or the waiting. Later ones do not interrupt the stop."""

    def handle(_: int, __: FrameType | None) -> None:
        if not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _curl(url: str, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    headers = "-H 'content-type: application/json' -H 'x-session-id: first'"
    return f"  curl {url}/v1/chat/completions {headers} -d '{json.dumps(body)}'"
