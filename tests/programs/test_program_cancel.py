"""`POST /v1/programs/{id}/cancel` of a program with many runs."""

import asyncio
import json
from typing import Any

import pytest

from cluster.core.errors import BadRequest
from cluster.http.routes import ProgramRoutes
from cluster.store.runs.records import NewRun
from tests.programs.runners import Runners
from tests.programs.scripted_runs import ScriptedReplicas
from tests.programs.test_runner import ended, outcome, spec

LATER = 120


async def test_all_open_runs_are_cancelled_however_many_came_later(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.http.routes.MOST_LISTED", 50)
    runner = runners(ScriptedReplicas([[asyncio.Event()] for _ in range(2)]))
    [store] = runners.stores
    fleet: Any = None
    routes = ProgramRoutes(runner, fleet)
    for name in ("first", "second"):
        await runner.start(spec(name))
    for number in range(LATER):
        await store.create(NewRun(f"later-{number}", "t", "p"), [b""])
        await store.append(f"later-{number}", 1, [b""], status="completed", final=True)
    shown = await routes.cancel("t", "p")
    assert json.loads(bytes(shown.body))["cancelled"] == ["second", "first"]
    assert [outcome(await ended(runner, name)).status for name in ("first", "second")] == ["cancelled"] * 2
    with pytest.raises(BadRequest, match="no program 'q' runs") as unknown:
        await routes.cancel("t", "q")
    assert unknown.value.status == 404
