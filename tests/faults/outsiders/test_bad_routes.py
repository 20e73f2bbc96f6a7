"""Every route with what schemathesis makes of its schema, tools with JSON Schemas of junk: 4xx in JSON, no 5xx."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # now: later, beside threads, CPython 3.11's parser once failed in it
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from cluster.config.schema import PolicyConfig
from cluster.responses.request import CreateResponse
from tests.faults.outsiders.guarded import Guarded, bearer
from tests.faults.promises import percentile

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CHAT = "/v1/chat/completions"
TEXT: dict[str, Any] = {"type": "string", "maxLength": 60}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 4}
SAMPLING: dict[str, Any] = {
    "model": {"enum": ["tiny"]},
    "max_tokens": COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 2},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "stop": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 3}]},
    "stream": {"type": "boolean"},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 3},
    "response_format": {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}},
    "vllm_xargs": {"type": "object", "maxProperties": 3},
    "program_id": TEXT,
    "nvext": {"type": "object"},
    "agentic_context": {"type": "object"},
}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "system", "assistant", "tool"]}, "content": TEXT, "tool_call_id": TEXT},
    "required": ["role", "content"],
}
FUNCTION = {
    "type": "object",
    "properties": {"name": {"enum": ["f", "g"]}, "parameters": {"type": "object"}},
    "required": ["name"],
}
OFFERED = {"type": "object", "properties": {"type": {"const": "function"}, "function": FUNCTION}, "required": ["type"]}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


BODIES: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT, "post"): closed(
        ["model", "messages"],
        **SAMPLING,
        messages={"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
        tools={"type": "array", "items": OFFERED, "maxItems": 2},
        tool_choice={"enum": ["auto", "none", "required"]},
    ),
    ("/v1/completions", "post"): closed(
        ["model", "prompt"],
        **SAMPLING,
        prompt={"anyOf": [TEXT, {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}}]},
    ),
    ("/v1/responses", "post"): CreateResponse.model_json_schema(ref_template="#/components/schemas/{model}"),
    ("/tokenize", "post"): closed(["model"], model=SAMPLING["model"], prompt=TEXT),
    ("/detokenize", "post"): closed(
        ["model"], model=SAMPLING["model"], tokens={"type": "array", "items": {"type": "integer"}}
    ),
    ("/admin/policy", "put"): PolicyConfig.model_json_schema(),
    ("/admin/drain", "post"): closed(["replica"], replica=TEXT, drain={"type": "boolean"}),
}

FEW = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}


@dataclass
class Seen:
    """What became of many requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    refusals_s: list[float] = field(default_factory=list)
    wrong: list[Any] = field(default_factory=list)

    def note(self, asked: Any, answer: Any, took_s: float) -> None:
        status = answer.status_code
        self.statuses[status] += 1
        if 400 <= status < 500:
            self.refusals_s.append(took_s)
        if status >= 500 or (status >= 400 and not _is_error(answer)):
            self.wrong.append((asked, status, answer.text[:300]))


def _is_error(answer: Any) -> bool:
    try:
        return bool(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def operations(url: str) -> Iterator[Any]:
    described = httpx.get(f"{url}/openapi.json", headers=bearer("ops"), timeout=60).json()
    parts = described.setdefault("components", {}).setdefault("schemas", {})
    for (path, method), body in BODIES.items():
        parts |= body.pop("$defs", {})
        described["paths"][path][method]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    for operation in schemathesis.openapi.from_dict(described).get_all_operations():
        yield operation.ok()


def quickly(examples: int, is_long: bool) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not is_long,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def ask_much(operation: Any, mode: GenerationMode, examples: settings, url: str, seen: Seen) -> None:
    body = str(BODIES.get((operation.path, operation.method)))

    @examples
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = {key: few for key, few in FEW.items() if key in body} | case.body
        began = time.perf_counter()
        answer = case.call(base_url=url, headers=bearer("ops"), timeout=60)
        seen.note((case.method, case.formatted_path, case.body), answer, time.perf_counter() - began)

    with suppress(Unsatisfiable):  # nothing of a route without parameters can be wrong
        ask()


def test_every_route_with_every_kind_of_body(guarded: Guarded, is_long: bool, promised: Any) -> None:
    before, seen, routes = guarded.workers(), Seen(), 0
    for operation in operations(guarded.url):
        routes += 1
        has_body = (operation.path, operation.method) in BODIES
        examples = (300 if is_long else 6) if has_body else (50 if is_long else 2)
        for mode in GenerationMode:
            ask_much(operation, mode, quickly(examples, is_long), guarded.url, seen)
    # Half of the routes take the id of something, which is made up here: they answer 404.
    assert routes > 25 and seen.statuses[400] > routes and seen.statuses[200] > routes // 2, seen.statuses
    assert not seen.wrong, seen.wrong[:5]
    fault = f"schemathesis over {routes} routes"
    promised(fault, f"5xx or no JSON, of {seen.statuses.total()}", len(seen.wrong), exactly=0)
    promised(fault, "p99 refusal", percentile(seen.refusals_s, 0.99) * 1e3, unit="ms", at_most=100)
    promised(fault, "workers that died", len(before.keys() - guarded.workers().keys()), exactly=0)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "nonsense"])
NUMBERS = st.integers(-3, 9) | st.just(10**12)


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b", "é", "$ref", ""]), inner, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, max_size=2),
            "properties": named | ANYTHING,
            "required": st.lists(st.sampled_from(["a", "b", "c"]), max_size=2) | ANYTHING,
            "items": inner,
            "minItems": NUMBERS,
            "maxItems": NUMBERS,
            "minLength": NUMBERS,
            "maxLength": NUMBERS,
            "minimum": NUMBERS,
            "pattern": st.sampled_from(["^a+$", "(", "(a+)+$", "\\p{L}", "a{1,99}", "(?=a)b"]),
            "format": st.sampled_from(["date", "email", "nonsense"]),
            "enum": st.lists(ANYTHING, max_size=3),
            "const": ANYTHING,
            "anyOf": st.lists(inner, max_size=2),
            "$ref": st.sampled_from(["#", "#/a", "http://127.0.0.1:9/", "#/$defs/x", ""]),
            "additionalProperties": inner | st.booleans(),
        },
    )


SCHEMAS = st.recursive(ANYTHING | st.just({"type": "string"}), _schema, max_leaves=8)


def test_tools_with_schemas_of_anything(guarded: Guarded, is_long: bool, promised: Any) -> None:
    before, seen = guarded.workers(), Seen()
    with guarded.client("acme") as client:

        @quickly(600 if is_long else 30, is_long)
        @given(
            parameters=_schema(SCHEMAS) | SCHEMAS,
            choice=st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}]),
            name=st.sampled_from(["f", "f", "f", "", "two words", "x" * 300]),
        )
        def ask(parameters: Any, choice: Any, name: str) -> None:
            tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            began = time.perf_counter()
            answer = client.post(CHAT, json={**body, "tools": tools, "tool_choice": choice})
            seen.note((tools, choice), answer, time.perf_counter() - began)

        ask()
        assert seen.statuses[200] and seen.statuses[400], seen.statuses
        assert not seen.wrong, seen.wrong[:5]
        alive = client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 1})
        assert alive.status_code == 200
    fault = "tools with JSON Schemas of anything"
    promised(fault, f"5xx or no JSON, of {seen.statuses.total()}", len(seen.wrong), exactly=0)
    promised(fault, "p99 refusal", percentile(seen.refusals_s, 0.99) * 1e3, unit="ms", at_most=100)
    promised(fault, "workers that died", len(before.keys() - guarded.workers().keys()), exactly=0)
