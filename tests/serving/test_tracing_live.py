"""Programs of a real cluster as an OTLP receiver sees them: one that runs on the server, and one of a client."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from otlp_receiver import Got, Receiver, tree
from served import served

pytestmark = pytest.mark.cluster

CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def client(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    book = {
        "kind": "http",
        "description": "Book a seat.",
        "method": "POST",
        "url": f"{receiver.url}/book",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        "private_addresses": True,
    }
    config: dict[str, Any] = {
        "http": {"port": 0},
        "replicas": {"count": 1, "kv_cache_bytes": 16 << 20},
        "engine": {"max_model_len": 4096, "max_num_seqs": 32},
        "policy": {"name": "continuum"},
        "store": {"refresh_s": 0.2},
        "tools": {"defined": {"book": book}},
        "logs": {"format": "json"},
        "tracing": {"otlp_endpoint": f"{receiver.url}/v1/traces"},
    }
    path = tmp_path_factory.mktemp("traced") / "caesura.yaml"
    path.write_text(yaml.safe_dump(config))
    with served(path) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def named(spans: list[Got], name: str) -> list[Got]:
    return [span for span in spans if span.name == name]


def test_a_program_on_the_server_is_one_tree(client: httpx.Client, receiver: Receiver) -> None:
    body = {
        "model": "tiny",
        "input": "Go.",
        "tools": [{"type": "function", "name": "book", "server_side": True}],
        "tool_choices": [{"type": "function", "name": "book"}],
        "max_output_tokens": 300,
        "temperature": 0.0,
        "store": False,
    }
    answer = client.post("/v1/responses", json=body, headers={"x-session-id": "traced"})
    assert answer.status_code == 200, answer.text
    spans = receiver.wait_for("traced", *["chat tiny"] * 2, *["generate"] * 2, "execute_tool book", "hold")
    assert len({span.trace for span in spans}) == 1
    first, *_ = turns = named(spans, "chat tiny")
    [tool] = named(spans, "execute_tool book")
    assert tool.parent == first.parent, "both are their program's"
    assert first.ended_s <= tool.began_s <= tool.ended_s <= turns[1].began_s
    assert [header["traceparent"] for header in receiver.tool_headers] == [f"00-{tool.trace}-{tool.id}-01"]
    assert tree(spans, first.id) == ["queue", "generate", "hold"]
    for turn in turns:
        [generate] = [span for span in named(spans, "generate") if span.parent == turn.id]
        assert generate.part == "replica" and turn.part == "ingress"
        assert turn.began_s <= generate.began_s <= generate.ended_s <= turn.ended_s
        tokens = [span.attributes["gen_ai.usage.output_tokens"] for span in (turn, generate)]
        assert tokens[0] == tokens[1] > 0
        assert turn.events["placed"]["caesura.reason"]
    [held] = [span for span in named(spans, "hold") if span.parent == first.id]
    assert held.attributes["caesura.hold.end"] == "used"


def test_a_clients_program_has_a_root_when_its_last_turn_is_over(client: httpx.Client, receiver: Receiver) -> None:
    for number in range(2):
        body = {"model": "tiny", "prompt": [1, 2, 3 + number], "max_tokens": 4, "stream": bool(number)}
        headers = {"x-dynamo-session-id": "own", "x-dynamo-session-final": "true" if number else "false"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    spans = receiver.wait_for("own", "invoke_agent tiny", *["generate"] * 2)
    [root] = named(spans, "invoke_agent tiny")
    assert (root.parent, root.attributes["caesura.turns"], root.attributes["caesura.turns_failed"]) == ("", 2, 0)
    assert [span.parent for span in named(spans, "text_completion tiny")] == [root.id] * 2


def test_a_client_finds_its_turn_in_its_own_trace(client: httpx.Client, receiver: Receiver) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    headers = {"x-program-id": "guest", "traceparent": CLIENTS}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    spans = receiver.wait_for("guest", "text_completion tiny", "generate")
    [turn] = named(spans, "text_completion tiny")
    assert (turn.trace, turn.parent) == tuple(CLIENTS.split("-")[1:3])
    assert len(turn.links) == 1


def test_a_line_of_the_log_says_whose_request_it_is_about(client: httpx.Client) -> None:
    program, request = f"log-{uuid4().hex}", uuid4().hex
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "vllm_xargs": {"session_id": "another"}}
    headers = {"x-program-id": program, "x-request-id": request}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    deadline = time.monotonic() + 10.0
    while not (lines := lines_with(request)):
        assert time.monotonic() < deadline, "nothing was logged of the request"
        time.sleep(0.2)
    [line] = lines
    assert "different things" in line["message"]
    assert (line["part"], line["level"], line["request"]) == ("ingress", "WARNING", request)
    assert line["program"] in (f"default/{program}", "default/another")


def lines_with(text: str) -> list[dict[str, Any]]:
    """Of Ray Serve's logs of this machine; each has to be JSON."""
    logs = Path("/tmp/ray").glob("session_[0-9]*/logs/serve/*.log")
    return [json.loads(line) for log in logs for line in log.read_text(errors="replace").splitlines() if text in line]
