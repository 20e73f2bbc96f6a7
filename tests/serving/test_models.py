"""Two models behind one door: a request names one, or a class that leads its program to one."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from served import served

from cluster.embedded_redis import EmbeddedRedis

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONFIG = """
http: {{port: 0}}
replicas: {{kv_cache_bytes: 16777216}}
engine: {{max_model_len: 1024, max_num_seqs: 8}}
models:
  coder:
    engine: {{max_model_len: 2048, max_num_seqs: 8}}
    replicas: {{kv_cache_bytes: 16777216}}
classes:
  agent:
    - {{model: coder, tools: ["bash", "edit_*"]}}
    - {{model: tiny}}
store: {{url: "{url}"}}
"""
TOOLS = [{"type": "function", "function": {"name": "edit_file", "parameters": {"type": "object", "properties": {}}}}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("models") / "caesura.yaml"
    with EmbeddedRedis() as redis:
        file.write_text(CONFIG.format(url=redis.url), encoding="utf-8")
        with served(file) as url, httpx.Client(base_url=url, timeout=120) as http:
            yield http


def chat(client: httpx.Client, model: str | None, program: str | None = None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}
    body |= {"model": model} if model is not None else {}
    return client.post(CHAT, json=body, headers={"x-session-id": program} if program is not None else {})


def answered_by(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


def test_both_models_are_listed_and_each_answers_as_itself(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "coder"]
    assert client.get("/v1/models/coder").json()["id"] == "coder"
    assert [answered_by(chat(client, model)) for model in ("tiny", "coder", None)] == ["tiny", "coder", "tiny"]
    assert client.get("/ready").status_code == 200


def test_each_model_has_its_own_engine(client: httpx.Client) -> None:
    long = {"prompt": [7] * 1500, "max_tokens": 1}
    assert client.post("/v1/completions", json={"model": "tiny", **long}).status_code == 400
    assert client.post("/v1/completions", json={"model": "coder", **long}).status_code == 200
    assert len(client.get("/admin/statistics").json()["replicas"]) == 2


def test_a_class_leads_by_tools_and_its_program_stays(client: httpx.Client) -> None:
    assert answered_by(chat(client, "auto:agent", "coding", tools=TOOLS)) == "coder"
    assert answered_by(chat(client, "auto:agent", "coding")) == "coder"
    assert answered_by(chat(client, "auto:agent", "talking")) == "tiny"
    assert answered_by(chat(client, "auto:agent", "talking", tools=TOOLS)) == "tiny"
    models = client.get("/admin/router").json()["models"]
    assert {model: told["programs"] for model, told in models.items()} == {"tiny": 1, "coder": 1}
    assert client.get("/v1/programs/coding").json()["num_turns"] == 2


def test_a_stream_of_a_class_says_which_model_it_is(client: httpx.Client) -> None:
    with OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as openai:
        stream = openai.chat.completions.create(
            model="auto:agent", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, stream=True
        )
        assert {chunk.model for chunk in stream} == {"tiny"}


def test_what_is_not_served_is_told(client: httpx.Client) -> None:
    for model in ("auto:coding", "auto:", "other"):
        error = chat(client, model)
        assert (error.status_code, error.json()["error"]["param"]) == (404, "model"), model


def test_a_response_runs_on_the_model_that_its_class_leads_to(client: httpx.Client) -> None:
    body = {"model": "auto:agent", "input": "Hello", "max_output_tokens": 8}
    bash = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}
    plain = client.post("/v1/responses", json=body)
    coding = client.post("/v1/responses", json={**body, "tools": [bash]})
    assert [answered_by(plain), answered_by(coding)] == ["tiny", "coder"]


def test_drain_finds_the_replica_of_either_model(client: httpx.Client) -> None:
    for replica in [one["replica"] for one in client.get("/admin/statistics").json()["replicas"]]:
        for drain in (True, False):
            told = client.post("/admin/drain", json={"replica": replica, "drain": drain})
            assert told.json() == {"replica": replica, "draining": drain}
    assert client.post("/admin/drain", json={"replica": "nobody"}).status_code == 404
