"""Web pages of other origins: which may call the server from a browser, by the configuration."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config.schema import CaesuraConfig
from cluster.http.application import application
from cluster.http.browsers import cors
from cluster.proxy.middleware import guarded

PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-session-id",
}


def client_of(*origins: str) -> httpx.AsyncClient:
    async def handler() -> dict[str, str]:
        return {"status": "alive"}

    config = CaesuraConfig.model_validate({"http": {"cors_origins": origins}})
    transport = httpx.ASGITransport(application(config, lambda name: handler))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
async def test_a_page_of_a_configured_origin_may_call_and_read_the_ids(origins: tuple[str, ...]) -> None:
    async with client_of(*origins) as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await client.get("/health", headers={"origin": PAGE})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "x-session-id" in asked.headers["access-control-allow-headers"]
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id", "x-caesura-tools-left-out", "x-ratelimit-remaining-requests"} <= set(exposed)


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 503), ({"x-broken": b"\xff"}, 400)], ids=["too many in flight", "a broken header"]
)
async def test_a_page_can_read_a_rejection_in_front_of_the_application(headers: Any, status: int) -> None:
    async with own_server("127.0.0.1", PAGE, most=0 if status == 503 else 8) as client:
        answer = await client.post("/v1/chat/completions", headers={"origin": PAGE, **headers})
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        own = await client.post("/v1/chat/completions", headers={"origin": "https://other.example.com", **headers})
    assert (answer.status_code, own.status_code, asked.status_code) == (status, status, 200)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers
    assert "access-control-allow-origin" not in own.headers


async def test_an_answer_of_the_servers_own_has_the_headers_once() -> None:
    async with own_server("127.0.0.1", PAGE) as client:
        answer = await client.post("/v1/programs/p/cancel", headers={"origin": PAGE})
    assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
    assert answer.headers.get_list("vary") == ["Origin"]


async def test_other_pages_may_not() -> None:
    async with client_of("https://other.example.com") as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await client.get("/health", headers={"origin": PAGE})
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


async def test_without_origins_no_page_of_another_origin_may() -> None:
    async with client_of() as client:
        asked = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await client.get("/health", headers={"origin": PAGE})
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def own_server(host: str | None, *origins: str, keys: str | None = None, most: int = 8) -> httpx.AsyncClient:
    """A client of an ingress with its own server, which has ``most`` requests in flight at most."""

    async def handler() -> dict[str, str]:
        return {"status": "done"}

    config = CaesuraConfig.model_validate({"http": {"cors_origins": origins}, "auth": {"file": keys}})
    transport = httpx.ASGITransport(guarded(application(config, lambda name: handler, host), most, cors(origins)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), (PAGE, 403), ("null", 403), ("http://localhost:3000", 403), ("http://localhost:8000", 200)],
)
async def test_a_foreign_page_has_no_effect_on_a_server_without_keys(origin: str | None, status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    async with own_server("127.0.0.1") as client:
        answer = await client.post("/v1/programs/p/cancel", headers=headers)
    assert answer.status_code == status
    assert status == 200 or "http.cors_origins" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origin", [PAGE, "null"])
async def test_allowed_pages_may_call_it(origin: str) -> None:
    async with own_server("127.0.0.1", origin) as client:
        assert (await client.post("/v1/programs/p/cancel", headers={"origin": origin})).status_code == 200
    async with own_server("127.0.0.1", "*") as client:
        assert (await client.post("/v1/programs/p/cancel", headers={"origin": origin})).status_code == 200


@pytest.mark.parametrize(
    ("host", "called", "status"),
    [
        ("127.0.0.1", "localhost:8000", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("127.0.0.1", "evil.example.com:8000", 403),
        ("localhost", "127.0.0.1.evil.example.com", 403),
        ("127.0.0.1", "[::1", 403),
        ("127.0.0.1", "", 200),
        ("0.0.0.0", "service.namespace:8000", 200),
        (None, "service.namespace:8000", 200),
    ],
)
async def test_a_server_on_loopback_has_no_other_name(host: str | None, called: str, status: int) -> None:
    async with own_server(host) as client:
        answer = await client.post("/v1/programs/p/cancel", headers={"host": called})
    assert answer.status_code == status
    assert status == 200 or "set auth.file or http.host" in answer.json()["error"]["message"]


async def test_where_keys_are_needed_a_page_has_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []\n")
    async with own_server("127.0.0.1", keys=str(keys)) as client:
        answer = await client.post("/v1/programs/p/cancel", headers={"origin": PAGE, "host": "any"})
    assert answer.status_code == 401
