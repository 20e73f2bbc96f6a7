"""A body that is ten times larger takes about ten times the time, whether it is accepted or refused."""

import asyncio
import json
import threading
from time import thread_time
from typing import Any

import pytest
from starlette.requests import Request

from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest, HttpError
from cluster.core.identity import identify
from cluster.http import fair_thread
from cluster.http.body import MAX_KEYS, parse_object
from cluster.http.fair_thread import SHORT_BYTES, FairThread
from cluster.http.requests import TurnReader, _checked
from tests.security.corpus import GROWING, chat

SMALL, TIMES = 3000, 10
RATIO = 40
"""Largest ratio of the times. That of quadratic work is 100, and that of linear work about 10."""
TRIES = 4


def judged(body: bytes) -> None:
    """Do what the ingress does with a turn's body before it sends it on."""
    try:
        identified = identify({}, parse_object(body, 64), "default", ())
        _checked(identified.body, None)
    except HttpError:
        pass


def cpu_s(body: bytes) -> float:
    """The CPU time of the fastest of several tries, in seconds."""
    times = []
    for _ in range(3):
        start_s = thread_time()
        judged(body)
        times.append(thread_time() - start_s)
    return min(times)


@pytest.mark.parametrize("name", GROWING)
def test_work_grows_with_the_body(name: str) -> None:
    small, large = GROWING[name](SMALL), GROWING[name](SMALL * TIMES)
    for _ in range(TRIES):  # a busy machine can only make it slower
        before_s = max(cpu_s(small), 2e-4)
        if cpu_s(large) < RATIO * before_s:
            return
    pytest.fail(f"ten times the body takes more than {RATIO} times the time")


async def test_a_large_body_is_read_beside_the_event_loop() -> None:
    threads: list[int] = []

    def work() -> int:
        threads.append(threading.get_ident())
        return 7

    bodies = FairThread()
    assert await bodies.run("t", SHORT_BYTES, work) == await bodies.run("t", SHORT_BYTES + 1, work) == 7
    assert threads[0] == threading.get_ident() != threads[1]

    def fail() -> None:
        raise BadRequest("no")

    for size in (1, SHORT_BYTES + 1):
        with pytest.raises(BadRequest, match="no"):
            await bodies.run("t", size, fail)


async def test_tenants_take_turns_and_who_left_costs_nothing() -> None:
    bodies, order, begin = FairThread(), list[str](), threading.Event()

    def wait() -> None:
        begin.wait(10)

    first = asyncio.create_task(bodies.run("flood", SHORT_BYTES + 1, wait))
    flood = [
        asyncio.create_task(bodies.run("flood", SHORT_BYTES + 1, lambda place=place: order.append(f"flood {place}")))
        for place in range(5)
    ]
    await asyncio.sleep(0)
    other = asyncio.create_task(bodies.run("other", SHORT_BYTES + 1, lambda: order.append("other")))
    await asyncio.sleep(0.01)
    flood[2].cancel()
    begin.set()
    await asyncio.gather(first, other, *flood, return_exceptions=True)
    assert order == ["other", "flood 0", "flood 1", "flood 3", "flood 4"]


async def test_the_reader_uses_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_thread, "SHORT_BYTES", 0)
    moved: list[Any] = []
    to_thread = asyncio.to_thread

    async def noted(work: Any) -> Any:
        moved.append(work)
        return await to_thread(work)

    monkeypatch.setattr(fair_thread.asyncio, "to_thread", noted)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chat(), "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    body, _ = await TurnReader(CaesuraConfig()).identified(Request(scope, receive))
    assert body["model"] == "tiny"
    assert len(moved) == 1


def test_what_is_too_much_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(BadRequest, match="more than"):
        parse_object(GROWING["a key twice among many"](MAX_KEYS), 64)
