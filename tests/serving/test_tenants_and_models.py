"""One real cluster for tenants and for models.

Tenants have keys, and nothing of one is seen by the other. A request names one of two models, or a class that leads its
program to one.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI

from cluster.auth.keys import digest_of
from cluster.auth.middleware import OPEN_PATHS
from cluster.config.schema import CaesuraConfig
from cluster.http.ingress import ingress_class
from tests.serving.served import served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
ACME, OTHER, METRICS, ADMIN, LATER, USER = (
    f"csk-{name}-{'0' * 20}" for name in ("acme", "other", "metrics", "admin", "later", "user")
)
KEYS = [
    {"tenant": "acme", "sha256": digest_of(ACME), "name": "ci"},
    {"tenant": "other", "key": OTHER},
    {"tenant": "ops", "key": METRICS, "roles": ["metrics"]},
    {"tenant": "ops", "key": ADMIN, "roles": ["admin"]},
    {"tenant": "user", "key": USER, "roles": ["admin", "serve"]},
]
CONFIG: dict[str, Any] = {
    "http": {"port": 0},
    "replicas": {"kv_cache_bytes": 16 << 20},
    "engine": {"max_model_len": 1024, "max_num_seqs": 8},
    "tools": {
        "defined": {"root": {"kind": "python", "entry": "math:sqrt"}, "sine": {"kind": "python", "entry": "math:sin"}}
    },
    "models": {
        "coder": {"engine": {"max_model_len": 2048, "max_num_seqs": 8}, "replicas": {"kv_cache_bytes": 16 << 20}}
    },
    "model_routing": {"agent": [{"model": "coder", "tools": ["bash", "edit_*"]}, {"model": "tiny"}]},
    "tenants": {
        "other": {"models": ["tiny"], "tools": ["sine"], "max_concurrent": 2},
        "slow": {"requests_per_s": 0.01, "burst": 2},
    },
}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": KEYS}))
    return path


@pytest.fixture(scope="module")
def client(key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file = tmp_path_factory.mktemp("tenancy") / "caesura.yaml"
    config = CONFIG | {"auth": {"file": str(key_file), "reload_s": 0.2}}
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    with served(file) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="module")
def user(client: httpx.Client) -> Iterator[httpx.Client]:
    """A client that may do everything."""
    with httpx.Client(base_url=client.base_url, headers=bearer(USER), timeout=120) as http:
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def chat(
    client: httpx.Client, key: str, text: str = "Hello", program: str | None = None, **more: Any
) -> httpx.Response:
    headers = bearer(key) | ({"x-session-id": program} if program is not None else {})
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return client.post(CHAT, json=body, headers=headers)


def routes() -> list[tuple[str, str]]:
    """Every path that the ingress has, with each of its methods, its parameters filled in."""
    handlers = vars(ingress_class(CaesuraConfig.model_validate(CONFIG)))
    app = next(value for value in _closure(handlers["__init__"]) if hasattr(value, "routes"))
    return [
        (route.path.replace("{", "").replace("}", "").replace(":path", ""), method)
        for route in app.routes
        for method in sorted(route.methods or ())
    ]


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield cell.cell_contents


def test_every_route_is_closed_but_the_probes(client: httpx.Client) -> None:
    every = routes()
    assert len(every) > 25
    opened = {
        (path, method): client.request(method, path).status_code
        for path, method in every
        if client.request(method, path).status_code != 401
    }
    assert {path for path, _ in opened} == set(OPEN_PATHS)
    assert client.get("/not/a/route").status_code == 401


def test_a_tenants_program_is_nobody_elses(client: httpx.Client) -> None:
    assert chat(client, ACME, program="p1").status_code == 200
    assert chat(client, OTHER, program="p1", text="Mine has the same name").status_code == 200
    acme, other = (client.get("/v1/programs/p1", headers=bearer(key)).json() for key in (ACME, OTHER))
    assert acme["turns"] and other["turns"] and acme != other
    assert chat(client, ACME, program="p2").status_code == 200
    assert client.get("/v1/programs/p2", headers=bearer(ACME)).status_code == 200
    assert client.get("/v1/programs/p2", headers=bearer(OTHER)).status_code == 404
    assert client.get("/v1/programs/acme/p2", headers=bearer(OTHER)).status_code == 404
    for key, known in ((ACME, True), (OTHER, False)):
        ids = [one["id"] for one in client.get("/v1/programs", headers=bearer(key)).json()["data"]]
        assert ("p2" in ids) is known


def test_a_tenants_response_is_nobody_elses(client: httpx.Client) -> None:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 4}
    made = client.post("/v1/responses", json=body, headers=bearer(ACME))
    assert made.status_code == 200
    path = f"/v1/responses/{made.json()['id']}"
    for method, below in (("GET", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("DELETE", "")):
        assert client.request(method, path + below, headers=bearer(OTHER)).status_code == 404
    goes_on = {**body, "previous_response_id": made.json()["id"]}
    assert client.post("/v1/responses", json=goes_on, headers=bearer(OTHER)).status_code in (400, 404)
    assert client.get(path, headers=bearer(ACME)).status_code == 200
    listed = [client.get("/v1/programs", headers=bearer(key)).json()["data"] for key in (ACME, OTHER)]
    runs = [[program["last_run"] for program in programs if program["runs"]] for programs in listed]
    assert runs == [[made.json()["id"]], []]


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int((answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def test_a_prompt_is_cached_for_its_tenant_alone(client: httpx.Client) -> None:
    text = "The same long prompt, word for word, of which each tenant must compute all. " * 8
    first, again = chat(client, ACME, text), chat(client, ACME, text)
    assert cached(first) == 0 and cached(again) > 32
    assert cached(chat(client, OTHER, text)) == 0
    assert cached(chat(client, OTHER, text, cache_salt="acme")) == 0
    assert cached(chat(client, OTHER, text)) > 32


def test_server_side_programs_of_tenants_share_no_prefix(client: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "input": "Another long prompt, the same for both of these tenants. " * 8,
        "max_output_tokens": 4,
    }
    told = [
        client.post("/v1/responses", json=body, headers=bearer(key)).json()["usage"]["input_tokens_details"][
            "cached_tokens"
        ]
        for key in (ACME, ACME, OTHER)
    ]
    assert told[0] == 0 and told[1] > 32 and told[2] == 0


def test_what_a_tenant_may_not_use_is_not_there_for_it(client: httpx.Client) -> None:
    assert chat(client, ACME, model="auto:agent").status_code == 200
    refused = chat(client, OTHER, model="auto:agent")
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    tools = [client.get("/v1/tools", headers=bearer(key)).json()["data"] for key in (ACME, OTHER)]
    assert [[tool["name"] for tool in listed] for listed in tools] == [["root", "sine"], ["sine"]]
    asks = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", "name": "root", "server_side": True}]}
    answer = client.post("/v1/responses", json=asks, headers=bearer(OTHER))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools.0.name"


def test_keys_come_and_go_while_it_serves(client: httpx.Client, key_file: Path) -> None:
    assert chat(client, LATER).status_code == 401
    key_file.write_text(yaml.safe_dump({"keys": [*KEYS, {"tenant": "slow", "key": LATER}]}))
    give_up = time.monotonic() + 30
    while client.get("/v1/models", headers=bearer(LATER)).status_code == 401:
        assert time.monotonic() < give_up, "the new key is not known"
        time.sleep(0.05)
    answers = [chat(client, LATER) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0" and int(answers[2].headers["retry-after"]) > 1
    key_file.write_text(yaml.safe_dump({"keys": KEYS}))
    while client.get("/v1/models", headers=bearer(LATER)).status_code == 200:
        assert time.monotonic() < give_up, "the old key still opens"
        time.sleep(0.05)


def test_roles_open_what_they_name(client: httpx.Client) -> None:
    assert client.get("/admin/policy", headers=bearer(ADMIN)).status_code == 200
    assert client.get("/admin/policy", headers=bearer(ACME)).status_code == 403
    assert chat(client, METRICS).status_code == 403


# --- models ----------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "edit_file", "parameters": {"type": "object", "properties": {}}}}]


def ask(client: httpx.Client, model: str | None, program: str | None = None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}
    body |= {"model": model} if model is not None else {}
    return client.post(CHAT, json=body, headers={"x-session-id": program} if program is not None else {})


def answered_by(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


def test_both_models_are_listed_and_each_answers_as_itself(user: httpx.Client) -> None:
    listed = user.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "coder"]
    assert user.get("/v1/models/coder").json()["id"] == "coder"
    assert [answered_by(ask(user, model)) for model in ("tiny", "coder", None)] == ["tiny", "coder", "tiny"]
    assert user.get("/ready").status_code == 200


def test_each_model_has_its_own_engine(user: httpx.Client) -> None:
    long = {"prompt": [7] * 1500, "max_tokens": 1}
    assert user.post("/v1/completions", json={"model": "tiny", **long}).status_code == 400
    assert user.post("/v1/completions", json={"model": "coder", **long}).status_code == 200
    assert len(user.get("/admin/statistics").json()["replicas"]) == 2


def programs_of(client: httpx.Client) -> dict[str, int]:
    """How many programs the router knows, by model."""
    models = client.get("/admin/router").json()["models"]
    return {model: view["programs"] for model, view in models.items()}


def test_a_class_leads_by_tools_and_its_program_stays(user: httpx.Client) -> None:
    before = programs_of(user)
    assert answered_by(ask(user, "auto:agent", "coding", tools=TOOLS)) == "coder"
    assert answered_by(ask(user, "auto:agent", "coding")) == "coder"
    assert answered_by(ask(user, "auto:agent", "talking")) == "tiny"
    assert answered_by(ask(user, "auto:agent", "talking", tools=TOOLS)) == "tiny"
    came = {model: number - before[model] for model, number in programs_of(user).items()}
    assert came == {"tiny": 1, "coder": 1}
    assert user.get("/v1/programs/coding").json()["num_turns"] == 2


def test_a_stream_of_a_class_says_which_model_it_is(user: httpx.Client) -> None:
    with OpenAI(base_url=f"{user.base_url}/v1", api_key=USER, max_retries=0) as openai:
        stream = openai.chat.completions.create(
            model="auto:agent", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, stream=True
        )
        assert {chunk.model for chunk in stream} == {"tiny"}


def test_what_is_not_served_is_told(user: httpx.Client) -> None:
    for model in ("auto:coding", "auto:", "other"):
        error = ask(user, model)
        assert (error.status_code, error.json()["error"]["param"]) == (404, "model"), model


def test_a_response_runs_on_the_model_that_its_class_leads_to(user: httpx.Client) -> None:
    body = {"model": "auto:agent", "input": "Hello", "max_output_tokens": 8}
    bash = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}
    plain = user.post("/v1/responses", json=body)
    coding = user.post("/v1/responses", json={**body, "tools": [bash]})
    assert [answered_by(plain), answered_by(coding)] == ["tiny", "coder"]


def test_drain_finds_the_replica_of_either_model(user: httpx.Client) -> None:
    for replica in [one["replica"] for one in user.get("/admin/statistics").json()["replicas"]]:
        for drain in (True, False):
            told = user.post("/admin/drain", json={"replica": replica, "drain": drain})
            assert told.json() == {"replica": replica, "draining": drain}
    assert user.post("/admin/drain", json={"replica": "nobody"}).status_code == 404
