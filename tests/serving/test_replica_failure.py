"""A replica that dies is told to its clients, and replaced. Last of the tests on the shared cluster: it wounds it."""

import json
import time
from typing import Any

import httpx
import psutil
import pytest

from cluster.serving import LocalCluster

pytestmark = pytest.mark.cluster

MODEL = "tiny"
LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
SHORT = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
REPLACED_WITHIN_S = 120.0


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    answer = client.get("/admin/statistics")
    return answer.json()["replicas"] if answer.status_code == 200 else []


def await_two_other_than(client: httpx.Client, dead: str) -> None:
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        living = {replica["replica"] for replica in replicas(client)}
        if len(living) == 2 and dead not in living:
            return
        time.sleep(1.0)
    raise AssertionError(f"{dead} was not replaced within {REPLACED_WITHIN_S} s")


def engines(cluster: LocalCluster) -> list[psutil.Process]:
    return [process for process in cluster.processes if process.name() == "VLLM::EngineCore"]


def stream_while(client: httpx.Client, kill: Any) -> tuple[str, bytes]:
    """Start a long stream, kill something of the replica that serves it; its id and all that the client got."""
    with client.stream("POST", "/v1/completions", json=LONG) as stream:
        pieces = stream.iter_bytes()
        text = next(pieces)
        (serving,) = [replica for replica in replicas(client) if replica["running"]]
        kill(psutil.Process(serving["pid"]))
        for piece in pieces:
            text += piece
    return serving["replica"], text


def error_at_the_end(text: bytes) -> dict[str, Any]:
    *_, event, done, end = text.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return json.loads(event.removeprefix(b"data: "))["error"]


def kill_engine(replica: psutil.Process) -> None:
    (engine,) = replica.children()
    engine.kill()


@pytest.mark.parametrize("kill", [kill_engine, psutil.Process.kill], ids=["engine", "replica"])
def test_a_death_in_a_stream_is_told_and_the_replica_replaced(client: httpx.Client, cluster: LocalCluster, kill: Any):
    dead, text = stream_while(client, kill)
    assert error_at_the_end(text)["message"]
    assert client.get("/health").status_code == 200
    await_two_other_than(client, dead)
    assert client.get("/ready").status_code == 200
    assert [client.post("/v1/completions", json=SHORT).status_code for _ in range(4)] == [200] * 4
    assert len(engines(cluster)) == 2
