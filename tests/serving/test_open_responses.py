"""Answers and events of a real cluster have the schema of Open Responses, by its published types."""

import json
from enum import Enum
from typing import Any

import httpx
import openresponses_types
import pytest
from openresponses_types import ResponseResource
from pydantic import BaseModel

from tests.serving.test_responses import WEATHER

pytestmark = pytest.mark.cluster

IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
SAID = [
    {"type": "message", "role": "user", "content": "My name is Ada."},
    {"type": "message", "role": "assistant", "content": "Hello, Ada."},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"input": "Say a word."},
    "a system prompt": {"input": "Say a word.", "instructions": "Speak like a pirate."},
    "settings": {"input": "Hi.", "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "metadata": {"a": "b"}},
    "a tool": {"input": "Go.", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, IMAGE]}]},
    "several turns": {"input": SAID},
    "hosted tools": {"input": "Hi.", "tools": [WEATHER, {"type": "web_search"}]},
}
EVENTS: dict[str, type[BaseModel]] = {}
for _name in dir(openresponses_types):
    if _name.endswith("StreamingEvent"):
        _model: type[BaseModel] = getattr(openresponses_types, _name)
        _types = _model.model_fields["type"].annotation
        assert isinstance(_types, type) and issubclass(_types, Enum)
        EVENTS |= {one.value: _model for one in _types}
OWN = ("response.mcp_",)
"""Events of MCP servers, which Open Responses does not have."""


def body_of(case: str) -> dict[str, Any]:
    return {"model": "tiny", "max_output_tokens": 60, **REQUESTS[case]}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_whole_answer_has_the_schema(client: httpx.Client, case: str) -> None:
    answer = client.post("/v1/responses", json=body_of(case))
    assert answer.status_code == 200, answer.text
    response = ResponseResource.model_validate_json(answer.content, strict=False)
    told = answer.json()
    assert (type(told["created_at"]), type(told["temperature"])) == (int, float)
    assert response.status in ("completed", "incomplete")
    assert response.output
    if case == "a tool":
        assert [item["name"] for item in told["output"] if item["type"] == "function_call"] == ["weather"]
    if case == "hosted tools":
        assert told["caesura"] == {"ignored": ["tools.web_search"]}
    again = client.get(f"/v1/responses/{response.id}")
    assert again.json() == told


@pytest.mark.parametrize("case", ["text", "a tool"])
def test_each_event_of_a_stream_has_the_schema(client: httpx.Client, case: str) -> None:
    with client.stream("POST", "/v1/responses", json=body_of(case) | {"stream": True}) as answer:
        text = answer.read().decode()
    kinds = []
    for block in text.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        event = json.loads(data)
        assert event["type"] == name
        if not name.startswith(OWN):
            EVENTS[name].model_validate_json(data, strict=False)
        kinds.append(name)
    assert (kinds[0], kinds[-1]) in {
        ("response.created", "response.completed"),
        ("response.created", "response.incomplete"),
    }
