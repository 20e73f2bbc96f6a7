"""`GET /v1/programs/{id}` of a program with many runs: one log at a time is in memory, and is read in a thread."""

import json
import threading
import weakref
from typing import Any

import pytest

from cluster.http.routes import ProgramRoutes
from cluster.runs.events import RunEvent
from cluster.runs.export import account
from cluster.store.runs.records import RunHead
from tests.responses import run_logs

LOGS: Any = run_logs


class Log(list[RunEvent]):
    """A log that can be watched."""


class Runner:
    """Has three runs of a program, and notes how many of their logs are in memory when one is loaded."""

    def __init__(self) -> None:
        self._loaded: list[weakref.ref[Log]] = []
        self.in_memory: list[int] = []

    async def runs(self, tenant: str, *, program: str) -> list[RunHead]:
        return [RunHead(f"r{number}", tenant, program, 0.0, "completed", {}, False, False) for number in (3, 2, 1)]

    async def load(self, run_id: str, tenant: str) -> Log | None:
        self.in_memory.append(sum(log() is not None for log in self._loaded))
        if run_id == "r2":
            return None  # it has expired meanwhile
        log = Log([LOGS.accepted(id=run_id), *LOGS.turn(1, "hi"), LOGS.COMPLETED])
        self._loaded.append(weakref.ref(log))
        return log


class Fleet:
    """No replica remembers the program."""

    async def story(self, key: str) -> None:
        return None


async def test_one_log_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def noted(log: list[RunEvent], *, token_ids: bool) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return account(log, token_ids=token_ids)

    monkeypatch.setattr("cluster.http.routes.account", noted)
    runner: Any = Runner()
    fleet: Any = Fleet()
    shown = await ProgramRoutes(runner, fleet).show("t", "p", token_ids=True)
    assert [run["id"] for run in json.loads(bytes(shown.body))["runs"]] == ["r1", "r3"]
    assert runner.in_memory == [0, 0, 0]
    assert threading.get_ident() not in threads
