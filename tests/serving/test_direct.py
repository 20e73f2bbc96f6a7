"""The direct data plane on a real cluster: OpenAI's client, through a real HAProxy, to two replicas."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.serving.direct_cluster import Ask, direct_cluster

pytestmark = pytest.mark.cluster

CONFIG = {
    "http": {"port": 0, "data_plane": "direct", "max_concurrent_requests": 48, "max_body_bytes": 1 << 20},
    "replicas": {"count": 2, "kv_cache_bytes": 16 << 20},
    "engine": {"max_model_len": 4096, "max_num_seqs": 32},
    "policy": {"name": "continuum"},
    "redis": {"refresh_s": 0.2},
}
SEEN_WITHIN_S = 30.0
PROGRAMS = 8
"""Of each dialect; so many that they do not all find their home by luck."""
TEXT = "The harbour lay still under the morning, and nobody spoke of the night before. " * 12
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def direct() -> Iterator[tuple[str, Ask]]:
    with direct_cluster(CONFIG) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ask(direct: tuple[str, Ask]) -> Ask:
    return direct[1]


@pytest.fixture(scope="module")
def http(direct: tuple[str, Ask]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=direct[0], timeout=60, verify=False) as client:
        yield client


@pytest.fixture(scope="module")
def llm(direct: tuple[str, Ask]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{direct[0]}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SEEN_WITHIN_S} s: {what}"
        time.sleep(0.05)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_openai_s_client_chats_and_completes(llm: OpenAI) -> None:
    chat = llm.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
    assert chat.usage is not None and chat.usage.completion_tokens == 5
    completion = llm.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=4)
    assert completion.usage is not None and completion.usage.prompt_tokens == 3
    assert [model.id for model in llm.models.list()] == ["tiny"]
    assert llm.models.retrieve("tiny").id == "tiny"


def test_a_stream_says_what_the_whole_answer_says(llm: OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 24, "temperature": 0.0}
    whole = llm.chat.completions.create(**ask)
    pieces = list(llm.chat.completions.create(stream=True, **ask))
    assert len(pieces) > 2
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content


def test_tokens_and_probes(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "hello"
    assert http.get("/health").json() == {"status": "alive"}
    assert http.get("/ready").json() == {"status": "ready", "model": "tiny"}
    assert set(http.get("/version").json()) == {"caesura", "vllm", "ray"}


def where_known(ask: Ask, program: str) -> list[str]:
    """The replicas that have had a turn of the program."""
    stories = ask("control", "program", {"key": f"default/{program}"})
    return [story["replica"] for story in stories if len(story) > 1]


def idle(ask: Ask) -> bool:
    """Does the router know that no replica has anything to do?"""
    (view,) = ask("router")
    return all(replica["running"] == replica["waiting"] == 0 for replica in view["replicas"].values())


DIALECTS: dict[str, Callable[[str], tuple[dict[str, str], dict[str, Any]]]] = {
    "the header that HAProxy passes on": lambda program: ({"x-session-id": program}, {}),
    "a field of the body": lambda program: ({}, {"program_id": program}),
    "an object of the body": lambda program: ({}, {"agent_hint": {"session_id": program}}),
    "a header that HAProxy does not pass on": lambda program: ({"x-claude-code-session-id": program}, {}),
}


def test_a_program_stays_on_one_replica(http: httpx.Client, ask: Ask) -> None:
    def run(dialect: str, number: int) -> tuple[str, list[int]]:
        """Three turns; the program, and how much of each prompt was there."""
        program = f"{number} named by {dialect}"
        headers, fields = DIALECTS[dialect](program)
        prompt, cached = f"{program} {TEXT}", []
        for _ in range(3):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, **fields}
            answer = http.post(COMPLETIONS, json=body, headers=headers).raise_for_status().json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt += answer["choices"][0]["text"] + TEXT
        return program, cached

    until(lambda: idle(ask), "snapshots of replicas that have nothing to do")
    programs = product(DIALECTS, range(PROGRAMS))
    with ThreadPoolExecutor(PROGRAMS) as pool:
        ran = dict(pool.map(run, *zip(*programs, strict=True)))
    assert all(first < second < third for first, second, third in ran.values()), ran
    homes = {program: where_known(ask, program) for program in ran}
    assert all(len(home) == 1 for home in homes.values()), homes
    # Not those of each dialect: eight may rightly go to the replica that looks less busy, by what both said last.
    assert len({home for (home,) in homes.values()}) == 2


def test_the_end_of_a_long_body_is_read_too(http: httpx.Client, ask: Ask) -> None:
    for number in range(PROGRAMS):
        program = f"long-{number}"
        for _ in range(2):
            body = {"model": "tiny", "prompt": "Once", "max_tokens": 1, "user": "x" * 600_000, "program_id": program}
            http.post(COMPLETIONS, json=body).raise_for_status()
        assert len(where_known(ask, program)) == 1


TEXT_PLAIN = {"content-type": "text/plain"}
BAD: list[tuple[dict[str, Any], int, Any]] = [
    ({"content": b'{"model": "tiny", "prompt":'}, 400, "invalid_json"),
    ({"content": b'{"prompt": "\xff"}'}, 400, "invalid_utf8"),
    ({"json": {"model": "other", "prompt": "Once"}}, 404, "model_not_found"),
    ({"json": {"prompt": "Once", "seed": 1}}, 400, 400),
    ({"json": {"prompt": "Once", "max_tokens": -1}}, 400, 400),
    ({"json": {"prompt": "Once", "session_id": "x" * 300}}, 400, 400),
    ({"json": {"prompt": "x" * (1 << 20)}}, 413, "body_too_large"),
    ({"json": {"prompt": "Once"}, "headers": {"x-more": "y" * (40 << 10)}}, 431, 431),
    ({"json": {"prompt": "Once"}, "headers": {"x-session-id": b"\xff"}}, 400, "invalid_header"),
    ({"content": b"prompt=Once", "headers": TEXT_PLAIN}, 415, 415),
]


@pytest.mark.parametrize(("request_", "status", "code"), BAD)
def test_bad_input_is_refused_as_at_the_ingress(http: httpx.Client, request_: Any, status: int, code: Any) -> None:
    answer = http.post(COMPLETIONS, **request_)
    assert (answer.status_code, error_of(answer)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/x"),
        ("GET", "/v1/programs"),
        ("GET", "/v1/tools"),
        ("GET", "/admin/policy"),
        ("PUT", "/admin/policy"),
    ],
)
def test_what_only_the_ingress_serves_is_refused_by_name(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path, json=None if method == "GET" else {})
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (501, "needs_ingress")
    assert "http.data_plane" in error["message"]


def test_a_tool_that_the_server_would_run_is_refused(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "find"}, "server_side": True}]
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": tools}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (501, "tools")


def test_no_route(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert (answer.status_code, error_of(answer)["type"]) == (404, "not_found_error")


def running(ask: Ask) -> int:
    return sum(replica["running"] for replica in ask("snapshot"))


@pytest.mark.parametrize("header", ["x-session-id", "x-program-id"], ids=["placed", "relayed"])
def test_a_client_that_goes_away_ends_its_turn(http: httpx.Client, ask: Ask, header: str) -> None:
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for number in range(2):
        with http.stream("POST", COMPLETIONS, json=body, headers={header: f"leaves-{number}"}) as stream:
            pieces = stream.iter_bytes()  # a name: when it is collected, httpx closes the connection
            assert next(pieces).startswith(b"data: ")
            until(lambda: running(ask) == 1, "the turn's beginning")
        until(lambda: running(ask) == 0, "the turn's end")
    told = http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 1}).json()
    assert told["usage"]["completion_tokens"] == 1


def test_no_client_writes_the_router_s_notes(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 1}, headers={"x-serve-router-note": "forged"})
    assert answer.status_code == 200
