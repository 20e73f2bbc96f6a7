"""A tenant at its bound is refused in the proxy, as the ingress refused it, and by nobody else."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.types import Receive, Scope, Send

from cluster.api.openai import RETRY_AFTER_S, error_response
from cluster.auth.middleware import key_of
from cluster.auth.tenants import TENANT_CONCURRENCY, TENANT_RATE
from cluster.core.clock import ManualClock
from cluster.core.errors import TooManyRequests, Unauthorized
from cluster.proxy.load_shedding import CACHED_FOR_S, MAX_IN_FLIGHT_VARIABLE, REJECTION_SPACING_S, RateLimitCache
from cluster.proxy.middleware import middlewares

WORK = "/v1/completions"
MOST = 2
EARLY_S = 0.01
"""An event loop's timers may go off so much too early."""


class Ingress:
    """One that serves MOST requests at a time of each key, when its gate is open, and refuses the others."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.inside: dict[str, int] = {}
        self.asked = 0
        self.code: str | None = TENANT_CONCURRENCY
        self.wait_s = 1.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        key = key_of(scope) or ""
        if self.inside.get(key, 0) >= MOST:
            error = TooManyRequests("enough", code=self.code, retry_after_s=self.wait_s)
            await error_response(error)(scope, receive, send)
            return
        self.inside[key] = self.inside.get(key, 0) + 1
        await self.gate.wait()
        self.inside[key] -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


class Front:
    """Clients, the middleware, and the ingress behind it."""

    def __init__(self) -> None:
        self.clock, self.ingress, self.reasons = ManualClock(), Ingress(), list[str]()
        self.middleware = RateLimitCache(self.ingress, self.clock, self.reasons.append)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.middleware),
            base_url="http://test",
        )

    @property
    def repeated(self) -> int:
        return len(self.reasons)

    async def post(self, key: str = "a", path: str = WORK) -> httpx.Response:
        return await self.client.post(path, headers={"Authorization": f"Bearer {key}"} if key else {})

    async def fill(self, key: str = "a") -> list[asyncio.Task[httpx.Response]]:
        """As many requests as are served; they wait for the gate."""
        tasks = [asyncio.create_task(self.post(key)) for _ in range(MOST)]
        while self.ingress.inside.get(key, 0) < MOST:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return tasks


@pytest.fixture
def front() -> Iterator[Front]:
    yield Front()


async def test_the_ingress_refuses_once_and_the_proxy_from_then_on(front: Front) -> None:
    waiting = await front.fill()
    refused = [await front.post() for _ in range(5)]
    assert [one.status_code for one in refused] == [429] * 5
    assert len({(one.text, one.headers["retry-after"]) for one in refused}) == 1
    assert (front.ingress.asked, front.reasons) == (MOST + 1, [TENANT_CONCURRENCY] * 4)
    front.ingress.gate.set()
    assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * MOST
    assert (await front.post()).status_code == 200


async def test_who_has_room_again_is_let_through_at_once(front: Front) -> None:
    await front.fill()
    assert (await front.post()).status_code == 429
    front.ingress.gate.set()
    while front.ingress.inside["a"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    front.ingress.gate.clear()
    again = asyncio.create_task(front.post())
    while not front.ingress.inside["a"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    front.ingress.gate.set()
    assert (await again).status_code == 200
    assert front.repeated == 0


async def test_the_ingress_is_asked_again_after_a_while(front: Front) -> None:
    await front.fill()
    for _ in range(3):
        assert (await front.post()).status_code == 429
    assert front.ingress.asked == MOST + 1
    front.clock.advance(CACHED_FOR_S)
    for _ in range(3):
        assert (await front.post()).status_code == 429
    assert front.ingress.asked == MOST + 2


async def test_those_who_ask_again_at_once_are_answered_one_after_the_other(front: Front) -> None:
    await front.fill()
    assert (await front.post()).status_code == 429
    many, began_s = round(2 * RETRY_AFTER_S / REJECTION_SPACING_S), time.monotonic()
    told_s: list[float] = []

    async def ask() -> None:
        assert (await front.post()).status_code == 429
        told_s.append(time.monotonic() - began_s)

    await asyncio.gather(*(ask() for _ in range(many)))
    assert front.repeated == many
    for number, at_s in enumerate(told_s, 1):
        assert at_s > min(number * REJECTION_SPACING_S, RETRY_AFTER_S) - EARLY_S


@pytest.mark.parametrize(("key", "path"), [("b", WORK), ("", WORK), ("a", "/v1/programs/p/tool_finished")])
async def test_others_and_other_things_pass(front: Front, key: str, path: str) -> None:
    await front.fill()
    assert (await front.post()).status_code == 429
    before = front.ingress.asked
    front.ingress.gate.set()
    await front.post(key, path)
    assert (front.ingress.asked, front.repeated) == (before + 1, 0)


async def test_a_refusal_for_another_reason_is_not_repeated(front: Front) -> None:
    front.ingress.code = None
    await front.fill()
    for _ in range(3):
        assert (await front.post()).status_code == 429
    assert (front.ingress.asked, front.repeated) == (MOST + 3, 0)


async def test_who_comes_too_fast_is_refused_until_it_may_come_again_whatever_is_in_flight(front: Front) -> None:
    front.ingress.code, front.ingress.wait_s = TENANT_RATE, 0.3
    waiting = await front.fill()
    assert (await front.post()).status_code == 429
    front.ingress.gate.set()
    await asyncio.gather(*waiting)
    for _ in range(3):
        again = await front.post()
        assert (again.status_code, again.headers["retry-after"], again.headers["retry-after-ms"]) == (429, "1", "300")
    assert (front.ingress.asked, front.reasons) == (MOST + 1, [TENANT_RATE] * 3)
    assert (await front.post("b")).status_code == 200
    front.clock.advance(0.3)
    assert (await front.post()).status_code == 200


async def test_who_would_have_to_wait_long_may_ask_the_ingress_again_before(front: Front) -> None:
    """Another one may have something left for it."""
    front.ingress.code, front.ingress.wait_s = TENANT_RATE, 90.0
    waiting = await front.fill()
    for _ in range(2):
        assert (await front.post()).headers["retry-after"] == "90"
    front.ingress.gate.set()
    await asyncio.gather(*waiting)
    front.clock.advance(CACHED_FOR_S)
    assert (await front.post()).status_code == 200
    assert front.ingress.asked == MOST + 2


async def test_those_whose_refusal_waits_do_not_fill_the_bound_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's proxy puts the middlewares around each other."""
    monkeypatch.setenv(MAX_IN_FLIGHT_VARIABLE, str(MOST + 1))
    ingress = Ingress()
    app = _apply_middlewares(ingress, middlewares())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        async def post(key: str) -> httpx.Response:
            return await client.post(WORK, headers={"Authorization": f"Bearer {key}"})

        served = [asyncio.create_task(post("a")) for _ in range(MOST)]
        while ingress.inside.get("a", 0) < MOST:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await post("a")).status_code == 429
        refused = [asyncio.create_task(post("a")) for _ in range(5)]
        await asyncio.sleep(0)
        served.append(asyncio.create_task(post("b")))
        while not ingress.inside.get("b"):
            assert not served[-1].done(), served[-1].result().text
            await asyncio.sleep(0)
        assert not any(task.done() for task in refused)
        assert (await post("c")).status_code == 503
        ingress.gate.set()
        assert [one.status_code for one in await asyncio.gather(*refused, *served)] == [429] * 5 + [200] * (MOST + 1)


