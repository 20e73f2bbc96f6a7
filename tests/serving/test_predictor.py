"""Forecasts in a real cluster: asked of the service, learnt from, and done without when the service is killed."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from served import served

from cluster.embedded_redis import EmbeddedRedis

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONFIG = """
http: {{port: 0}}
replicas: {{kv_cache_bytes: 16777216}}
engine: {{max_model_len: 2048, max_num_seqs: 8}}
store: {{url: "{url}"}}
predictor: {{mode: service, share_s: 0.2, deadline_s: 0.05}}
"""
CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "nothing to see here"}
USER = {"role": "user", "content": "Look around."}


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="module")
def client(redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("predictor") / "caesura.yaml"
    file.write_text(CONFIG.format(url=redis.url), encoding="utf-8")
    with served(file) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


def turn(client: httpx.Client, program: str, number: int, *, last: bool = False, **more: Any) -> httpx.Response:
    """A program's turn whose earlier ones each called `look`."""
    body = {"messages": [USER, *[CALL, RESULT] * number], "max_tokens": 4, "tools": TOOLS, "tool_choice": "none"}
    headers = {"x-session-id": program} | ({"x-dynamo-session-final": "true"} if last else {})
    return client.post(CHAT, json=body | more, headers=headers)


def run(client: httpx.Client, program: str, turns: int = 3, **more: Any) -> None:
    for number in range(turns):
        answer = turn(client, program, number, last=number == turns - 1, **more)
        assert answer.status_code == 200, answer.text


def told(client: httpx.Client) -> dict[str, Any]:
    view: dict[str, Any] = client.get("/admin/predictor").json()
    return view


def eventually(holds: Any, within_s: float = 60.0) -> None:
    """Wait until it does."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.2)


def service_process() -> psutil.Process:
    """Ray names an actor's process by its class."""
    found = [one for one in psutil.process_iter() if "ServeReplica:caesura:Predictor" in _title(one)]
    assert len(found) == 1, found
    return found[0]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
