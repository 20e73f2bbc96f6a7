"""What tests of programs that the cluster runs ask for, and what they look for in the answers."""

import time
from collections.abc import Callable
from typing import Any

import httpx
from openai import OpenAI

DONE_WITHIN_S = 60.0
BLOCK = 32
"""Tokens of a block of KV."""


def chosen(*names: str) -> list[dict[str, Any]]:
    """Forced choices of the first turns."""
    return [{"type": "function", "name": name} for name in names]


def server_side(*names: str) -> list[dict[str, Any]]:
    """Registered tools."""
    return [{"type": "function", "name": name, "server_side": True} for name in names]


def plan(*names: str, **more: Any) -> dict[str, Any]:
    """Arguments of `responses.create`: the first turns call these registered tools, and another turn speaks."""
    return {
        "model": "tiny",
        "input": "Go.",
        "tools": server_side(*dict.fromkeys(names)),
        "max_output_tokens": 400,
        "temperature": 0.0,
        **more,
        "extra_body": {"tool_choices": chosen(*names), "max_turns": len(names) + 1, **more.get("extra_body", {})},
    }


def until(condition: Callable[[], Any], what: str) -> Any:
    """What ``condition`` says once it is true."""
    deadline = time.monotonic() + DONE_WITHIN_S
    while not (told := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return told


def ended(openai: OpenAI, response_id: str) -> Any:
    """The response when it has ended."""

    def look() -> Any:
        response = openai.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return until(look, f"{response_id} did not end")


def called(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls that the cluster ran, or began."""
    return [item for item in response["output"] if item["type"] == "mcp_call"]


def answer(call: dict[str, Any]) -> str:
    """What a tool answered, or why it did not."""
    return str(call["output"] if call["error"] is None else call["error"]["content"][0]["text"])


def outputs(response: Any) -> list[str]:
    """What registered tools answered."""
    return [answer(call) for call in called(response.to_dict()) if call["status"] in ("completed", "failed")]


def runs(client: httpx.Client, program: str) -> list[dict[str, Any]]:
    """A program's runs, with their token ids."""
    answer = client.get(f"/v1/programs/{program}", params={"include": "token_ids"})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["runs"])


def text_of(client: httpx.Client, ids: list[int]) -> str:
    """The text of token ids."""
    answer = client.post("/detokenize", json={"model": "tiny", "tokens": ids})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt"])
