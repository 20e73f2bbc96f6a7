"""One real cluster for predictions and for traces.

Predictions are asked of the service, learnt from, and done without when the service is killed. Programs are seen as an
OTLP receiver sees them: one that runs on the server, and one of a client.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml

from cluster.local.embedded_redis import EmbeddedRedis
from tests.otlp_receiver import Got, Receiver, tree
from tests.serving.served import served
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
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
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def client(
    redis: EmbeddedRedis, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
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
        "replicas": {"kv_cache_bytes": 16 << 20},
        "engine": {"max_model_len": 4096, "max_num_seqs": 32},
        "policy": {"name": "continuum"},
        "redis": {"url": redis.url, "refresh_s": 0.2},
        "predictor": {"mode": "service", "sync_interval_s": 0.2, "deadline_s": 0.5},
        "tools": {"defined": {"book": book}},
        "logs": {"format": "json"},
        "tracing": {"otlp_endpoint": f"{receiver.url}/v1/traces"},
    }
    file = tmp_path_factory.mktemp("predictor") / "caesura.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
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


def test_turns_are_forecast_by_the_service_and_learnt_from(client: httpx.Client) -> None:
    for number in range(4):
        run(client, f"plain-{number}")
        run(client, f"stream-{number}", stream=True)
    wait_until(lambda: told(client)["compared"]["output_tokens"] >= 24)
    view = told(client)
    assert view["answered"]["service"] > 0
    assert view["compared"]["pause_s"] >= 16
    assert view["unread"] == 0
    # Whether a turn's answer is whole or a stream, what it generated is known: four tokens, each time.
    wait_until(lambda: told(client)["local"]["writers"] == 1)
    for number in range(3):
        run(client, f"again-{number}")
    before = told(client)
    run(client, "close", turns=6)
    after = told(client)
    compared = after["compared"]["output_tokens"] - before["compared"]["output_tokens"]
    errors = [
        view["mean_absolute_error"]["output_tokens"] * view["compared"]["output_tokens"] for view in (before, after)
    ]
    assert compared == 6
    assert (errors[1] - errors[0]) / compared < 30


def test_turns_of_programs_that_the_cluster_runs_are_forecast_and_learnt_from(client: httpx.Client) -> None:
    before = told(client)
    answer = client.post("/v1/responses", json={"model": "tiny", "input": "Look around.", "max_output_tokens": 5})
    assert answer.status_code == 200, answer.text
    after = told(client)
    assert after["compared"]["output_tokens"] == before["compared"]["output_tokens"] + 1
    assert sum(after["answered"].values()) == sum(before["answered"].values()) + 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x" * 900_000}]},
        {"messages": [USER], "tools": [{"function": {"name": "\ud800" * 300}}, None, 3]},
        {"messages": "no"},
        {"messages": [[USER]]},
    ],
)
def test_whatever_a_client_sends_a_forecast_is_never_what_fails(client: httpx.Client, body: dict[str, Any]) -> None:
    headers = {"x-session-id": "odd", "content-type": "application/json"}
    answer = client.post(CHAT, content=json.dumps({"max_tokens": 2, **body}), headers=headers)
    assert answer.status_code in (200, 400, 422), answer.text
    assert told(client)["unread"] == 0
    assert turn(client, "sane", 0).status_code == 200


def test_a_run_in_which_the_service_is_killed_serves_every_program_and_loses_nothing(
    client: httpx.Client, redis: EmbeddedRedis
) -> None:
    run(client, "before")
    wait_until(lambda: told(client)["queued"] == 0 and told(client)["local"]["writers"] >= 1)
    service = service_process()
    before = told(client)["answered"]
    for number in range(12):
        if number == 6:
            service.kill()
        run(client, f"through-{number}")
    after = told(client)["answered"]
    assert sum(after.values()) - sum(before.values()) == 36
    assert sum(n for kind, n in after.items() if kind != "service") > sum(
        n for kind, n in before.items() if kind != "service"
    )
    assert "nobody" not in after
    served_before = after.get("service", 0)

    def served_again() -> bool:
        run(client, f"later-{time.monotonic()}", turns=1)
        return bool(told(client)["answered"]["service"] > served_before)

    wait_until(served_again, within_s=120.0)
    # The part of the service that was killed is still read.
    wait_until(lambda: told(client)["local"]["writers"] >= 2)


# --- traces ----------------------------------------------------------------------------------------------------


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
    # Whether the hold outlasts the tool depends on the durations that the tests before this one have taught the policy.
    assert held.attributes["caesura.hold.end"] in {"used", "expired"}


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
    [line] = wait_until(lambda: lines_with(request), "nothing was logged of the request", poll_s=0.2)
    assert "different things" in line["message"]
    assert (line["part"], line["level"], line["request"]) == ("ingress", "WARNING", request)
    assert line["program"] in (f"default/{program}", "default/another")


def lines_with(text: str) -> list[dict[str, Any]]:
    """Of Ray Serve's logs of this machine; each has to be JSON."""
    logs = Path("/tmp/ray").glob("session_[0-9]*/logs/serve/*.log")
    return [json.loads(line) for log in logs for line in log.read_text(errors="replace").splitlines() if text in line]
