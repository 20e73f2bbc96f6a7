"""Several nodes of one Ray cluster on this machine, each with processes, a process namespace and an address of its own.

A node ends as a machine does, all at once, and sees no other node's processes: what a chart's hooks do in a pod can be
done here. `ray stop` would stop every Ray of the machine; nothing here calls it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from cluster.local.cluster import BYTECODE, ENVIRONMENT
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.ports import free_ports
from tests.faults.stand import MARK, marked, title_of, until

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DRAIN = ROOT / "helm" / "caesura" / "files" / "drain.py"
TOKEN = uuid.uuid4().hex
START_WITHIN_S = 900.0
STOP_WITHIN_S = 20.0
HEAD_ADDRESS = "127.0.0.10"
"""Ray takes 127.0.0.1 for the machine's own address."""
APPLICATION = "caesura"
REPLICAS = "ProgramServer:tiny"

POD = """
trap 'python "$DRAIN" "$DRAIN_S" >> "$LOG.drain" 2>&1; ENDED=1; kill -TERM $RAY' TERM
while [ -z "$ENDED" ]; do
  "$@" >> "$LOG" 2>&1 &
  RAY=$!
  while kill -0 $RAY 2> /dev/null; do wait $RAY; done
done
"""
"""A kubelet's part: what ends is started again; at SIGTERM the preStop hook, then the end of the container. (On a busy
machine Ray gives up a start, as it gives its agents fifteen seconds.)"""


@dataclass
class Node:
    """One node: a process namespace, whose first process is `process`."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def family(self) -> list[psutil.Process]:
        """Its processes."""
        return psutil.Process(self.process.pid).children(recursive=True) if self.lives else []

    def named(self, title: str) -> list[psutil.Process]:
        """Those of its processes whose title has this in it."""
        return [process for process in self.family if title in title_of(process)]

    def await_started(self) -> None:
        """Until Ray says that it has.

        Raises:
            AssertionError: not within START_WITHIN_S.
        """
        until(lambda: "Ray runtime started" in self.log.read_text(), f"not started: {self.log}", START_WITHIN_S)

    def drain(self) -> None:
        """Begin to end it as Kubernetes does, with the chart's hook first."""
        shell = next(process for process in self.family if process.name() == "sh")
        shell.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """It is lost: all its processes at once."""
        self.process.kill()
        self.process.wait(STOP_WITHIN_S)


