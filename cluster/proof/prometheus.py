"""A real Prometheus of our own: started on loopback with our rules, asked over its HTTP API, stopped again."""

import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import httpx

from cluster.clock import Clock, MonotonicClock
from cluster.errors import CaesuraError

BINARY = "prometheus"
INSTALL = "Prometheus is not installed here (Debian: apt-get install prometheus)"
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
LOG_LINES = 5


class PrometheusFailed(CaesuraError):
    """Prometheus is not there, does not start, or refuses a query."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels and its newest value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as Prometheus has evaluated it."""

    name: str
    expression: str
    healthy: bool
    error: str
    state: str
    """Of an alert: inactive, pending or firing. Of a recording rule: empty."""


def installed() -> bool:
    """There is a Prometheus on the path."""
    return shutil.which(BINARY) is not None


class Prometheus:
    """A Prometheus as a context manager.

    Args:
        files: by name, what its folder gets; ``prometheus.yml`` is its configuration.
        clock: for deadlines.
    """

    def __init__(self, files: Mapping[str, str], clock: Clock | None = None) -> None:
        self._files = files
        self._clock = clock or MonotonicClock()
        self._folder = TemporaryDirectory("-caesura-prometheus")
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(timeout=START_TIMEOUT_S)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def query(self, expression: str, at_s: float | None = None) -> list[Series]:
        """What an expression is now, or was at ``at_s`` (Unix seconds).

        Raises:
            PrometheusFailed: it is no expression, or it cannot be evaluated.
        """
        at = {} if at_s is None else {"time": f"{at_s:.3f}"}
        found = self._get("query", query=expression, **at)
        if found["resultType"] == "scalar":
            return [Series({}, float(found["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in found["result"]]

    def total(self, expression: str) -> float:
        """The sum of an expression's series; 0 if it has none."""
        return sum(series.value for series in self.query(expression))

    def rules(self) -> list[Rule]:
        """All rules, in the order of their file."""
        return [
            Rule(
                name=rule["name"],
                expression=rule["query"],
                healthy=rule["health"] == "ok",
                error=rule.get("lastError", ""),
                state=rule.get("state", ""),
            )
            for group in self._get("rules")["groups"]
            for rule in group["rules"]
        ]

    def scraped(self) -> bool:
        """Every target has been scraped, the last time without an error."""
        targets = self._get("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def _get(self, what: str, **parameters: str) -> Any:
        answer = self._http.get(f"{self._url}/api/v1/{what}", params=parameters).json()
        if answer["status"] != "success":
            raise PrometheusFailed(answer["error"])
        return answer["data"]

    def _start(self) -> None:
        if (binary := shutil.which(BINARY)) is None:
            raise PrometheusFailed(INSTALL)
        folder = Path(self._folder.name)
        for name, text in self._files.items():
            (folder / name).write_text(text)
        address = f"{LOOPBACK}:{_free_port()}"
        self._url = f"http://{address}"
        command: Sequence[str] = (
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        )
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        deadline_s = self._clock.now_s() + START_TIMEOUT_S
        while self._process.poll() is None and self._clock.now_s() < deadline_s:
            try:
                if self._http.get(f"{self._url}/-/ready").is_success:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(POLL_S)
        tail = (folder / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise PrometheusFailed("\n".join(("Prometheus does not start", *tail)))

    def _stop(self) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])