async def test_a_key_over_its_rate_is_forgotten_when_it_may_come_again(front: Front) -> None:
    front.ingress.code, front.ingress.wait_s = TENANT_RATE, 0.5
    tasks = await front.fill("secret-key")
    assert (await front.post("secret-key")).status_code == 429
    front.ingress.gate.set()
    await asyncio.gather(*tasks)
    known = front.middleware._clients
    assert len(known) == 1 and "secret-key" not in repr(known)
    front.clock.advance(CACHED_FOR_S)
    await front.post("b")
    assert not known


async def test_another_header_beside_the_key_makes_no_other_client(front: Front) -> None:
    waiting = await front.fill("mine")
    for number in range(3):
        headers = {"x-api-key": "mine", "Authorization": f"Basic {number}"}
        assert (await front.client.post(WORK, headers=headers)).status_code == 429
    assert (front.ingress.asked, front.repeated, len(front.middleware._clients)) == (MOST + 1, 2, 1)
    front.ingress.gate.set()
    await asyncio.gather(*waiting)


async def test_two_keys_are_for_the_ingress_to_reject(front: Front) -> None:
    front.ingress.gate.set()
    both = [("Authorization", "Bearer a"), ("Authorization", "Bearer b")]
    with pytest.raises(Unauthorized):
        await front.client.post(WORK, headers=both)
    assert front.ingress.asked == 1
