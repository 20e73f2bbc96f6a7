"""A Ray head as KubeRay starts one, in processes of its own, on ports that nobody else has."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil

from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import BYTECODE, ENVIRONMENT, RAY_GAVE_UP, RAY_STARTS
from cluster.local.haproxy import haproxy_environment
from cluster.local.ports import free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARK = "CAESURA_TEST_RAY"
START_WITHIN_S = 300.0
STOP_WITHIN_S = 20.0
POLL_S = 0.5
STARTED = "Ray runtime started"
"""What `ray start` prints."""


@contextmanager
def ray_head(token: str, num_cpus: int, log: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The dashboard's URL, and the environment that Ray's commands need; afterwards nothing of it is left.

    HAProxy is in front of the ingresses, as in the chart.

    `ray stop` would stop every Ray of this machine: these processes are known by a variable in their environment.
    """
    port, dashboard, agent_http, agent_grpc, metrics = free_ports(5)
    mark = uuid.uuid4().hex
    places = TemporaryDirectory("-ray")
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **haproxy_environment(CaesuraConfig(), places.name),
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "OMP_NUM_THREADS": "1",
        # The dashboard is a dozen processes that import Ray at the same time; Ray gives them a minute.
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(int(START_WITHIN_S)),
        "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(int(START_WITHIN_S)),
    }
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))
    command = ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--num-cpus={num_cpus}"]
    command += [f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}"]
    command += [f"--metrics-export-port={metrics}", f"--object-store-memory={128 << 20}"]
    url = f"http://127.0.0.1:{dashboard}"
    try:
        for left in reversed(range(RAY_STARTS)):
            with log.open("w") as told:
                process = subprocess.Popen(command, env=environment, stdout=told, stderr=told, process_group=0)
            if _has_started(url, token, process, log):
                break
            assert left and RAY_GAVE_UP in log.read_text(), log.read_text()
            _end(_marked(mark))
        yield url, {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
        _end(_marked(mark))
        places.cleanup()


def _has_started(url: str, token: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    """Wait until it answers, or has ended. Ray gives its own processes 30 s, which a busy machine may exceed."""
    end_s = time.monotonic() + START_WITHIN_S
    while process.poll() is None:
        try:
            answer = httpx.get(f"{url}/api/version", headers={"Authorization": f"Bearer {token}"}, timeout=5)
            if answer.is_success and STARTED in log.read_text():  # its dashboard answers before
                return True
        except httpx.TransportError:
            pass
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(POLL_S)
    return False


def _end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=STOP_WITHIN_S)
    for one in alive:
        one.kill()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # it ended, or it is somebody else's
    return found
