"""A replica that dies is replaced, its streams go on elsewhere. Last of the tests on the shared cluster: it wounds it.

The texts are greedy, so that a stream over two replicas can be compared with one that nothing happened to.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from cluster.local.cluster import LocalCluster

pytestmark = pytest.mark.cluster

MODEL = "tiny"
TOKENS = 1500
"""Of a stream: enough to be in the middle of it when something is killed."""
SHORT = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
REPLACED_WITHIN_S = 180.0
NAMED = {"type": "function", "function": {"name": "look"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

Kill = Callable[[psutil.Process], None]


def completion(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    return "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}, **more}


def chat(content: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    return "/v1/chat/completions", {**body, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **more}


def message(content: str, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
    numbers = {"type": "array", "items": {"enum": [0, 1, 2, 3]}, "minItems": TOKENS}
    schema = {"type": "object", "properties": {"numbers": numbers}, "required": ["numbers"]}
    long = {"output_config": {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}}
    return "/v1/messages", {**body, **long, "max_tokens": TOKENS, "stream": True, **more}


STREAMS = [
    completion("Once"),
    completion("Twice", return_token_ids=True, stop=["never there"]),
    chat("Tell me."),
    chat("Look.", tools=[LOOK], tool_choice="auto"),
    message("Say it."),
    message("Run it.", tools=[{"name": "calculator", "server_side": True}], tool_choice={"type": "none"}),
]
"""The last one is a program of the cluster."""
ENDS = ("data: [DONE]", 'data: {"type":"message_stop"}')


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    answer = client.get("/admin/statistics")
    return answer.json()["replicas"] if answer.status_code == 200 else []


def at_work(client: httpx.Client, *killed: int) -> dict[str, Any]:
    """The replica on which most runs, of those that live."""
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        busy = [one for one in replicas(client) if one["running"] and one["pid"] not in killed]
        if busy:
            return max(busy, key=lambda one: int(one["running"]))
        time.sleep(0.05)
    raise AssertionError("no replica is at work")


def await_two_other_than(client: httpx.Client, *dead: str) -> None:
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        living = {replica["replica"] for replica in replicas(client)}
        if len(living) == 2 and not living & set(dead):
            return
        time.sleep(1.0)
    raise AssertionError(f"{dead} were not replaced within {REPLACED_WITHIN_S} s")


def await_no_metrics_of(client: httpx.Client, dead: str) -> None:
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        page = client.get("/metrics").text
        if "vllm:" in page and f'ReplicaId="{dead}"' not in page:
            return
        time.sleep(1.0)
    raise AssertionError(f"the metrics of {dead} are still exported")


def engines(cluster: LocalCluster) -> list[psutil.Process]:
    return [process for process in cluster.processes if process.name() == "VLLM::EngineCore"]


class Stream:
    """A stream in a thread of its own."""

    def __init__(self, client: httpx.Client, threads: ThreadPoolExecutor, request: tuple[str, dict[str, Any]]) -> None:
        self.begun = Event()
        self._client, (self._path, self._body) = client, request
        self._read = threads.submit(self._all)

    def _all(self) -> list[dict[str, Any]]:
        events, lines = [], []
        with self._client.stream("POST", self._path, json=self._body) as stream:
            for line in filter(None, stream.iter_lines()):
                lines.append(line)
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    self.begun.set()
        assert lines[-1] in ENDS
        return events

    def events(self) -> list[dict[str, Any]]:
        """All of it."""
        return self._read.result(REPLACED_WITHIN_S)

    def told(self) -> dict[str, Any]:
        """What a client makes of it."""
        told: dict[str, Any] = {"text": "", "ids": [], "calls": "", "ends": [], "heads": set(), "tokens": []}
        for event in self.events():
            assert "error" not in event, event
            (_take_anthropics if self._path == "/v1/messages" else _take_openais)(told, event)
        assert len(told.pop("heads")) == 1, "one id and one time"
        return told


def _take_openais(told: dict[str, Any], event: dict[str, Any]) -> None:
    told["heads"].add((event["id"], event["created"]))
    told["tokens"] += [event["usage"]["completion_tokens"]] if event.get("usage") else []
    for choice in event["choices"]:
        delta = choice.get("delta") or {}
        told["text"] += choice.get("text") or delta.get("content") or ""
        told["ids"] += choice.get("token_ids") or []
        told["calls"] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
        told["ends"] += [choice["finish_reason"]] if choice.get("finish_reason") else []


def _take_anthropics(told: dict[str, Any], event: dict[str, Any]) -> None:
    match event["type"]:
        case "message_start":
            told["heads"].add(event["message"]["id"])
        case "content_block_delta":
            told["text"] += event["delta"].get("text", "")
        case "message_delta":
            told["tokens"].append(event["usage"]["output_tokens"])
            told["ends"].append(event["delta"]["stop_reason"])


@contextmanager
def streams(client: httpx.Client, requests: list[tuple[str, dict[str, Any]]]) -> Iterator[list[Stream]]:
    """All begun."""
    with ThreadPoolExecutor(len(requests)) as threads:
        made = [Stream(client, threads, request) for request in requests]
        for stream in made:
            assert stream.begun.wait(60.0)
        yield made


@pytest.fixture(scope="module")
def undisturbed(client: httpx.Client) -> list[dict[str, Any]]:
    with streams(client, STREAMS) as whole:
        told = [stream.told() for stream in whole]
    assert {end for one in told for end in one["ends"]} <= {"length", "max_tokens"}, "too short to be interrupted"
    return told


def kill_engine(replica: psutil.Process) -> None:
    [engine] = [child for child in replica.children() if child.name().startswith("VLLM")]
    engine.kill()


@pytest.mark.parametrize("kill", [kill_engine, psutil.Process.kill], ids=["engine", "replica"])
def test_streams_go_on_and_the_replica_is_replaced(
    client: httpx.Client, cluster: LocalCluster, undisturbed: list[dict[str, Any]], kill: Kill
) -> None:
    run = {"model": MODEL, "input": "Go on.", "max_output_tokens": 600, "temperature": 0.0, "background": True}
    alone = client.post("/v1/responses", json=run).json()
    alone = ended(client, alone["id"])
    whole = {"stream": False, "stream_options": None}
    with streams(client, STREAMS) as open_streams, ThreadPoolExecutor(1) as threads:
        response = client.post("/v1/responses", json=run).json()
        path, body = completion("Whole", **whole)
        answer = threads.submit(client.post, path, json=body, timeout=REPLACED_WITHIN_S)
        victim = at_work(client)
        kill(psutil.Process(victim["pid"]))
        assert [stream.told() for stream in open_streams] == undisturbed
        assert answer.result(REPLACED_WITHIN_S).json()["usage"]["completion_tokens"] == TOKENS
        assert texts(ended(client, response["id"])) == texts(alone)
    assert client.get("/health").status_code == 200
    await_two_other_than(client, victim["replica"])
    await_no_metrics_of(client, victim["replica"])
    assert client.get("/ready").status_code == 200
    assert [client.post("/v1/completions", json=SHORT).status_code for _ in range(4)] == [200] * 4
    assert len(engines(cluster)) == 2


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        told = client.get(f"/v1/responses/{response_id}").json()
        if told["status"] not in ("queued", "in_progress"):
            return dict(told)
        time.sleep(0.1)
    raise AssertionError(f"{response_id} did not end")


def texts(response: dict[str, Any]) -> tuple[str, list[str]]:
    """An attempt that was lost would leave an incomplete item of its own."""
    contents = [part["text"] for item in response["output"] for part in item.get("content", ())]
    return response["status"], contents


def test_a_request_under_which_two_replicas_die_is_refused_and_a_stream_that_cannot_go_on_says_why(
    client: httpx.Client,
) -> None:
    """Both are turns of one program, so that they run on one replica. It dies first, while the other one lives."""
    together = {"vllm_xargs": {"session_id": "together"}}
    path, poison = completion("Poison", **together)
    killed: list[dict[str, Any]] = []
    with streams(client, [completion("Chances", presence_penalty=0.1, **together), (path, poison)]) as [ends, stream]:
        for running in (2, 1):
            killed.append(at_work(client, *(one["pid"] for one in killed)))
            assert killed[-1]["running"] == running
            kill_engine(psutil.Process(killed[-1]["pid"]))
            assert "presence_penalty" in ends.events()[-1]["error"]["message"]
        error = stream.events()[-1]["error"]
    assert error["code"] == "quarantined"
    refused = client.post(path, json={**poison, "user": "somebody else", "stream": False})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "quarantined")
    await_two_other_than(client, *(one["replica"] for one in killed))
    assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert client.post(path, json=poison).status_code == 422
