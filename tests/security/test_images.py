"""Images of requests: fetched through the guard of tools' addresses, bounded, and named where they are wrong."""

import asyncio
import base64
import gzip
import ipaddress
import json
import threading
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image
from starlette.requests import Request

from cluster.api import image_bounds
from cluster.api.images import images_of
from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest
from cluster.http import images
from cluster.http.images import MAX_IMAGES, ImageReader
from cluster.http.requests import TurnReader
from replicas.chat_text import ChatText
from tests.waiting import WITHIN_S, until
from tools_runtime import addresses
from tools_runtime.addresses import RESOLVERS, Address, Resolver

Handler = Callable[[httpx.Request], httpx.Response]
GZIPPED = gzip.compress(b"x" * 1000)


def png(width: int = 4, height: int = 4) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), (200, 10, 10)).save(file, "PNG")
    return file.getvalue()


def data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def chat(*urls: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, *parts]}]}


class Names(Resolver):
    """Every name ends at this address, unless it is one that is not public."""

    async def public_address(self, host: str, port: int) -> str:
        return "93.184.216.34" if host.endswith(".example") else await super().public_address(host, port)


@pytest_asyncio.fixture
async def reader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Handler], ImageReader]]:
    made: list[ImageReader] = []

    def make(handler: Handler, max_bytes: int = 1 << 20) -> ImageReader:
        one = ImageReader(max_bytes, Names)
        one._client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
        made.append(one)
        return one

    yield make
    for one in made:
        await one.aclose()


def answer(content: bytes, kind: str = "image/png", status: int = 200, **headers: str) -> Handler:
    return lambda request: httpx.Response(status, content=content, headers={"content-type": kind, **headers})


async def test_images_behind_urls_are_put_into_the_body(reader: Callable[[Handler], ImageReader]) -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=png(), headers={"content-type": "image/png"})

    body = chat("https://a.example/x.png", data(png()))
    response = {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": "http://b.example/y"}]},
            {"type": "function_call_output", "output": [{"type": "input_image", "image_url": data(png())}]},
        ]
    }
    await reader(handler).read(body, "t")
    await reader(handler).read(response, "t")
    assert body == chat(data(png()), data(png()))
    assert response["input"][0]["content"][0]["image_url"] == data(png())
    assert [(one.url.host, one.headers["host"]) for one in seen] == [
        ("93.184.216.34", "a.example"),
        ("93.184.216.34", "b.example"),
    ]
    assert seen[0].extensions["sni_hostname"] == "a.example"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/x",
        "http://0x7f000001/x",
        "http://[64:ff9b::a00:1]/x",
    ],
)
async def test_private_addresses_are_not_reached(reader: Callable[[Handler], ImageReader], url: str) -> None:
    one = reader(answer(png()))
    for body in (chat(url), chat("https://a.example/redirect")):
        if "redirect" in str(body):
            one._client = httpx.AsyncClient(
                transport=httpx.MockTransport(lambda request: httpx.Response(302, headers={"location": url}))
            )
        with pytest.raises(BadRequest, match="not a public address; it may not be reached") as refused:
            await one.read(body, "t")
        assert refused.value.param == "messages.0.content.1.image_url.url"


