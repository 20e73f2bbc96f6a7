"""One real cluster with a model that sees and a model with two LoRA adapters: every way in which clients reach them."""

import base64
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import anthropic
import httpx
import pytest
import yaml
from openai import BadRequestError, OpenAI
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from cluster.auth.keys import digest_of
from replicas.tiny.model import tiny_model_directory
from tests.faults.stand import until
from tests.models.test_adapters import RANK, write_adapter
from tests.models.vision import PART_TOKENS, write_vision_checkpoint
from tests.serving.served import EXACT, served
from tests.tools.scripted import SERVERS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

KEY, LIMITED = (f"csk-{name}-{'0' * 20}" for name in ("all", "limited"))
IMAGE_TOKENS = 5 * PART_TOKENS
"""An image is read in four parts and as a whole."""
PROMPT = [7 + i % 900 for i in range(120)]


@pytest.fixture(scope="module", autouse=True)
def _long(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("a part of `make models`")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("sql", "ops"))}


@pytest.fixture(scope="module")
def alone(adapters: dict[str, Path]) -> dict[str, list[int]]:
    """What vLLM's own engine generates, by the name that clients send. It has ended when the cluster starts."""
    engine = LLM(
        model=str(tiny_model_directory()),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        num_gpu_blocks_override=65,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=RANK,
    )
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    named: dict[str, LoRARequest | None] = {"tiny": None}
    named |= {f"tiny:{name}": LoRARequest(name, n, str(path)) for n, (name, path) in enumerate(adapters.items(), 1)}
    generated = {}
    for name, adapter in named.items():
        [output] = engine.generate({"prompt_token_ids": PROMPT}, sampling, lora_request=adapter, use_tqdm=False)
        generated[name] = list(output.outputs[0].token_ids)
    engine.llm_engine.engine_core.shutdown()
    return generated


