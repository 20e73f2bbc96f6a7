"""One word is in every secret of the cluster; after everything has gone right and wrong, it is nowhere to be found."""

import json
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil
import pytest
import redis

from tests.faults.outsiders.guarded import KEYS, SECRET, Guarded
from tests.serving.served import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TRACES_WITHIN_S = 20.0


def exercise(client: httpx.Client) -> list[str]:
    """What is told to clients: of turns, of tools that work, fail and are not there, and of keys that open nothing."""
    told: list[str] = []

    def note(answer: httpx.Response) -> None:
        told.append(f"{answer.status_code} {dict(answer.headers)} {answer.text}")

    note(client.post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}))
    note(client.post(CHAT, json={"model": "tiny", "messages": 5}))
    for name in ("book", "fail", "nobody"):
        tools = [{"type": "function", "name": name, "server_side": True}]
        body = {"model": "tiny", "input": "Go", "max_output_tokens": 200, "max_turns": 3, "tools": tools}
        forced = {"tool_choice": "none", "tool_choices": [{"type": "function", "name": name}]}
        note(client.post(RESPONSES, json={**body, **forced}, headers={"x-session-id": f"canary-{name}"}))
        note(client.get(f"/v1/programs/canary-{name}?include=token_ids"))
    server = {
        "type": "mcp",
        "server_label": "s",
        "server_url": f"http://user:{SECRET}@127.0.0.1:9/{SECRET}",
        "authorization": SECRET,
        "headers": {"x-secret": SECRET},
    }
    note(client.post(RESPONSES, json={"model": "tiny", "input": "Go", "max_output_tokens": 4, "tools": [server]}))
    for headers in (
        {"Authorization": f"Bearer {SECRET}"},
        {"Authorization": f"Basic {SECRET}"},
        {"x-api-key": SECRET},
    ):
        note(httpx.get(f"{client.base_url}/v1/models", headers=headers))
        note(client.get("/admin/statistics", headers=headers))
    return told


def stored(url: str, password: str) -> str:
    store = redis.Redis.from_url(url)
    dumped = [repr((key, store.dump(key))) for key in store.scan_iter()]
    values = [repr(_value(store, key)) for key in store.scan_iter()]
    store.close()
    return "\n".join([*dumped, *values]).replace(password, "PASSWORD")


def _value(store: Any, key: bytes) -> Any:
    reads = {b"hash": store.hgetall, b"string": store.get, b"stream": store.xrange}
    read = reads.get(store.type(key))
    return None if read is None else read(key)


def test_no_secret_is_told(guarded: Guarded, promised: Any) -> None:
    password = guarded.redis.url.partition(":")[2].partition("@")[0].rpartition(":")[2]
    assert len(password) > 20
    with guarded.client("acme") as client:
        told = exercise(client)
    assert all(SECRET in key for key in KEYS.values()) and len(guarded.sink.received.get("/book", [])) > 0
    with guarded.client("ops") as most:
        pages = [
            most.get(path).text for path in ("/admin/statistics", "/admin/router", "/admin/predictor", "/admin/policy")
        ]
        metrics = most.get("/metrics").text
    give_up = time.monotonic() + TRACES_WITHIN_S
    while not guarded.sink.received.get("/v1/traces") and time.monotonic() < give_up:
        time.sleep(0.2)
    traces = b"\n".join(guarded.sink.received.get("/v1/traces", [])).decode(errors="replace")
    assert "caesura_requests" in metrics and traces
    places = {
        "errors and answers": told,
        "admin pages": pages,
        "metrics": [metrics],
        "traces": [traces],
        "logs": [f"{path}: {text}" for path, text in guarded.logs().items()],
        "records in Redis": [stored(guarded.redis.url, password)],
        "command lines": [" ".join(process.cmdline()) for process in guarded.family if psutil.pid_exists(process.pid)],
        "complaints of a configuration": complaints(),
    }
    assert sum(map(len, places["logs"])) > 10_000
    for place, texts in places.items():
        found = [_around(text, secret) for text in texts for secret in (SECRET, password) if secret in text]
        assert not found, (place, found[:3])
        promised("secrets as canaries", f"found in {place}", len(found), exactly=0)


def _around(text: str, secret: str) -> str:
    at = text.index(secret)
    return text[:120] + " ... " + text[max(0, at - 200) : at + 20]


def complaints() -> list[str]:
    """What `caesura config check` says of wrong values that hold secrets."""
    wrong = {
        "redis.url": f"reddis://:{SECRET}@redis:6379/0",
        "redis.urls": f"redis://:{SECRET}@redis:6379/0",
        "tracing.otlp_endpoint": f"ftp://user:{SECRET}@collector/",
        "tools.defined": {"t": {"kind": "http", "url": f"http://user:{SECRET}@a/", "headers": {"Authorization": 5}}},
    }
    flags = [flag for key, value in wrong.items() for flag in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-c", "from cluster.cli import main; main()", "config", "check", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and all(key in said for key in wrong), said
    return [said]
