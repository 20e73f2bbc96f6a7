"""A call's one deadline, and a listing's limit, whatever the actors do. The actors are the test's."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.config.tools import ToolsConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import Overloaded, ToolFailed
from cluster.core.tools import Outcome, ToolCall, ToolId, ToolResult
from cluster.http.services import ProgramService
from tests.waiting import WITHIN_S
from tools_runtime import actor as acting
from tools_runtime.actor import ToolActors

TOOL = {"kind": "python", "entry": "tests.tools.actor_tools:pid", "deadline_s": 60.0}
DEFINED = {"once": TOOL, "again": {**TOOL, "idempotent": True}}

Answer = Callable[[ToolCall], Awaitable[ToolResult]]


class Actors:
    """Stands for `SharedActors`: each actor answers a call as the test says, and one that dies stays dead."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.living = list(range(len(answers)))

    def __len__(self) -> int:
        return max(1, len(self._answers))

    def __getitem__(self, index: int) -> Any:
        run = self._answers[index]
        methods = {
            "run": lambda call, definitions, resumed, attempt: run(call),
            "abandon": lambda attempt: None,
            "knows": lambda call: answered(False),
            "offers": lambda definitions, tenant: asyncio.Event().wait(),
            "cancel": lambda program, call_id: asyncio.Event().wait(),
            "completion": lambda program, call_id: asyncio.Event().wait(),
        }
        return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})

    def attend(self) -> None:
        """Nothing."""

    def gone(self, index: int) -> asyncio.Event:
        return asyncio.Event()

    def revive(self, index: int) -> None:
        self.living.remove(index)

    async def one_living(self) -> None:
        if not self.living:
            await asyncio.Event().wait()


async def answered(value: Any) -> Any:
    return value


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> Callable[..., ToolActors]:
    """Makes a pool of actors that answer so."""

    def make(*answers: Answer) -> ToolActors:
        monkeypatch.setattr(acting, "SharedActors", lambda config, cpus: Actors(*answers))
        config = {"actors": max(1, len(answers)), "defined": DEFINED, "request_kinds": ["http"]}
        return ToolActors(ToolsConfig.model_validate(config), clock=clock)

    return make


async def answer(pool: ToolActors, call: ToolCall, definitions: Any = None, *, resumed: bool = False) -> ToolResult:
    return await asyncio.wait_for(pool.run(call, definitions, resumed=resumed), WITHIN_S)


@pytest.mark.parametrize(("resumed", "effect"), [(False, "it was never started"), (True, "it may have taken effect")])
async def test_a_call_waits_for_an_actor_until_its_deadline(
    pool: Callable[..., ToolActors], resumed: bool, effect: str
) -> None:
    result = await answer(pool(), ToolCall("c", "once", deadline_s=0.05), resumed=resumed)
    assert result.outcome is Outcome.TIMEOUT
    assert result.text == f"timeout: there was no process that could run once; {effect}"


def dying(clock: ManualClock, after_s: float) -> Answer:
    async def run(call: ToolCall) -> ToolResult:
        clock.advance(after_s)
        raise RayActorError

    return run


def noting(seen: list[float | None]) -> Answer:
    async def run(call: ToolCall) -> ToolResult:
        seen.append(call.deadline_s)
        return ToolResult(call.id, call.name, Outcome.OK, "done")

    return run


@pytest.mark.parametrize(
    ("said_s", "definitions", "left_s"),
    [
        (None, None, 20.0),
        (50.0, None, 10.0),
        (None, {"again": {"kind": "http", "idempotent": True, "deadline_s": 45}}, 5.0),
        (None, {"again": {"kind": "http", "idempotent": True}}, 20.0),
        (None, {"again": {"kind": "http", "idempotent": True, "deadline_s": "?"}}, 80.0),
    ],
)
async def test_a_second_actor_has_what_is_left_of_the_deadline(
    pool: Callable[..., ToolActors], clock: ManualClock, said_s: float | None, definitions: Any, left_s: float
) -> None:
    seen: list[float | None] = []
    tool = ToolId.of_request("again") if definitions else None
    call = ToolCall("c", "again", deadline_s=said_s, tool=tool)
    result = await answer(pool(dying(clock, 40.0), noting(seen)), call, definitions)
    assert (result.text, seen) == ("done", [left_s])


async def test_a_call_that_did_not_wait_has_the_deadline_that_it_says(
    pool: Callable[..., ToolActors], clock: ManualClock
) -> None:
    seen: list[float | None] = []
    for said_s in (None, 7.0):
        await answer(pool(noting(seen)), ToolCall("c", "again", deadline_s=said_s))
    assert seen == [None, 7.0]


async def test_no_actor_is_left_for_a_second_run(pool: Callable[..., ToolActors], clock: ManualClock) -> None:
    result = await answer(pool(dying(clock, 59.95)), ToolCall("c", "again"))
    assert (result.outcome, result.text.endswith("it may have taken effect")) == (Outcome.TIMEOUT, True)


async def started(call: ToolCall) -> ToolResult:
    return ToolResult(call.id, call.name, Outcome.STARTED, "started")


async def test_a_frozen_actor_holds_up_neither_a_cancellation_nor_a_wait_for_an_asynchronous_call(
    pool: Callable[..., ToolActors], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acting, "ASK_S", 0.05)
    actors = pool(started)
    await answer(actors, call := ToolCall("c", "once", program="p", deadline_s=0.05))
    assert await asyncio.wait_for(actors.cancel(*call.key), WITHIN_S)
    result = await asyncio.wait_for(actors.completion(*call.key), WITHIN_S)
    assert result.outcome is Outcome.TIMEOUT
    assert result.text == "timeout: what runs the call did not answer; the tool may have taken effect"


@pytest.mark.parametrize("answers", [(), (dying(ManualClock(), 0.0),)], ids=["no actor lives", "none answers"])
async def test_a_listing_does_not_wait_for_ever(
    pool: Callable[..., ToolActors], monkeypatch: pytest.MonkeyPatch, answers: tuple[Answer, ...]
) -> None:
    monkeypatch.setattr(acting, "LISTING_S", 0.05)
    actors = pool(*answers)
    with pytest.raises(ToolFailed, match="do not answer; try again later"):
        await asyncio.wait_for(actors.offers(), WITHIN_S)
    service: Any = SimpleNamespace(tools=actors, _tenants=SimpleNamespace(tools=lambda tenant, offers: offers))
    with pytest.raises(Overloaded, match="try again later") as refused:
        await asyncio.wait_for(ProgramService.offers(service, "tenant"), WITHIN_S)
    assert refused.value.retry_after_s is not None
