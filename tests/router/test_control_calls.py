"""Control calls: each ends in time, and what one replica or model does not do keeps nothing from the others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import ControlTimeout, ReplicaGone
from cluster.dispatch.predictions import NullPredictions
from cluster.dispatch.replica_clients import ReplicaClients
from cluster.observing.trace_context import NullTraces

KEY = "default/program"
MODELS = ("first", "second", "third")
CONFIG = CaesuraConfig.model_validate(
    {
        "model": {"id": "first"},
        "models": {"second": {}, "third": {}},
        "router": {"name": "consistent_hash"},
        "redis": {"url": "redis://127.0.0.1:1"},
        "metrics": {"enabled": False},
        "limits": {"timeout_s": 0.02},
    }
)


async def never() -> Any:
    await asyncio.Event().wait()


class Handle:
    """What is asked of a model's replicas; `answer` says what becomes of a call."""

    deployment_name = "ProgramServer"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Callable[[], Any] = dict

    def options(self, **_: Any) -> "Handle":
        return self

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self, method)

    def broadcast(self, method: str, *arguments: Any) -> "Broadcast":
        return Broadcast(self, method, arguments)

    async def called(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((method, *arguments))
        answer = self.answer()
        if isinstance(answer, Exception):
            raise answer
        return await answer if asyncio.iscoroutine(answer) else answer


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *arguments: Any) -> Any:
        return await self._handle.called(self._name, arguments)


class Broadcast:
    def __init__(self, handle: Handle, method: str, arguments: tuple[Any, ...]) -> None:
        self._work = handle, method, arguments

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        handle, method, arguments = self._work
        async with asyncio.timeout(timeout_s):
            return [await handle.called(method, arguments)]


@pytest.fixture
def handles() -> dict[str, Handle]:
    return {model: Handle() for model in MODELS}


@pytest.fixture
async def fleet(handles: dict[str, Handle], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReplicaClients]:
    monkeypatch.setattr("cluster.dispatch.replica_client.BROADCAST_SLACK_S", 0.0)
    made: Any = handles
    fleet = ReplicaClients(
        made, CONFIG, ManualClock(), "ingress", NullPredictions(), NullTraces(), lambda model: (0, 0)
    )
    yield fleet
    await fleet.aclose()


@pytest.mark.parametrize("fault", [ReplicaGone("gone"), ValueError("a bug"), never], ids=["gone", "bug", "stuck"])
@pytest.mark.parametrize("failing", MODELS)
async def test_the_end_of_a_program_reaches_all_models_though_one_fails(
    fleet: ReplicaClients, handles: dict[str, Handle], fault: Any, failing: str
) -> None:
    handles[failing].answer = fault if callable(fault) else lambda: fault
    with pytest.raises(ControlTimeout if fault is never else type(fault)):
        await fleet.tell(KEY, "end", {})
    sent = ("control", "end", {"key": KEY})
    assert [handle.calls for handle in handles.values()] == [[sent]] * len(MODELS)


async def test_a_control_call_that_is_stuck_ends_in_time_and_the_next_one_is_sent(
    fleet: ReplicaClients, handles: dict[str, Handle]
) -> None:
    handles["first"].answer = never
    with pytest.raises(ControlTimeout):
        await fleet.tell(KEY, "tool_started", {})
    handles["first"].answer = dict
    await fleet.tell(KEY, "tool_finished", {})
    assert [call[1] for call in handles["first"].calls] == ["tool_started", "tool_finished"]


async def test_a_call_of_a_replica_by_its_id_ends_in_time(fleet: ReplicaClients, handles: dict[str, Handle]) -> None:
    for handle in handles.values():
        handle.answer = never
    with pytest.raises(ControlTimeout):
        await fleet.to("r0", "drain", True)


async def test_a_model_that_does_not_answer_does_not_hide_what_another_knows_of_a_program(
    fleet: ReplicaClients, handles: dict[str, Handle]
) -> None:
    handles["first"].answer = never
    handles["second"].answer = lambda: {"phase": "paused"}
    assert await fleet.story(KEY) == {"phase": "paused"}
    handles["second"].answer = dict
    with pytest.raises(ControlTimeout):
        await fleet.story(KEY)


async def test_a_broadcast_reaches_all_models_though_one_does_not_answer(
    fleet: ReplicaClients, handles: dict[str, Handle]
) -> None:
    handles["first"].answer = never
    with pytest.raises(ControlTimeout):
        await fleet.broadcast("set_policy", {})
    assert all(handle.calls == [("set_policy", {})] for handle in handles.values())


async def test_closing_goes_on_though_one_part_fails_to_close(
    fleet: ReplicaClients, handles: dict[str, Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def close(model: str) -> None:
        closed.append(model)
        if model == "first":
            raise ValueError("a bug")

    with monkeypatch.context() as patch:
        for model, placement in fleet._placements.items():
            patch.setattr(placement, "aclose", partial(close, model))
        with pytest.raises(ValueError, match="a bug"):
            await fleet.aclose()
    assert sorted(closed) == sorted(MODELS)


async def test_a_model_that_may_have_no_replica(handles: dict[str, Handle]) -> None:
    """Neither a probe nor a list of models starts one, or the model would never be at zero for long. All replicas are
    none.
    """
    changed = {"models": {"second": {"replicas": {"min": 0, "max": 1}}, "third": {}}, "router": {"name": "caesura"}}
    made: Any = handles
    fleet = ReplicaClients(
        made,
        CaesuraConfig.model_validate({**CONFIG.model_dump(), **changed}),
        ManualClock(),
        "ingress",
        NullPredictions(),
        NullTraces(),
        lambda model: (0, 0),
    )
    await fleet.ready()
    assert [[call[0] for call in handle.calls] for handle in handles.values()] == [["ready"], [], ["ready"]]
    assert await fleet.max_model_len("second") is None
    assert handles["second"].calls == []
    none = DeploymentUnavailableError(DeploymentID("ProgramServer:second", "caesura"))
    handles["second"].answer = lambda: none
    assert await fleet.broadcast("snapshot") == [{}, {}]
    handles["third"].answer = lambda: none
    with pytest.raises(DeploymentUnavailableError):
        await fleet.broadcast("snapshot")
    await fleet.aclose()
