"""OpenAI's client against batches of a real cluster: real replicas, real tools, a real Redis."""

import json
from collections import Counter
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.serving.program_requests import chosen, server_side, until

pytestmark = pytest.mark.cluster

ENDED = ("completed", "failed", "expired", "cancelled")


def run(openai: OpenAI, url: Any, bodies: dict[str, dict[str, Any]]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The batch when it has ended, and by custom id the responses in its output and in its error file."""
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"model": "tiny", **body}})
        for name, body in bodies.items()
    ]
    file = openai.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = openai.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

    def ended() -> Any:
        found = openai.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    done = until(ended, f"{batch.id} did not end")
    files = (done.output_file_id, done.error_file_id)
    read = [[] if one is None else openai.files.content(one).text.splitlines() for one in files]
    good, bad = ([json.loads(line) for line in lines] for lines in read)
    assert Counter(line["custom_id"] for line in (*good, *bad)) == Counter(bodies.keys())
    return done, *({line["custom_id"]: line["response"] for line in lines} for lines in (good, bad))


def test_chat_completions(openai: OpenAI) -> None:
    said = {
        f"n{number}": {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 8} for number in range(40)
    }
    wrong = {"messages": "no list"}
    done, good, bad = run(openai, "/v1/chat/completions", {**said, "wrong": wrong})
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 40, 1)
    assert all(one["body"]["object"] == "chat.completion" and one["status_code"] == 200 for one in good.values())
    assert bad["wrong"]["status_code"] == 400
    assert bad["wrong"]["body"]["error"]["param"] == "messages"
    direct = openai.chat.completions.create(model="tiny", temperature=0, **said["n7"])
    again, same, _ = run(openai, "/v1/chat/completions", {"n7": {**said["n7"], "temperature": 0}})
    assert again.status == "completed"
    assert same["n7"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content


def test_completions_of_token_ids(openai: OpenAI) -> None:
    _, good, _ = run(
        openai, "/v1/completions", {"a": {"prompt": [42, 1079, 411], "max_tokens": 4, "return_token_ids": True}}
    )
    assert len(good["a"]["body"]["choices"][0]["token_ids"]) == 4


def test_programs_with_tools(openai: OpenAI, client: httpx.Client) -> None:
    body = {
        "input": "What is 6 times 7?",
        "tools": server_side("calculator"),
        "tool_choices": chosen("calculator"),
        "max_turns": 2,
        "max_output_tokens": 300,
    }
    _, good, _ = run(openai, "/v1/responses", {"a": body, "stays": body | {"store": True}})
    for response in good.values():
        assert [item["type"] for item in response["body"]["output"]].count("mcp_call") == 1
    gone, stays = good["a"]["body"]["id"], good["stays"]["body"]["id"]
    assert openai.responses.retrieve(stays).id == stays
    assert client.get(f"/v1/responses/{gone}").status_code == 404


def test_metrics_have_the_lines_of_a_tenant(openai: OpenAI, client: httpx.Client) -> None:
    run(openai, "/v1/completions", {"a": {"prompt": "Hi", "max_tokens": 1}})

    def counted() -> bool:
        return "caesura_batch_lines_total{" in (text := client.get("/metrics").text) and 'tenant="default"' in text

    until(counted, "no line was counted")