@pytest.mark.parametrize(
    ("body", "handler", "status", "message"),
    [
        (chat("https://a.example/x"), answer(b"<html>", "text/html"), 400, "status 200 and type 'text/html'"),
        (chat("https://a.example/x"), answer(b"", status=404), 400, "status 404"),
        (chat("https://a.example/x"), answer(GZIPPED, **{"content-encoding": "gzip"}), 400, "compresses it"),
        (chat("https://a.example/x"), answer(b"no image"), 400, "no image of a known format"),
        (chat("https://a.example/x"), answer(b"", status=302, location="file:///etc/passwd"), 400, "another scheme"),
        (chat("https://a.example/x"), answer(b"", status=302, location="/x"), 400, "redirects"),
        (chat("file:///etc/passwd"), answer(b""), 400, "must be an http"),
        (chat("ftp://a.example/x"), answer(b""), 400, "must be an http"),
        (chat(data(b"x", "text/html")), answer(b""), 400, "must be an http"),
        (chat("data:image/png;base64,***"), answer(b""), 400, "not base64"),
        (chat(data(png() + b"x" * (1 << 20))), answer(b""), 413, "all together"),
        (chat(*[data(png())] * (MAX_IMAGES + 1)), answer(b""), 400, "at most 32"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(
    reader: Callable[[Handler], ImageReader], body: Any, handler: Handler, status: int, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        await reader(handler).read(body, "t")
    assert refused.value.status == status
    assert (refused.value.param or "").startswith("messages.0.content.")


async def test_a_small_file_of_many_pixels(
    reader: Callable[[Handler], ImageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_bounds, "MAX_PIXELS", 99)
    await reader(answer(b"")).read(chat(data(png(9, 11))), "t")
    with pytest.raises(BadRequest, match="100 pixels"):
        await reader(answer(b"")).read(chat(data(png(10, 10))), "t")


async def test_a_fetched_image_is_bounded_while_it_is_read(
    reader: Callable[[Handler], ImageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1000)
    with pytest.raises(BadRequest, match="more than 1000 bytes"):
        await reader(answer(b"x" * 5000)).read(chat("https://a.example/x"), "t")


async def test_all_images_of_a_request_are_bounded_while_they_are_read(
    reader: Callable[[Handler], ImageReader],
) -> None:
    one = reader(answer(b"x" * 5000))
    one._max_bytes = 12_000
    with pytest.raises(BadRequest, match="all together 12000") as refused:
        await one.read(chat(*(f"https://a.example/{number}" for number in range(3))), "t")
    assert refused.value.status == 413


class Hanging:
    """A server that never answers, and counts the requests that wait for it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0
        self.busy = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if "gone" in request.headers["host"]:
            return httpx.Response(404)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        if self.waiting == images.FETCHED_AT_ONCE:
            self.busy.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1
        raise AssertionError


async def test_no_fetch_outlives_its_request(reader: Callable[[Handler], ImageReader]) -> None:
    server = Hanging()
    one = reader(server)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="status 404"):
        await one.read(chat("https://gone.example/x", *(f"https://a.example/{n}" for n in range(4))), "t")
    assert server.waiting == 0


async def test_a_tenant_whose_servers_hang_delays_no_other(reader: Callable[[Handler], ImageReader]) -> None:
    server = Hanging()
    one = reader(server)  # type: ignore[arg-type]
    urls = [f"https://a.example/{number}" for number in range(MAX_IMAGES)]
    slow = [asyncio.create_task(one.read(chat(*urls), "slow")) for _ in range(2)]
    await server.busy.wait()
    with pytest.raises(BadRequest, match="status 404"):  # it has reached its server
        await one.read(chat("https://gone.example/x"), "other")
    assert server.most == images.FETCHED_AT_ONCE
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert server.waiting == 0


async def test_a_tenant_whose_name_servers_hang_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = list[str](), threading.Event()

    def look_up(host: str, port: int) -> list[Address]:
        asked.append(host)
        if host != "fast.example":
            answers.wait(WITHIN_S)
        return [ipaddress.ip_address("93.184.216.34")]

    monkeypatch.setattr(addresses, "_look_up", look_up)
    one = ImageReader(1 << 20)
    one._client = httpx.AsyncClient(transport=httpx.MockTransport(answer(png())))
    body = chat("https://fast.example/x")
    urls = [f"https://{number}.example/x" for number in range(images.FETCHED_AT_ONCE)]
    try:
        for _ in range(2):  # what is looked up for a request goes on when its client has left
            slow = asyncio.create_task(one.read(chat(*urls), "slow"))
            await until(lambda: len(asked) == RESOLVERS)
            await asyncio.sleep(0.05)
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
        async with asyncio.timeout(WITHIN_S / 4):
            await one.read(body, "other")
    finally:
        answers.set()
        await one.aclose()
    assert body == chat(data(png()))
    assert len(asked) == RESOLVERS + 1


async def test_bodies_without_images_are_left_as_they_are(reader: Callable[[Handler], ImageReader]) -> None:
    for body in ({}, {"messages": "no list"}, {"messages": [{"content": [5, {"image_url": None}]}]}, {"input": "text"}):
        await reader(answer(b"")).read(body, "t")
    wrong = chat(5)
    await reader(answer(b"")).read(wrong, "t")  # the replica names it
    assert wrong == chat(5)


@pytest.mark.parametrize(("fields", "fetched"), [({"vision_config": {"layers": 2}}, True), ({"layers": 2}, False)])
async def test_only_models_that_see_are_given_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], fetched: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = CaesuraConfig.model_validate({"model": {"id": "m", "source": str(tmp_path)}})
    turns, seen = TurnReader(config), []

    async def read(body: Any, tenant: str) -> None:
        seen.append(body)

    monkeypatch.setattr(turns._images, "read", read)
    body = json.dumps({"model": "m", **chat("https://a.example/x")}).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    await turns.identified(Request(scope, receive))
    assert bool(seen) == fetched
    await turns.aclose()


async def test_images_of_conversations_and_of_token_counts_are_fetched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica would refuse their URLs, for ever in a conversation."""
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"layers": 2}}))
    turns, seen = TurnReader(CaesuraConfig.model_validate({"model": {"id": "m", "source": str(tmp_path)}})), []

    async def read(body: Any, tenant: str) -> None:
        seen.append([image.path for image in images_of(body)])

    monkeypatch.setattr(turns._images, "read", read)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "https://a.example/x"}]}
    for body in ({"items": [item]}, {"model": "m", **chat("https://a.example/x")}):

        async def receive(body: Any = body) -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        await (turns.items if "items" in body else turns.body)(Request(scope, receive))
    assert seen == [["items.0.content.0.image_url"], ["messages.0.content.1.image_url.url"]]
    await turns.aclose()


def test_a_replica_fetches_nothing() -> None:
    text = ChatText.__new__(ChatText)
    text._sees = True
    text.check_parts(chat(data(png())))
    for url in ("https://a.example/x", "file:///etc/passwd"):
        with pytest.raises(BadRequest) as refused:
            text.check_parts(chat(url))
        assert refused.value.param == "messages.0.content.1.image_url.url"
    video = {"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}}
    with pytest.raises(BadRequest, match="'video_url' are not read here"):
        text.check_parts({"messages": [{"role": "user", "content": [video]}]})
    text._sees = False
    text.check_parts(chat("https://a.example/x"))  # it becomes a note
    with pytest.raises(BadRequest, match="this model reads no images") as refused:
        text.check_parts(chat(data(png())), required=True)
    assert refused.value.param == "messages.0.content.1.image_url.url"
