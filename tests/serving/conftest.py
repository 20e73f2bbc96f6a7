"""One real local cluster for all tests of this directory that ask for it: two replicas of the tiny model, little KV."""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from cluster.config.schema import CaesuraConfig
from cluster.local.cluster import LocalCluster
from cluster.offline.demo.tools import notes_server
from cluster.offline.demo.tools import tools as demo_tools
from tests.serving.desk import Desk
from tests.serving.served import EXACT
from tests.serving.tool_site import FLOOD_CAP_BYTES, ToolSite

KV_BYTES = 32 << 20
CONTEXT_TOKENS: int = EXACT["max_model_len"]


BOOKING = {
    "type": "object",
    "properties": {"seats": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["seats"],
    "additionalProperties": False,
}

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def cluster_config(**sections: dict[str, Any]) -> CaesuraConfig:
    """Small, quick to answer, on a free port."""
    base: dict[str, dict[str, Any]] = {
        "http": {"port": 0, "max_concurrent_requests": 48, "max_body_bytes": 1 << 20},
        "replicas": {"count": 2, "kv_cache_bytes": KV_BYTES},
        "engine": EXACT,
        "policy": {"name": "continuum"},
        "slo": {"slowdown": 20.0},
        "redis": {"refresh_s": 0.2},
    }
    return CaesuraConfig.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def plain_tools(site: ToolSite) -> dict[str, Any]:
    """Tools of the site that take no arguments and give trouble."""
    shared = {"kind": "http", "method": "POST", "parameters": NOTHING, "private_addresses": True}
    return {
        "obey": {**shared, "url": f"{site.url}/obey"},
        "flood": {**shared, "url": f"{site.url}/flood", "output_cap_bytes": FLOOD_CAP_BYTES},
        "deluge": {**shared, "url": f"{site.url}/flood"},
        "lines": {**shared, "url": f"{site.url}/lines"},
        "hang": {**shared, "url": f"{site.url}/hang", "deadline_s": 2.0},
    }


@pytest.fixture(scope="package")
def site() -> Iterator[ToolSite]:
    """The server behind the tool `book`."""
    site = ToolSite()
    yield site
    site.close()


@pytest.fixture(scope="package")
def notes_url() -> Iterator[str]:
    """A real MCP server."""
    with notes_server() as url:
        yield url


@pytest.fixture(scope="package")
def cluster(site: ToolSite, notes_url: str) -> Iterator[LocalCluster]:
    """The shared cluster; afterwards no process of it is left."""
    book = {
        "kind": "http",
        "description": "Book seats.",
        "method": "POST",
        "url": f"{site.url}/book",
        "parameters": BOOKING,
        "private_addresses": True,
    }
    notes = {"note": {"type": "string"}, "priority": {"enum": ["low", "medium", "high"]}}
    rest = {
        "kind": "http",
        "description": "Rest.",
        "method": "POST",
        "url": f"{site.url}/book",
        "parameters": {"type": "object", "properties": notes, "additionalProperties": False},
        "private_addresses": True,
    }
    tools = demo_tools(notes_url)
    tools["defined"] |= {"book": book, "rest": rest, **plain_tools(site)}
    tools |= {"request_kinds": ["mcp"], "request_networks": ["127.0.0.0/8"]}
    local = LocalCluster(cluster_config(tools=tools, programs={"lease_s": 2.0}))
    with local:
        yield local
    assert local.processes == []


@pytest.fixture(scope="package")
def client(cluster: LocalCluster) -> Iterator[httpx.Client]:
    """A client of the shared cluster."""
    with httpx.Client(base_url=cluster.url, timeout=60, verify=False) as http:
        yield http


@pytest.fixture(scope="package")
def openai(cluster: LocalCluster) -> Iterator[OpenAI]:
    """OpenAI's client of the shared cluster."""
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A server that only this test knows."""
    server = Desk()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _no_cluster_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "RAY_ADDRESS" not in os.environ