@dataclass
class Nodes:
    """A head without replicas, and workers.

    Args:
        directory: for logs.
        environment: of all processes, over this one's.
    """

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._port, self._client = free_ports(2)
        self._desk: subprocess.Popen[str] | None = None
        self._mark = uuid.uuid4().hex
        self._count = 0
        self.workers: list[Node] = []
        self.head: Node | None = None

    def start_head(self) -> Node:
        """Start it, or start it again. As for a worker: from a thread that lives as long as it is to."""
        command = ["--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"]
        command += [f"--ray-client-server-port={self._client}"]
        if password := self.environment.get("RAY_REDIS_PASSWORD"):
            command += [f"--redis-password={password}"]
        if self._desk is not None:  # it knew the head before
            self._desk.kill()
            self._desk = None
        self.head = self._start(HEAD_ADDRESS, "head", command)
        return self.head

    def start_worker(self, cpus: float) -> Node:
        """Start one more: Linux ends it with the thread that made it."""
        self._count += 1
        address = f"127.0.0.{10 + self._count}"
        command = [f"--address={HEAD_ADDRESS}:{self._port}", f"--num-cpus={cpus:g}"]
        self.workers.append(self._start(address, f"worker{self._count}", command))
        return self.workers[-1]

    def stop(self) -> None:
        """End every process of it."""
        if self._desk is not None:
            self._desk.kill()
        for node in (*self.workers, *([self.head] if self.head is not None else ())):
            if node.lives:
                node.kill()
        _, alive = psutil.wait_procs(marked(self._mark), timeout=STOP_WITHIN_S)
        for one in alive:
            one.kill()

    # --- what runs on it ----------------------------------------------------------------------------------------------

    def deploy(self, config: Mapping[str, Any]) -> None:
        """`serve deploy`."""
        self._desk_says(json.dumps(config))

    def application(self) -> dict[str, Any]:
        """What Serve says of it.

        Raises:
            AssertionError: it could not be deployed.
        """
        found = self._desk_says("").get(APPLICATION, {})
        assert found.get("status") != "DEPLOY_FAILED", found.get("message")
        return dict(found)

    def replicas(self, deployment: str = REPLICAS) -> dict[str, tuple[str, str]]:
        """By id: state, and address of the node."""
        told = self.application().get("deployments", {}).get(deployment, {}).get("replicas", ())
        return {one["replica_id"]: (one["state"], one.get("node_ip", "")) for one in told}

    @property
    def serving(self) -> Node:
        """A worker that has a replica."""
        addresses = {address for _, address in self.replicas().values()}
        return next(node for node in self.workers if node.lives and node.address in addresses)

    def await_running(self, replicas: int) -> None:
        """Until the application is as it was deployed, and nothing of an older one is left.

        Raises:
            AssertionError: not within START_WITHIN_S.
        """

        def settled() -> bool:
            application = self.application()
            deployments = application.get("deployments", {})
            states = [one["state"] for told in deployments.values() for one in told["replicas"]]
            healthy = all(told["status"] == "HEALTHY" for told in deployments.values())
            return (
                application.get("status") == "RUNNING"
                and healthy
                and set(states) == {"RUNNING"}
                and len(deployments[REPLICAS]["replicas"]) == replicas
            )

        until(settled, f"not {replicas} replicas", START_WITHIN_S)

    def _desk_says(self, line: str) -> dict[str, Any]:
        if self._desk is None:
            command = [sys.executable, str(Path(__file__).with_name("serve_desk.py"))]
            log = (self.directory / "desk.log").open("a")
            self._desk = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        desk = self._desk
        assert desk.stdin is not None and desk.stdout is not None
        timer = threading.Timer(START_WITHIN_S, desk.kill)
        timer.start()
        try:
            desk.stdin.write(line + "\n")
            desk.stdin.flush()
            # Ray may have something to say there, too.
            answer = next((line for line in desk.stdout if line.startswith("{")), "")
        finally:
            timer.cancel()
        assert answer, (self.directory / "desk.log").read_text()
        return dict(json.loads(answer))

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, address: str, name: str, command: list[str]) -> Node:
        agent_http, agent_grpc, metrics = free_ports(3)
        log = self.directory / f"{name}.log"
        log.write_text("")  # what an earlier start said is not said by this one
        ray = [str(BIN / "ray"), "start", "--block", f"--node-ip-address={address}", *command]
        ray += [f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}"]
        ray += [f"--metrics-export-port={metrics}", f"--object-store-memory={128 << 20}", "--disable-usage-stats"]
        ray += ["--min-worker-port=0", "--max-worker-port=0"]
        sandbox = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent", "--"]
        environment = {**self._environment(), "DRAIN": str(DRAIN), "DRAIN_S": "600", "LOG": str(log)}
        return Node(address, subprocess.Popen([*sandbox, "sh", "-c", POD, "sh", *ray], env=environment), log)

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            MARK: self._mark,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_ADDRESS": f"{HEAD_ADDRESS}:{self._port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
            # Else every other test that runs now comes first.
            "RAY_worker_niceness": "0",
            **self.environment,
        }
        if environment.pop("PYTHONDONTWRITEBYTECODE", None):
            environment.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))
        return environment


def gcs_on(redis: EmbeddedRedis) -> dict[str, str]:
    """The environment of nodes whose head keeps what it knows in this Redis; KubeRay sets the same."""
    url = urlsplit(redis.url)
    return {
        "RAY_REDIS_ADDRESS": f"{url.hostname}:{url.port}",
        "RAY_REDIS_PASSWORD": url.password or "",
        "RAY_external_storage_namespace": "faults",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }


@contextmanager
def nodes(directory: Path, cpus: tuple[float, ...], **environment: str) -> Iterator[Nodes]:
    """A head, and a worker for each of ``cpus``; afterwards nothing is left. Skips the test without bubblewrap."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with ExitStack() as stack:
        made = Nodes(directory, environment)
        stack.callback(made.stop)
        made.start_head().await_started()
        for count in cpus:  # one by one: see POD
            made.start_worker(count).await_started()
        yield made


def serve_config(args: Mapping[str, Any], port: int, *, replicas: int, proxies: str = "HeadOnly") -> dict[str, Any]:
    """What `serve deploy` takes: a proxy on the head only stands for the load balancer before the nodes.

    The replicas' number stands beside the arguments: Serve replaces all that it runs when the arguments change.
    """
    return {
        "proxy_location": proxies,
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "cluster.app:build",
                "args": dict(args),
                "deployments": [{"name": REPLICAS, "num_replicas": replicas}],
            }
        ],
    }


def await_ready(url: str) -> None:
    """Until the probe says so.

    Raises:
        AssertionError: not within START_WITHIN_S.
    """
    end_s, told = time.monotonic() + START_WITHIN_S, "no connection"
    while time.monotonic() < end_s:
        try:
            answer = httpx.get(f"{url}/ready", timeout=10)
        except httpx.TransportError as error:
            told = str(error)
        else:
            if answer.is_success:
                return
            told = answer.text
        time.sleep(0.5)
    raise AssertionError(f"not ready: {told}")
