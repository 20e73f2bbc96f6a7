"""A replica that ends waits until its programs' contexts are on disk, and never for long."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.serve.llm.deployment import LLMServer

from cluster.config.schema import CaesuraConfig
from cluster.core.errors import ControlTimeout
from cluster.core.usage import DayUsage
from cluster.store.client import StoreFailure, StoreUnavailable
from replicas.bills import Bills
from replicas.leaving import begin_leaving, written
from replicas.server import ProgramServer


def scheduler(*answers: bool | Exception) -> Any:
    """A scheduler that answers whether contexts are still being written; the last answer stays."""
    left = list(answers)

    async def call(operation: str) -> dict[str, Any]:
        assert operation == "leave"
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return {"leaves": answer}

    return call


def test_it_waits_for_the_last_context() -> None:
    assert asyncio.run(written(scheduler(True, True, False)))


def test_it_does_not_wait_for_a_volume_that_hangs() -> None:
    assert not asyncio.run(written(scheduler(True), limit_s=0.05))


def test_a_scheduler_that_does_not_answer_does_not_keep_it() -> None:
    asyncio.run(begin_leaving(scheduler(ControlTimeout("no answer"))))
    assert not asyncio.run(written(scheduler(ControlTimeout("no answer"))))


class UsageStore:
    """Fails once, then keeps what it is given."""

    def __init__(self) -> None:
        self.programs: list[str] = []
        self._fails = True

    async def write(self, model: str, replica: str, rows: list[DayUsage]) -> None:
        if self._fails:
            self._fails = False
            raise StoreUnavailable(StoreFailure.TIMEOUT)
        self.programs += [row.usage.program for row in rows]


def test_the_usage_of_the_last_turns_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.bills.MAX_SENT", 2)
    bills, store = Bills(), UsageStore()

    async def exchange(operation: str, *, billed: int) -> dict[str, Any]:
        revision, rows = bills.since(billed)
        return {"bills": {"revision": revision, "packed": msgspec.msgpack.encode(rows)}}

    async def last_turns_end() -> None:
        for program in "abc":
            bills.of("acme", program).turn_ended(10, 5, 1)

    async def nothing(_: object) -> None:
        pass

    async def end() -> None:
        server: Any = object.__new__(ProgramServer)
        server._config, server._billed, server._loops = CaesuraConfig(), 0, [object()]
        server._channel, server._usage = SimpleNamespace(call=exchange), store
        server._turn_server = SimpleNamespace(aclose=last_turns_end)
        server._metrics = SimpleNamespace(fell_back=lambda _: None)
        await server.__del__()
        monkeypatch.setattr(ProgramServer, "__del__", lambda _: None)  # called once more, when the object is freed

    monkeypatch.setattr(LLMServer, "__del__", nothing)
    monkeypatch.setattr(ProgramServer, "replica_id", "r1")
    asyncio.run(end())
    assert store.programs == ["a", "b", "c"]
