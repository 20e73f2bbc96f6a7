"""What Ray's proxy needed for an answer is freed when the answer has ended."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.proxy_response_generator import ProxyResponseGenerator
from ray.serve.handle import DeploymentResponseGenerator

from cluster.proxy.middleware import free_ended_answers, middlewares
from tests import garbage

RAYS_OWN = ProxyResponseGenerator._get_next_streaming_result
RAYS_OWN = getattr(RAYS_OWN, "__wrapped__", RAYS_OWN)


class Response(DeploymentResponseGenerator):
    """Says these, as a handle's stream does."""

    def __init__(self, *said: bytes | Exception) -> None:
        self._said = iter(said)
        self.is_cancelled = False

    async def __anext__(self) -> Any:
        for one in self._said:
            if isinstance(one, Exception):
                raise one
            return one
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = ProxyResponseGenerator._get_next_streaming_result
    monkeypatch.setattr(ProxyResponseGenerator, "_get_next_streaming_result", now)  # as it was, afterwards
    free_ended_answers()


async def whole(*said: bytes | Exception) -> list[Any]:
    return [one async for one in ProxyResponseGenerator(Response(*said))]


async def test_an_answer_leaves_garbage_with_ray_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `free_ended_answers` can go."""
    # Another test of this process may have installed it.
    monkeypatch.setattr(ProxyResponseGenerator, "_get_next_streaming_result", RAYS_OWN)
    with pytest.raises(AssertionError, match="left to the garbage collector"), garbage.none_of():
        for _ in range(garbage.TIMES):
            assert await whole(b"a", b"b") == [b"a", b"b"]


@pytest.mark.usefixtures("installed")
async def test_an_answer_leaves_no_garbage() -> None:
    free_ended_answers()  # twice is as good as once
    with garbage.none_of():
        for _ in range(garbage.TIMES):
            assert await whole(b"a", b"b") == [b"a", b"b"]


def test_the_proxy_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProxyResponseGenerator, "_get_next_streaming_result", RAYS_OWN)
    trimming: list[str] = []
    monkeypatch.setattr("cluster.proxy.middleware.keep_trimmed", lambda: trimming.append("heap"))
    middlewares()
    assert ProxyResponseGenerator._get_next_streaming_result is not RAYS_OWN
    assert trimming == ["heap"]


@pytest.mark.usefixtures("installed")
async def test_an_error_is_told_with_where_it_was_raised() -> None:
    with pytest.raises(ValueError, match="broken") as told:
        await whole(b"a", ValueError("broken"))
    assert any(entry.name == "_get_next_streaming_result" for entry in told.traceback)


@pytest.mark.usefixtures("installed")
async def test_an_answer_that_does_not_come_in_time_is_cancelled() -> None:
    class Never(Response):
        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

    response = Never()
    with pytest.raises(TimeoutError):
        await anext(ProxyResponseGenerator(response, timeout_s=0.01))
    assert response.is_cancelled
