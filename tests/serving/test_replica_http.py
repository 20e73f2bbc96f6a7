"""A replica's own HTTP surface, without an engine: what the router's note does, and what the router is told."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from cluster.api.openai import SSE_DONE
from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError, Overloaded, ProgramMoved
from cluster.core.stream import Progress, StreamChunk
from cluster.direct.http_app import LocalAnswers, http_app
from cluster.direct.note import NOTE, RefusalNote, RouterNote
from cluster.direct.turn_reports import TurnReports
from cluster.observing.slo_tracker import SloTracker

TURN = {"prompt": "Once", "program_id": "p"}
PATH = "/v1/completions"


class Replica:
    """Answers by a script; notes who was asked, and what the router was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.epochs: list[int | None] = []
        self.told: list[tuple[str, bool]] = []
        self.telling = asyncio.Event()
        self.telling_fails = 0
        self.here: list[bytes | StreamChunk[bytes] | HttpError] = [b'{"from": "here"}']

    async def answer(
        self,
        method: str,
        body: dict[str, Any],
        headers: dict[str, str],
        key: str | None,
        identity: str | None,
        epoch: int | None,
    ) -> AsyncGenerator[bytes | StreamChunk[bytes] | HttpError]:
        self.asked.append(("here", key))
        self.epochs.append(epoch)
        for piece in self.here:
            yield piece

    def relay(self, method: str, body: dict[str, Any], headers: dict[str, str], identity: str) -> LocalAnswers:
        async def elsewhere() -> AsyncGenerator[bytes | StreamChunk[bytes] | HttpError]:
            self.asked.append(("elsewhere", None))
            yield b'{"from": "elsewhere"}'

        return LocalAnswers(elsewhere(), set())

    async def ready(self) -> None:
        raise Overloaded("loading")

    async def tell(self, ended: Sequence[tuple[str, bool]], there: Sequence[str] | None) -> None:
        self.telling.set()
        if self.telling_fails:
            self.telling_fails -= 1
            raise ConnectionError("the router is gone")
        self.told += ended


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
async def http(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    reports = TurnReports(replica.tell)
    app = http_app(
        CaesuraConfig(),
        replica.answer,
        replica.relay,
        replica.ready,
        reports,
        as_http_error,
        SloTracker(CaesuraConfig(), MonotonicClock()),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
        yield client
    await reports.aclose()


def noted(note: RouterNote) -> dict[str, str]:
    return {NOTE: note.encode()}


async def until(replica: Replica, condition: Callable[[], bool]) -> None:
    """Wait until the router was told what makes it so."""
    async with asyncio.timeout(30):
        while not condition():
            replica.telling.clear()
            await replica.telling.wait()


async def test_a_turn_that_the_router_placed_is_answered_here(http: httpx.AsyncClient, replica: Replica) -> None:
    answer = await http.post(PATH, json=TURN, headers=noted(RouterNote("default/p", 1, "t1")))
    assert answer.json() == {"from": "here"}
    assert replica.epochs == [1]
    await until(replica, lambda: replica.told == [("t1", True)])


@pytest.mark.parametrize("note", [RouterNote(), RouterNote("default/other")], ids=["no program", "another program"])
async def test_a_program_that_the_router_did_not_see_is_served_where_it_lives(
    http: httpx.AsyncClient, replica: Replica, note: RouterNote
) -> None:
    assert (await http.post(PATH, json=TURN, headers=noted(note))).json() == {"from": "elsewhere"}
    assert replica.asked == [("elsewhere", None)]


async def test_a_turn_of_no_program_is_answered_wherever_it_comes(http: httpx.AsyncClient, replica: Replica) -> None:
    assert (await http.post(PATH, json={"prompt": "Once"})).json() == {"from": "here"}
    assert replica.asked == [("here", None)]


async def test_a_turn_of_a_program_that_has_moved_follows_it(http: httpx.AsyncClient, replica: Replica) -> None:
    replica.here = [ProgramMoved("it lives elsewhere", epoch=2)]
    answer = await http.post(PATH, json=TURN, headers=noted(RouterNote("default/p", 1, "t1")))
    assert answer.json() == {"from": "elsewhere"}
    await until(replica, lambda: replica.told == [("t1", True)])


async def test_the_router_s_refusal_reaches_the_client(http: httpx.AsyncClient, replica: Replica) -> None:
    refusal = RefusalNote.of(Overloaded("too long a wait", code="queue_timeout", retry_after_s=9))
    answer = await http.post(PATH, json=TURN, headers=noted(RouterNote(refusal=refusal)))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    assert answer.json()["error"] == {
        "message": "too long a wait",
        "type": "overloaded_error",
        "param": None,
        "code": "queue_timeout",
    }
    assert replica.asked == []


async def test_a_turn_that_fails_is_over_too(http: httpx.AsyncClient, replica: Replica) -> None:
    replica.here = [Overloaded("full")]
    placed = noted(RouterNote("default/p", 1, "t1"))
    assert (await http.post(PATH, json=TURN, headers=placed)).status_code == 503
    assert (await http.post("/v1/responses", json=TURN, headers=noted(RouterNote(turn="t2")))).status_code == 501
    assert (await http.post(PATH, content=b"{", headers=noted(RouterNote(turn="t3")))).status_code == 400
    await until(replica, lambda: len(replica.told) == 3)
    assert replica.told == [("t1", False), ("t2", False), ("t3", False)]


async def test_a_stream_that_breaks_says_so(http: httpx.AsyncClient, replica: Replica) -> None:
    replica.here = [StreamChunk(Progress(events=1), b"data: {}\n\n"), Overloaded("full")]
    placed = noted(RouterNote("default/p", 1, "t1"))
    text = (await http.post(PATH, json=TURN, headers=placed)).content
    assert text.startswith(b'data: {}\n\ndata: {"error"')
    assert text.endswith(SSE_DONE)


async def test_ends_reach_a_router_that_was_away(http: httpx.AsyncClient, replica: Replica) -> None:
    replica.telling_fails = 2
    await http.post(PATH, json=TURN, headers=noted(RouterNote("default/p", 1, "t1")))
    await until(replica, lambda: replica.telling_fails == 0)
    await http.post(PATH, json=TURN, headers=noted(RouterNote("default/p", 1, "t2")))
    await until(replica, lambda: replica.told == [("t1", True), ("t2", True)])


async def test_of_too_many_unreported_ends_the_oldest_are_given_up() -> None:
    sent: list[tuple[str, bool]] = []
    failures = 1

    async def report(ended: Sequence[tuple[str, bool]], under_way: Sequence[str] | None) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionError("the router is gone")
        sent.extend(ended)
        done.set()

    done = asyncio.Event()
    reports = TurnReports(report, limit=2, retry_s=0.0)
    for turn in ("t1", "t2", "t3"):
        reports.began(turn)
        reports.ended(turn, complete=True)
    async with asyncio.timeout(30):
        await done.wait()
    await reports.aclose()
    assert sent == [("t2", True), ("t3", True)]


async def test_a_busy_replica_still_lists_the_turns_under_way() -> None:
    listed = asyncio.Event()

    async def report(ended: Sequence[tuple[str, bool]], under_way: Sequence[str] | None) -> None:
        if under_way == ["long"]:
            listed.set()
        reports.began("short")  # so that there is an end to report again
        reports.ended("short", complete=True)

    reports = TurnReports(report, period_s=0.2)
    reports.began("long")
    reports.began("short")
    reports.ended("short", complete=True)
    async with asyncio.timeout(30):
        await listed.wait()
    await reports.aclose()


async def test_not_ready(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "loading" in answer.json()["error"]["message"]
