"""More than the bound is refused at once, where it makes work; everything else always passes."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.proxy import load_shedding as proxy_load_shedding
from cluster.proxy.load_shedding import LoadShedder

WORK, HOOK = "/v1/completions", "/v1/programs/p/tool_finished"


async def test_a_rush_is_turned_away_and_the_rest_served() -> None:
    gate, inside = asyncio.Event(), 0

    async def handler(request: Request) -> Response:
        nonlocal inside
        inside += 1
        if request.method == "POST" and request.url.path == WORK:
            await gate.wait()
        return PlainTextResponse("ok")

    paths, refusals = (WORK, HOOK, "/admin/reset", "/health"), []
    inner = Starlette(routes=[Route(path, handler, methods=["GET", "POST"]) for path in paths])
    app = LoadShedder(inner, 3, lambda: refusals.append(1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        served = [asyncio.create_task(client.post(WORK)) for _ in range(3)]
        while inside < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = await client.post(WORK)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"]
        assert [(await client.get(path)).status_code for path in ("/health", WORK)] == [200, 200]
        assert [(await client.post(path)).status_code for path in ("/admin/reset", HOOK)] == [200, 200]
        gate.set()
        assert {(await task).status_code for task in served} == {200}
        assert (await client.post(WORK)).status_code == 200
    assert len(refusals) == 1


async def test_who_is_served_enters_one_by_one_and_the_others_are_refused_in_between() -> None:
    """The last of four is refused before the first has entered."""
    told: list[str] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        told.append(f"{scope['query_string'].decode()} enters")
        for _ in range(20):
            await asyncio.sleep(0)

    async def send(message: Message) -> None:
        told.append(f"{message['type']} {message.get('status')}")

    app = LoadShedder(slow, 3, lambda: told.append("refused"))
    scope = {"type": "http", "method": "POST", "path": WORK, "headers": []}
    await asyncio.gather(*(app(scope | {"query_string": name.encode()}, None, send) for name in "abcd"))  # type: ignore[arg-type]
    assert told.index("refused") < told.index("a enters") < told.index("b enters") < told.index("c enters")


async def test_nobody_enters_while_others_are_refused_but_soon_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        told.append("enters")
        await asyncio.sleep(60)

    async def send(message: Message) -> None: ...

    async def refuse_for(turns: int) -> None:
        for _ in range(turns):
            await app(scope, None, send)  # type: ignore[arg-type]
            await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": WORK, "headers": []}
    for gives_way_s, first in [(60.0, "refused"), (0.0, "enters")]:
        monkeypatch.setattr(proxy_load_shedding, "REJECTIONS_FIRST_S", gives_way_s)
        app = LoadShedder(work, 1, lambda: told.append("refused"))
        told.clear()
        served = asyncio.create_task(app(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await refuse_for(30)
        while "enters" not in told:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert told.index("enters") == (30 if first == "refused" else 0)
        served.cancel()


@pytest.mark.parametrize(("said", "most"), [("32", 32), ("", None), ("many", None)])
def test_the_environment_says_the_bound(monkeypatch: pytest.MonkeyPatch, said: str, most: int | None) -> None:
    monkeypatch.setenv(proxy_load_shedding.MAX_IN_FLIGHT_VARIABLE, said)
    assert proxy_load_shedding.max_in_flight() == most
