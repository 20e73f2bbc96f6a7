"""A real Prometheus on loopback, as a context manager."""

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from cluster.local.ports import free_ports

BINARY = "prometheus"
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
LOG_LINES = 5

needs_prometheus = pytest.mark.skipif(
    shutil.which(BINARY) is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)


class PrometheusFailed(Exception):
    """Prometheus does not start, or rejects a query."""


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels and its newest value."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Rule:
    """A rule as Prometheus has evaluated it."""

    name: str
    expression: str
    healthy: bool
    error: str
    is_alert: bool


def until(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """The first value that is true.

    Raises:
        PrometheusFailed: there was none within ``within_s`` seconds.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise PrometheusFailed(f"{what}: not within {within_s:g} s")
        time.sleep(POLL_S)
    return found


class Prometheus:
    """A Prometheus. ``files`` are the files of its folder by name; ``prometheus.yml`` is its configuration."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
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
        """The series of an expression now, or at ``at_s`` (Unix seconds)."""
        at = {} if at_s is None else {"time": f"{at_s:.3f}"}
        found = self._get("query", query=expression, **at)
        if found["resultType"] == "scalar":
            return [Series({}, float(found["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in found["result"]]

    def total(self, expression: str) -> float:
        """The sum of an expression's series; 0 if it has none."""
        return math.fsum(series.value for series in self.query(expression))

    def rules(self) -> list[Rule]:
        """All rules, in the order of their file."""
        return [
            Rule(rule["name"], rule["query"], rule["health"] == "ok", rule.get("lastError", ""), "state" in rule)
            for group in self._get("rules")["groups"]
            for rule in group["rules"]
        ]

    def scraped(self) -> bool:
        """Whether the last scrape of every target succeeded."""
        targets = self._get("targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def gapless_moment(self, over_s: float, within_s: float) -> float:
        """The time of the newest scrapes, as Unix seconds, once all scrapes of the last ``over_s`` seconds succeeded.

        A failed scrape makes every series of its target stale until the next one. All gauges, and the rules that use
        them, are empty meanwhile.

        Raises:
            PrometheusFailed: that was not so within ``within_s`` seconds.
        """
        window = f"[{1000 * over_s:.0f}ms]"
        scraped = f"timestamp(up) and min_over_time(up{window}) == 1 and count_over_time(up{window}) > 1"

        def times_s() -> list[float]:
            found = [one.value for one in self.query(scraped)]
            return found if len(found) == len(self.query("up")) else []

        return min(until(times_s, within_s, f"{over_s:g} s without a failed scrape"))

    def _get(self, what: str, **parameters: str) -> Any:
        answer = self._http.get(f"{self._url}/api/v1/{what}", params=parameters).json()
        if answer["status"] != "success":
            raise PrometheusFailed(answer["error"])
        return answer["data"]

    def _start(self) -> None:
        folder = Path(self._folder.name)
        for name, text in self._files.items():
            (folder / name).write_text(text)
        address = f"{LOOPBACK}:{free_ports(1, LOOPBACK)[0]}"
        self._url = f"http://{address}"
        command = (
            BINARY,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        )
        with (folder / "log").open("wb") as log:
            self._process = process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)

        def ready() -> bool:
            try:
                return process.poll() is not None or self._http.get(f"{self._url}/-/ready").is_success
            except httpx.TransportError:
                return False  # It does not listen yet.

        until(ready, START_TIMEOUT_S, "Prometheus starts")
        if process.poll() is not None:
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
