"""Programs that the cluster runs, over HTTP on real replicas, real tools and a real Redis; and what survives a kill."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.http.attributed_answers import PROGRAM_HEADER
from cluster.local.cluster import LocalCluster
from cluster.offline.demo.tools import calculate
from tests.serving.program_requests import answer, called, until
from tests.serving.tool_site import ToolSite

pytestmark = pytest.mark.cluster

DONE_WITHIN_S = 60.0
BLOCK = 32


def chosen(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name} for name in names]


def server_side(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "server_side": True} for name in names]


def request(*plan: str, **more: Any) -> dict[str, Any]:
    """A response whose first turns call the tools of ``plan``."""
    names = dict.fromkeys(plan)
    body = {"model": "tiny", "input": "Go.", "tools": server_side(*names), "tool_choices": chosen(*plan)}
    return {**body, "max_output_tokens": 600, "temperature": 0.0, **more}


def respond(client: httpx.Client, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = client.post("/v1/responses", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    """The response when it has ended; while its ingress is being replaced, there may be no answer."""
    deadline = time.monotonic() + DONE_WITHIN_S
    told = "nothing"
    while time.monotonic() < deadline:
        try:
            answer = client.get(f"/v1/responses/{response_id}")
        except httpx.TransportError as error:
            told = str(error)
        else:
            told = answer.text
            if answer.status_code == 200 and answer.json()["status"] not in ("queued", "in_progress"):
                return dict(answer.json())
        time.sleep(0.2)
    raise AssertionError(f"{response_id} did not end within {DONE_WITHIN_S} s: {told}")


def outputs(response: dict[str, Any]) -> list[str]:
    return [answer(call) for call in called(response)]


def test_one_request_is_a_whole_program(client: httpx.Client) -> None:
    response = respond(client, request("calculator", "shell", "notes__add", "calculator"), x_session_id="whole")
    assert response["status"] in ("completed", "incomplete"), response
    calls = called(response)
    assert [(call["server_label"], call["name"]) for call in calls[:4]] == [
        ("calculator", "calculator"),
        ("shell", "shell"),
        ("notes", "add"),
        ("calculator", "calculator"),
    ]
    first, _, note, second = outputs(response)[:4]
    assert first == calculate(**json.loads(calls[0]["arguments"]))
    assert second == calculate(**json.loads(calls[3]["arguments"]))
    assert note.startswith("note ")
    story = client.get("/v1/programs/whole", params={"include": "token_ids"}).json()
    [run] = story["runs"]
    assert [turn["rendering"] for turn in run["turns"]] == ["first"] + ["continued"] * (len(run["turns"]) - 1)
    ids: list[int] = []
    for turn in run["turns"]:
        # All of the context is found again, but for at most one block.
        assert turn["cached_tokens"] >= len(ids) - BLOCK
        ids += turn["prompt_ids"]
        assert turn["prompt_tokens"] == len(ids)
        ids += turn["output_ids"]
    assert run["token_ids"] == ids
    assert len(story["turns"]) == len(run["turns"])
    assert [turn["tools"] for turn in story["turns"]][:3] == [["calculator"], ["shell"], ["notes__add"]]


def test_the_scheduler_is_told_when_tools_start_and_finish(client: httpx.Client, site: ToolSite) -> None:
    def saw(event: str) -> bool:
        events = client.get("/v1/programs/told").json().get("events", [])
        return any(each["event"].startswith(event) for each in events)

    def late() -> int:
        replicas = client.get("/admin/statistics").json()["replicas"]
        return sum(replica["counters"].get("late_tool_notification", 0) for replica in replicas)

    site.gate.clear()
    response = respond(client, request("book", background=True), x_session_id="told")
    until(lambda: saw("ToolStarted(book)"), "the tool's start")
    before = late()
    site.gate.set()
    ended(client, response["id"])
    # The turn that the tool's result begins does not wait for the notification. If it comes first, the replica counts
    # the notification as late.
    until(lambda: saw("ToolFinished") or late() > before, "the tool's end")


def test_what_was_not_offered_or_makes_no_sense_names_its_field(client: httpx.Client) -> None:
    def param(**more: Any) -> str:
        answer = client.post("/v1/responses", json={**request("calculator"), **more})
        assert 400 <= answer.status_code < 500, answer.text
        return str(answer.json()["error"]["param"])

    assert param(tools=server_side("nonsense")) == "tools.0.name"
    assert param(tool_choices=chosen("shell")).startswith("tool_choices.0")
    assert param(max_output_tokens=0) == "max_output_tokens"
    assert param(previous_response_id="resp_none") == "previous_response_id"
    assert param(seed=1) == "seed"


def test_a_chat_completion_may_ask_for_the_loop(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "calculator"}, "server_side": True}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 6 times 7?"}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "calculator"}},
        "max_turns": 3,
        "max_tokens": 400,
    }
    theirs = {"type": "function", "function": {"name": "weather"}, "server_side": False}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion", answer
    assert answer["caesura"]["turns"] == 3
    assert answer["caesura"]["tool_calls"] >= 2
    refused = client.post("/v1/chat/completions", json={**body, "tools": [tool, theirs]})
    assert refused.json()["error"]["param"] == "tools.1"
    streamed = client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    *_, usage, done = streamed.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["caesura"]["turns"] == 3


def test_the_next_chat_loop_of_a_conversation_without_an_id_belongs_to_its_program(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "calculator"}, "server_side": True}
    body = {"model": "tiny", "tools": [tool], "max_turns": 2, "max_tokens": 200, "temperature": 0}

    def loop(*messages: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        answer = client.post("/v1/chat/completions", json={**body, "messages": list(messages)})
        assert answer.status_code == 200, answer.text
        return answer.headers[PROGRAM_HEADER], answer.json()["choices"][0]["message"]

    first = {"role": "user", "content": "What is 6 times 7 in this conversation?"}
    program, said = loop(first)
    second = (first, said, {"role": "user", "content": "And 8?"})
    assert loop(*second)[0] == program
    assert loop(*second, said, {"role": "user", "content": "And 9?"})[0] == program
    assert loop({"role": "user", "content": "Another conversation."})[0] != program
    assert len(client.get(f"/v1/programs/{program}").json()["turns"]) >= 3


def test_the_same_idempotency_key_books_once(client: httpx.Client, site: ToolSite) -> None:
    before = len(site.bookings)
    first = respond(client, request("book"), Idempotency_Key="seats-1")
    again = respond(client, request("book"), Idempotency_Key="seats-1")
    assert again["id"] == first["id"]
    assert outputs(first)[0] == f"booked, number {before + 1}"
    assert len(site.bookings) == before + 1
    other = client.post("/v1/responses", json=request("calculator"), headers={"Idempotency-Key": "seats-1"})
    assert other.status_code == 422


def test_a_program_can_be_cancelled_while_its_tool_works(client: httpx.Client, site: ToolSite) -> None:
    site.gate.clear()
    before = len(site.bookings)
    response = respond(client, request("book", background=True), x_session_id="cancelled")
    await_bookings(site, before + 1)
    assert client.post("/v1/programs/cancelled/cancel").json()["cancelled"] == [response["id"]]
    assert ended(client, response["id"])["status"] == "cancelled"
    site.gate.set()


def await_bookings(site: ToolSite, number: int) -> None:
    deadline = time.monotonic() + DONE_WITHIN_S
    while len(site.bookings) < number:
        assert time.monotonic() < deadline, "the tool was not called"
        time.sleep(0.02)


def processes(cluster: LocalCluster, title: str) -> list[psutil.Process]:
    return [process for process in cluster.processes if title in " ".join(process.cmdline())]


def test_an_ingress_killed_in_the_middle_loses_nothing_and_books_once(
    cluster: LocalCluster, client: httpx.Client, site: ToolSite
) -> None:
    site.gate.clear()
    before = len(site.bookings)
    response = respond(client, request("book", "calculator", background=True), x_session_id="survivor")
    await_bookings(site, before + 1)
    [ingress] = processes(cluster, "ServeReplica:caesura:Ingress")
    ingress.kill()
    ingress.wait(10)
    site.gate.set()
    told = ended(client, response["id"])
    assert told["status"] in ("completed", "incomplete"), told
    assert outputs(told)[0] == f"booked, number {before + 1}"
    assert len(site.bookings) == before + 1
    [run] = client.get("/v1/programs/survivor").json()["runs"]
    assert run["runners"] == 2
    assert [turn["rendering"] for turn in run["turns"][1:]] == ["continued"] * (len(run["turns"]) - 1)


def test_a_tool_process_killed_in_a_call_is_told_to_the_model_and_the_program_goes_on(
    cluster: LocalCluster, client: httpx.Client, site: ToolSite
) -> None:
    site.gate.clear()
    before = len(site.bookings)
    response = respond(client, request("book", "calculator", background=True), x_session_id="orphan")
    await_bookings(site, before + 1)
    [actor] = processes(cluster, "ToolActor")
    actor.kill()
    told = ended(client, response["id"])
    site.gate.set()
    assert told["status"] in ("completed", "incomplete"), told
    unknown, solved = outputs(told)[:2]
    assert unknown.startswith("unknown: ")
    assert "may have taken effect" in unknown
    assert " = " in solved, "the next call runs in the process that has taken its place"
    assert len(site.bookings) == before + 1


def test_many_turns_of_many_programs_at_once(client: httpx.Client) -> None:
    """Calls of one request that wait for a replica at the same time must not be mixed up."""
    plan = ["calculator"] * 12
    with ThreadPoolExecutor(6) as threads:
        bodies = [request(*plan, max_output_tokens=2000, max_turns=13) for _ in range(6)]
        responses = list(threads.map(lambda body: respond(client, body), bodies))
    assert [len(outputs(response)) for response in responses] == [12] * 6


def test_the_command_tells_a_programs_story(cluster: LocalCluster, client: httpx.Client) -> None:
    response = respond(client, request("calculator", "shell"), x_session_id="tale")
    shown = CliRunner().invoke(app, ["programs", "show", "tale", "--url", cluster.url])
    assert shown.exit_code == 0, shown.output
    for words in ("turn 1: waited", "asks for calculator; ", "Held(", response["id"], "shell: ok", "continued"):
        assert words in shown.output, shown.output
    listed = CliRunner().invoke(app, ["programs", "list", "--url", cluster.url])
    assert "tale" in listed.output
    unknown = CliRunner().invoke(app, ["programs", "show", "nobody", "--url", cluster.url])
    assert unknown.exit_code == 1
    assert "nobody knows the program" in unknown.output
