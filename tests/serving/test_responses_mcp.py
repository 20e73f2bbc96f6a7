"""MCP servers that a request brings, on a real cluster: consent, secrets, servers that die or change."""

from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

from cluster.local.cluster import LocalCluster
from tests.serving.desk import Desk, fingerprint, held_by_redis, logs_with
from tests.serving.program_requests import ended, plan, runs, text_of, until

pytestmark = pytest.mark.cluster


def desk_plan(*names: str, tools: list[Any], **more: Any) -> dict[str, Any]:
    """The first turns call these tools of the desk."""
    choices = [{"type": "mcp", "server_label": "desk", "name": name} for name in names]
    forced = {"tool_choices": choices, "max_turns": len(names) + 1}
    return plan(**{**more, "tools": tools, "extra_body": {**forced, **more.get("extra_body", {})}})


def calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "mcp_call"]


def test_a_request_brings_a_server_and_its_secret_reaches_only_that(
    openai: OpenAI, client: httpx.Client, cluster: LocalCluster, desk: Desk
) -> None:
    secret = "s3cret-of-the-desk"
    tool = desk.offered(authorization=secret, headers={"X-Desk": "s3cret-of-a-header"})
    wanted = desk_plan("badge", "wait", tools=[tool], extra_headers={"X-Session-Id": "desk"})
    response = openai.responses.create(**wanted, background=True)
    assert desk.said() == "waiting"
    # Whoever takes the run over needs it; this also shows that the search below finds something where there is.
    assert held_by_redis(cluster.config.redis.url, secret)
    openai.responses.cancel(response.id)
    done = ended(openai, response.id)
    listing = done.output[0]
    assert (listing.type, {tool.name for tool in listing.tools}) == (
        "mcp_list_tools",
        {"badge", "move.desk", "paint", "rearrange", "wait"},
    )
    assert calls(done)[0].output == fingerprint(secret)
    told = [done.to_json(), client.get("/v1/programs").text, client.get("/v1/programs/desk").text]
    told += [event.to_json() for event in openai.responses.retrieve(response.id, stream=True)]
    for word in (secret, "s3cret-of-a-header"):
        assert not [text for text in told if word in text]
        assert held_by_redis(cluster.config.redis.url, word) == []
        assert logs_with(word) == []


def test_a_server_that_cannot_be_reached_is_the_requests_fault_and_its_secret_stays_one(
    openai: OpenAI, desk: Desk
) -> None:
    secret = "s3cret-of-nobody"
    desk.kill()
    with pytest.raises(APIStatusError) as refused:
        openai.responses.create(model="tiny", input="Go.", tools=[desk.offered(authorization=secret)])
    assert refused.value.status_code in (400, 424)
    assert "desk" in refused.value.message
    assert secret not in refused.value.response.text
    assert logs_with(secret) == []


@pytest.mark.parametrize("approve", [True, False])
def test_a_call_that_needs_consent_waits_for_it(
    openai: OpenAI, client: httpx.Client, desk: Desk, approve: bool
) -> None:
    tool = desk.offered(require_approval="always", authorization="s3cret-of-consent")
    first = openai.responses.create(**desk_plan("badge", tools=[tool]))
    assert first.status == "completed"
    assert calls(first) == []
    [asked] = [item for item in first.output if item.type == "mcp_approval_request"]
    assert (asked.server_label, asked.name) == ("desk", "badge")
    said = {"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": approve}
    if not approve:
        said["reason"] = "not today"
    second = openai.responses.create(
        **desk_plan(tools=[tool], input=[said], previous_response_id=first.id, tool_choice="none")
    )
    assert second.status in ("completed", "incomplete"), second
    assert [item for item in second.output if item.type == "mcp_list_tools"] == []
    [turn] = runs(client, first.id)[1]["turns"]
    read = text_of(client, turn["prompt_ids"])
    assert turn["rendering"] == "continued"
    if approve:
        [call] = calls(second)
        assert call.approval_request_id == asked.id
        assert call.output == fingerprint("s3cret-of-consent")
        assert call.output in read
    else:
        assert calls(second) == []
        assert "not today" in read


