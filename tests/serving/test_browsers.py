"""Web pages of other origins: which may call the server from a browser, by the configuration."""

import httpx
import pytest

from cluster.config.schema import CaesuraConfig
from cluster.http.ingress import application

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
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


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
    assert asked.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