@pytest.fixture(scope="module")
def image_id(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The id of the token that stands for a piece of an image in a prompt."""
    return write_vision_checkpoint(tmp_path_factory.getbasetemp() / "seeing", Path(tiny_model_directory()))


@pytest.fixture(scope="module")
def url(
    image_id: int, adapters: dict[str, Path], alone: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    keys = [
        {"tenant": "all", "sha256": digest_of(KEY), "roles": ["admin", "serve"]},
        {"tenant": "limited", "sha256": digest_of(LIMITED)},
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    small = {"replicas": {"kv_cache_bytes": 16 << 20}}
    config = {
        "http": {"port": 0},
        "auth": {"file": str(folder / "keys.yaml")},
        "model": {"adapters": {name: {"path": str(path)} for name, path in adapters.items()}},
        "engine": EXACT | {"max_model_len": 1024, "max_lora_rank": RANK},
        **small,
        "models": {
            "seeing": {
                "source": str(tmp_path_factory.getbasetemp() / "seeing"),
                "tool_parser": "hermes",
                "engine": EXACT | {"max_model_len": 2048, "max_num_seqs": 8},
                **small,
            }
        },
        "policy": {"name": "continuum"},
        "tenants": {"limited": {"models": ["tiny", "tiny:sql"]}},
        "tools": {
            "defined": {
                "camera": {
                    "kind": "mcp",
                    "command": [sys.executable, str(SERVERS / "mcp_server.py"), "stdio"],
                    "connect_timeout_s": 60,
                }
            }
        },
    }
    (folder / "caesura.yaml").write_text(yaml.safe_dump(config))
    with served(folder / "caesura.yaml") as cluster:
        yield cluster


def client_of(url: str, key: str = KEY, **headers: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}", **headers}, timeout=120)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """A client of its own program."""
    with client_of(url, **{"x-session-id": uuid4().hex}) as http:
        yield http


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_are_listed_with_their_model_and_only_for_those_who_may_use_them(url: str) -> None:
    def listed(key: str) -> dict[str, str | None]:
        with client_of(url, key) as http:
            cards = http.get("/v1/models").raise_for_status().json()["data"]
        return {card["id"]: card.get("parent") for card in cards}

    assert listed(KEY) == {"tiny": None, "seeing": None, "tiny:sql": "tiny", "tiny:ops": "tiny"}
    assert listed(LIMITED) == {"tiny": None, "tiny:sql": "tiny"}


def test_each_adapter_gives_the_tokens_of_vllms_own_engine(client: httpx.Client, alone: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    for _ in range(2):  # the second time from the cache, which is keyed by adapter
        for name, tokens in alone.items():
            answer = client.post("/v1/completions", json={**body, "model": name}).raise_for_status().json()
            assert answer["choices"][0]["token_ids"] == tokens, name
            assert answer["model"] == name


@pytest.mark.parametrize(("key", "name"), [(KEY, "tiny:poems"), (LIMITED, "tiny:ops"), (LIMITED, "seeing")])
def test_an_adapter_that_does_not_exist_or_is_not_allowed_is_404(url: str, key: str, name: str) -> None:
    with client_of(url, key) as http:
        body = {"model": name, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        for route in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(route, json=body)
            assert (answer.status_code, name in answer.json()["error"]["message"]) == (404, True), answer.text
        assert http.get(f"/v1/models/{name}").status_code == 404
        assert http.post("/v1/responses", json={"model": name, "input": "Hi"}).status_code == 404


# --- images -----------------------------------------------------------------------------------------------------------


def png(shade: int) -> str:
    file = BytesIO()
    Image.new("RGB", (80, 60), (shade, 255 - shade, 40)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(shade: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(shade)}"}}


def looked(shade: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "What is it? " * 8}, part(shade)]}


def chat(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": "seeing", "max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json={**body, "messages": messages, **more})
    return dict(answer.raise_for_status().json())


def test_a_program_with_an_image_is_resumed_with_the_same_tokens_and_its_kv(
    client: httpx.Client, image_id: int
) -> None:
    first = chat(client, [looked(10)])
    assert first["prompt_token_ids"].count(image_id) == IMAGE_TOKENS
    said = first["choices"][0]["message"]["content"]
    longer = [looked(10), {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    resumed = chat(client, longer)
    assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] > IMAGE_TOKENS
    client.post("/admin/reset", json={}).raise_for_status()
    client.headers["x-session-id"] = uuid4().hex
    again = chat(client, longer)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"][0]["token_ids"] == resumed["choices"][0]["token_ids"]
    longer[0] = looked(200)
    other = chat(client, longer)
    assert other["prompt_token_ids"] == again["prompt_token_ids"], "the ids of another image are the same"
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < IMAGE_TOKENS, "its KV is not"
    assert other["choices"][0]["token_ids"] != again["choices"][0]["token_ids"]


def test_all_apis_show_the_model_the_same_image(url: str, client: httpx.Client) -> None:
    said = chat(client, [looked(10)])["choices"][0]["message"]["content"]
    text = {"type": "input_text", "text": "What is it? " * 8}
    openai = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    seen = {"type": "input_image", "image_url": part(10)["image_url"]["url"], "detail": "auto"}
    more = {"temperature": 0.0, "max_output_tokens": 16, "extra_body": {"ignore_eos": True}}
    asked: Any = [{"role": "user", "content": [text, seen]}]
    assert openai.responses.create(model="seeing", input=asked, **more).output_text == said
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": png(10)}
    content: Any = [{"type": "text", "text": "What is it? " * 8}, {"type": "image", "source": source}]
    message = claude.messages.create(
        model="seeing",
        max_tokens=16,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0.0, "ignore_eos": True},
    )
    assert message.content[0].to_dict()["text"] == said


def test_images_in_tool_results_of_clients(url: str, client: httpx.Client, image_id: int) -> None:
    """In a message, and in a response; both are the same conversation."""
    claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": png(10)}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    messages: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    counted = claude.messages.count_tokens(model="seeing", messages=messages).input_tokens
    call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": part(10)["image_url"]["url"]}]
    items = [{"role": "user", "content": "Look."}, call,
             {"type": "function_call_output", "call_id": "t1", "output": output}]  # fmt: skip
    answer = client.post("/v1/responses/input_tokens", json={"model": "seeing", "input": items}).raise_for_status()
    assert answer.json()["input_tokens"] == counted > IMAGE_TOKENS
    shown = client.post("/v1/responses", json={"model": "seeing", "input": items, "max_output_tokens": 4})
    [run] = program(client)["runs"]
    assert shown.is_success and ids_of(run, 0).count(image_id) == IMAGE_TOKENS


def program(client: httpx.Client) -> dict[str, Any]:
    name = client.headers["x-session-id"]
    return dict(client.get(f"/v1/programs/{name}", params={"include": "token_ids"}).raise_for_status().json())


def ids_of(run: dict[str, Any], turn: int) -> list[int]:
    return list(run["turns"][turn]["prompt_ids"])


def test_an_image_of_a_tool_of_the_cluster_reaches_the_model_and_stays(client: httpx.Client, image_id: int) -> None:
    until(lambda: "camera__shot" in client.get("/v1/tools").text or None, "the MCP server lists no tools", 90.0)
    tool = {"type": "function", "name": "camera__shot", "server_side": True}
    body = {
        "model": "seeing",
        "input": "Take a picture.",
        "tools": [tool],
        "tool_choices": [{"type": "function", "name": "camera__shot"}],
        "tool_choice": "none",
        "max_output_tokens": 200,
        "max_turns": 2,
    }
    answer = client.post("/v1/responses", json=body)
    assert answer.is_success, answer.text
    response = answer.json()
    [call] = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert (call["status"], call["output"]) == ("completed", "Here:\n[image: see the next message]")
    [run] = program(client)["runs"]
    assert [ids_of(run, turn).count(image_id) for turn in range(2)] == [0, IMAGE_TOKENS]
    more = {"model": "seeing", "input": "And?", "previous_response_id": response["id"], "max_output_tokens": 4}
    client.post("/v1/responses", json=more).raise_for_status()
    last = max(program(client)["runs"], key=lambda run: len(ids_of(run, 0)))
    assert ids_of(last, 0).count(image_id) == IMAGE_TOKENS


def test_what_is_not_read_is_named(url: str, client: httpx.Client) -> None:
    video = {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/"}}
    for parts, param in (
        ([video], "messages.0.content.0"),
        ([part(10) | {"uuid": "a"}], "messages.0.content.0.uuid"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}], "messages.0.content.0.image_url.url"),
        ([part(10)] * 33, "messages.0.content.32.image_url.url"),
    ):
        body = {"model": "seeing", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0xLjcK"}
    openai = OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(BadRequestError, match="a PDF is not read here"):
        openai.responses.create(model="seeing", input=[{"role": "user", "content": [pdf]}])  # type: ignore[list-item,misc]