def test_a_client_that_keeps_its_history_consents_to_a_tool_by_the_servers_name(openai: OpenAI, desk: Desk) -> None:
    tool = desk.offered(allowed_tools=["move.desk"], require_approval="always")
    first = openai.responses.create(**desk_plan("move.desk", tools=[tool]), store=False)
    [asked] = [item for item in first.output if item.type == "mcp_approval_request"]
    assert asked.name == "move.desk"
    consent = {"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": True}
    history = [{"role": "user", "content": "Go."}, *(item.to_dict() for item in first.output), consent]
    second = openai.responses.create(**desk_plan(tools=[tool], input=history, tool_choice="none"), store=False)
    [call] = calls(second)
    assert (call.name, call.output, call.status) == ("move.desk", "moved", "completed")


def test_filters_go_by_what_the_server_says_of_its_tools(openai: OpenAI, desk: Desk) -> None:
    tool = desk.offered(allowed_tools={"read_only": True})
    listed = openai.responses.create(**desk_plan("badge", tools=[tool])).output[0]
    assert listed.type == "mcp_list_tools"
    assert [tool.name for tool in listed.tools] == ["badge"]
    tool = desk.offered(allowed_tools=["badge", "paint"], require_approval={"never": {"read_only": True}})
    response = openai.responses.create(**desk_plan("badge", "paint", tools=[tool]))
    assert [call.name for call in calls(response)] == ["badge"]
    assert [item.name for item in response.output if item.type == "mcp_approval_request"] == ["paint"]


def test_a_server_that_dies_in_a_call_ends_the_call_and_not_the_program(
    openai: OpenAI, client: httpx.Client, desk: Desk
) -> None:
    wanted = desk_plan("wait", "badge", tools=[desk.offered()], extra_headers={"X-Session-Id": "killed"})
    response = openai.responses.create(**wanted, background=True)
    assert desk.said() == "waiting"
    desk.kill()
    done = ended(openai, response.id)
    assert done.status in ("completed", "incomplete"), done
    lost, refused = calls(done)[:2]
    [run] = runs(client, "killed")
    for call, turn, why in ((lost, run["turns"][1], "went away"), (refused, run["turns"][2], "cannot be reached")):
        assert call.status == "failed"
        assert call.output is None
        assert why in call.error.content[0]["text"]
        assert why in text_of(client, turn["prompt_ids"])
    assert [run["turns"][number]["calls"][0]["outcome"] for number in (0, 1)] == ["unknown", "error"]


def test_a_tool_that_changes_between_two_calls_is_told_to_the_model(
    openai: OpenAI, client: httpx.Client, desk: Desk
) -> None:
    wanted = desk_plan(
        "paint", "rearrange", "paint", tools=[desk.offered()], extra_headers={"X-Session-Id": "rearranged"}
    )
    done = openai.responses.create(**wanted)
    assert done.status in ("completed", "incomplete"), done
    before, change, after = calls(done)[:3]
    assert before.output.startswith("painted ")
    assert change.output == "rearranged"
    assert after.status == "failed"
    assert "they are now: layers" in after.error.content[0]["text"]
    [run] = runs(client, "rearranged")
    assert "they are now: layers" in text_of(client, run["turns"][3]["prompt_ids"])


def test_the_desk_beside_registered_tools(openai: OpenAI, desk: Desk) -> None:
    tools = [desk.offered(), {"type": "function", "name": "calculator", "server_side": True}]
    forced: list[Any] = [{"type": "function", "name": "calculator"}, {"type": "function", "name": "desk__paint"}]
    response = openai.responses.create(**plan(tools=tools, extra_body={"tool_choices": forced, "max_turns": 3}))
    assert [call.server_label for call in calls(response)] == ["calculator", "desk"]
    assert calls(response)[1].output.startswith("painted ")
    until(lambda: desk.process.poll() is None, "the server is gone")
