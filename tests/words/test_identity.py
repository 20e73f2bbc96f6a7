"""Conformance to every dialect, precedence, conflicts, bounds, and what is left of the body."""

import copy
import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config.schema import CaesuraConfig
from cluster.core.errors import BadRequest
from cluster.core.identity import identify
from cluster.core.identity_dialects import DIALECTS, MAX_NUMBER, Request
from cluster.core.program import MAX_ID_LENGTH, WIRE_KEY, Hints, ProgramIdentity

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

AGENTIC_CONTEXT = {
    "program_id": "p",
    "parent_program_id": "q",
    "expected_resume": 2.5,
    "deadline_seconds": 30,
    "expected_output_length": 2048,
    "kv_retention_ttl_seconds": 5,
    "priority": 10,
    "step_id": 7,
}
AGENTIC_IDENTITY = ProgramIdentity(
    program_id="p",
    parent_id="q",
    hints=Hints(priority=-10, expected_output_tokens=2048, deadline_s=30.0, expected_pause_s=2.5, retention_s=5.0),
)
AGENT_HINT = {"session_id": "p", "parent_session_id": "q", "cache_control": {"type": "ephemeral", "ttl": 300}}
AGENT_HINT_IDENTITY = ProgramIdentity("p", "q", hints=Hints(retention_s=300.0))
CALL_GREP = {"type": "function", "function": {"name": "grep"}}

ROWS: dict[str, tuple[dict[str, str], dict[str, Any], ProgramIdentity]] = {
    "x-session-id": ({"x-session-id": "p"}, {}, ProgramIdentity("p")),
    "x-session-id with parent": (
        {"x-session-id": "p", "x-parent-session-id": "q"},
        {},
        ProgramIdentity("p", "q"),
    ),
    "x-record": ({"x-session-id": "p", "x-record": "tokens"}, {}, ProgramIdentity("p", record="tokens")),
    "x-program-id": ({"x-program-id": "p"}, {}, ProgramIdentity("p")),
    "x-dynamo-session-id": (
        {"x-dynamo-session-id": "p", "x-dynamo-parent-session-id": "q", "x-dynamo-session-final": "true"},
        {},
        ProgramIdentity("p", "q", last_turn=True),
    ),
    "nvext agent_hints": (
        {},
        {"nvext": {"agent_hints": {"priority": 5, "osl": 64, "speculative_prefill": True}}},
        ProgramIdentity(hints=Hints(priority=-5, expected_output_tokens=64)),
    ),
    "nvext session_control open": (
        {},
        {"nvext": {"session_control": {"session_id": "p", "action": "open", "timeout": 60}}},
        ProgramIdentity("p"),
    ),
    "nvext session_control close": (
        {},
        {"nvext": {"session_control": {"session_id": "p", "action": "close"}}},
        ProgramIdentity("p", last_turn=True),
    ),
    "agentic_context in vllm_xargs": ({}, {"vllm_xargs": {"agentic_context": AGENTIC_CONTEXT}}, AGENTIC_IDENTITY),
    "agentic_context as text": ({}, {"vllm_xargs": {"agentic_context": json.dumps(AGENTIC_CONTEXT)}}, AGENTIC_IDENTITY),
    "agentic_context at the top": ({}, {"agentic_context": AGENTIC_CONTEXT}, AGENTIC_IDENTITY),
    "agentic_context that knows what comes": (
        {},
        {
            "agentic_context": {
                "expected_returned_length": 100,
                "expected_later_length": 900,
                "expected_later_turns": 3,
            }
        },
        ProgramIdentity(hints=Hints(expected_returned_tokens=100, expected_later_tokens=900, expected_later_turns=3)),
    ),
    "agentic_context that ends": (
        {},
        {"vllm_xargs": {"agentic_context": {"program_id": "p", "expected_resume": False}}},
        ProgramIdentity("p", last_turn=True),
    ),
    "agentic_context that comes back": (
        {},
        {"vllm_xargs": {"agentic_context": {"program_id": "p", "expected_resume": True}}},
        ProgramIdentity("p"),
    ),
    "agentic_context with a session": (
        {},
        {"vllm_xargs": {"agentic_context": {"session_id": "s"}}},
        ProgramIdentity("s"),
    ),
    "agentic_context with a session's agent": (
        {},
        {"vllm_xargs": {"agentic_context": {"session_id": "s", "agent_id": "lead"}}},
        ProgramIdentity("s:lead"),
    ),
    "Continuum": (
        {},
        {"vllm_xargs": {"job_id": 17, "this_func_call": "ls", "last_func_call": "cat", "is_last_step": 1}},
        ProgramIdentity("17", last_turn=True, hints=Hints(expected_tool="ls", last_tool="cat")),
    ),
    "agent_hint": ({}, {"agent_hint": AGENT_HINT}, AGENT_HINT_IDENTITY),
    "agent_hint in vllm_xargs": ({}, {"vllm_xargs": {"agent_hint": AGENT_HINT}}, AGENT_HINT_IDENTITY),
    "x-claude-code session": ({"x-claude-code-session-id": "p"}, {}, ProgramIdentity("p")),
    "x-claude-code agent of a session": (
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "p"},
        {},
        ProgramIdentity("p", "s"),
    ),
    "x-claude-code agent of an agent": (
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "p", "x-claude-code-parent-agent-id": "q"},
        {},
        ProgramIdentity("p", "q"),
    ),
    "Codex session-id": ({"session-id": "p"}, {}, ProgramIdentity("p")),
    "Codex thread-id": ({"thread-id": "p"}, {}, ProgramIdentity("p")),
    "Codex thread of a session": ({"session-id": "s", "thread-id": "p"}, {}, ProgramIdentity("p", "s")),
    "Codex first thread": ({"session-id": "p", "thread-id": "p"}, {}, ProgramIdentity("p")),
    "OpenCode x-session-affinity": ({"x-session-affinity": "p"}, {}, ProgramIdentity("p")),
    "AIBrix x-aibrix-session-key": ({"x-aibrix-session-key": "p"}, {}, ProgramIdentity("p")),
    "ThunderAgent program_id": ({}, {"program_id": "p"}, ProgramIdentity("p")),
    "vLLM session_id": ({}, {"session_id": "p"}, ProgramIdentity("p")),
    "vLLM vllm_xargs.session_id": ({}, {"vllm_xargs": {"session_id": "p"}}, ProgramIdentity("p")),
    "vLLM priority": ({}, {"priority": -3}, ProgramIdentity(hints=Hints(priority=-3))),
    "vLLM x-vllm-priority": ({"x-vllm-priority": "4"}, {}, ProgramIdentity(hints=Hints(priority=4))),
    "named tool_choice": ({}, {"tool_choice": CALL_GREP}, ProgramIdentity(hints=Hints(expected_tool="grep"))),
}


@pytest.mark.parametrize("row", ROWS)
def test_dialect(row: str) -> None:
    headers, extra, expected = ROWS[row]
    identified = identify({"content-type": "application/json", **headers}, {**CHAT, **extra})
    assert identified.identity == expected
    assert identified.conflicts == ()
    kept = {"tool_choice": extra["tool_choice"]} if "tool_choice" in extra else {}
    assert identified.body == {**CHAT, **kept}


SESSION = "01234567-89ab-cdef-0123-456789abcdef"
OTHER = SESSION.replace("0", "f")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"prompt_cache_key": SESSION}, SESSION),
        ({"prompt_cache_key": f"conversation_{SESSION}"}, f"conversation_{SESSION}"),
        ({"prompt_cache_key": "my-application"}, None),  # shared by all its conversations
        ({"prompt_cache_key": f"{SESSION}-shared"}, None),
        ({"prompt_cache_key": ["a"]}, None),
        ({"metadata": {"user_id": f"user_{'a' * 64}_account_{OTHER}_session_{SESSION}"}}, SESSION),
        ({"metadata": {"user_id": f"user_{'a' * 64}_account__session_{SESSION}"}}, SESSION),
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})}}, SESSION),
        ({"metadata": {"user_id": "somebody@example.com"}}, None),
        ({"metadata": {"user_id": "{not json"}}, None),
        ({"metadata": {"user_id": "{" + '"a":{' * 500}}, None),
        ({"metadata": {"user_id": json.dumps({"session_id": "x" * 300})}}, None),
        ({"metadata": {"user_id": 7}}, None),
        ({"metadata": "text"}, None),
        ({"client_metadata": {"session_id": "s", "request_kind": "turn"}}, "s"),
        ({"client_metadata": {"thread_id": "t", "session_id": "s"}}, "t"),
        ({"client_metadata": {"window_number": 1}}, None),
        ({"client_metadata": {"session_id": 1}}, None),
        ({"client_metadata": None}, None),
        ({"client_metadata": {"session_id": "s"}, "prompt_cache_key": SESSION}, "s"),
    ],
)
def test_fields_that_name_a_session_in_some_requests(extra: dict[str, Any], expected: str | None) -> None:
    identified = identify({}, {**CHAT, **extra})
    assert identified.identity == ProgramIdentity(expected)
    assert identified.body == {**CHAT, **extra}
    assert identified.conflicts == ()


@pytest.mark.parametrize(
    ("headers", "extra"),
    [({"x-session-id": "p"}, {}), ({"session-id": "p"}, {}), ({}, {"session_id": "p"})],
)
def test_a_session_that_is_named_counts_more_than_a_cache_key(headers: dict[str, str], extra: dict[str, Any]) -> None:
    body = {**CHAT, **extra, "prompt_cache_key": SESSION, "client_metadata": {"session_id": "s"}}
    identified = identify({**headers, "x-correlation-id": "c"}, body, session_headers=("x-correlation-id",))
    assert identified.identity == ProgramIdentity("p")
    assert identified.conflicts == ()


def test_the_configured_headers_are_read_last_and_in_their_order() -> None:
    names = CaesuraConfig.model_validate({"http": {"session_headers": ["X_My_Session", "X-Correlation-ID"]}})
    ours = names.http.session_headers
    assert ours == ("x-my-session", "x-correlation-id")
    assert CaesuraConfig().http.session_headers == ("x-correlation-id",)
    sent = {"X-Correlation-Id": "c", "X-My-Session": "mine"}
    assert identify(sent, CHAT, session_headers=ours).identity == ProgramIdentity("mine")
    assert identify(sent, CHAT, session_headers=ours[1:]).identity == ProgramIdentity("c")
    assert identify(sent, CHAT).identity == ProgramIdentity()
    assert identify(sent, {**CHAT, "prompt_cache_key": SESSION}, session_headers=ours).identity.program_id == SESSION
    with pytest.raises(BadRequest) as caught:
        identify({"x-my-session": "x" * 300}, CHAT, session_headers=ours)
    assert caught.value.param == "x-my-session"


@pytest.mark.parametrize("name", ["", "a header", "x:y", 3])
def test_a_configured_header_has_a_headers_name(name: object) -> None:
    with pytest.raises(ValueError, match="session_headers"):
        CaesuraConfig.model_validate({"http": {"session_headers": [name]}})


def test_every_dialect_has_a_row() -> None:
    unseen = {dialect.name for dialect in DIALECTS}
    for headers, extra, _ in ROWS.values():
        request = Request.of(headers, {**CHAT, **extra})
        unseen -= {dialect.name for dialect in DIALECTS if any(dialect.extract(request))}
    assert unseen == {"session of agentic_context"}  # the same rule as "session of vllm_xargs.agentic_context"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, CHAT),
        ({"authorization": "Bearer x", "x-request-id": "r"}, {**CHAT, "vllm_xargs": {"top_w": 0.5}, "stream": True}),
        ({"x-session-id": "  "}, {**CHAT, "tool_choice": "auto", "metadata": {"session_id": "no"}}),
        ({}, {"prompt": [1, 2, 3], "vllm_xargs": {}}),
    ],
    ids=["plain", "with vllm_xargs", "blank header", "empty vllm_xargs"],
)
def test_without_identity_untouched(headers: dict[str, str], body: dict[str, Any]) -> None:
    identified = identify(headers, body)
    assert identified.identity == ProgramIdentity()
    assert identified.body == body


def test_headers_in_any_spelling() -> None:
    assert identify({"X_Session_ID": "p"}, CHAT).identity.program_id == "p"
    both = identify({"x_session_id": "underscores", "x-session-id": "hyphens"}, CHAT)
    assert both.identity.program_id == "hyphens"
    assert identify({"x-session-id": "hyphens", "x_session_id": "underscores"}, CHAT).identity == both.identity


PRECEDENCE: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {"vllm_xargs": {"agentic_context": {"program_id": "0"}}}),
    ({}, {"agentic_context": {"program_id": "1"}}),
    ({}, {"agent_hint": {"session_id": "2"}}),
    ({}, {"nvext": {"session_control": {"session_id": "3"}}}),
    ({}, {"session_id": "4"}),
    ({}, {"program_id": "5"}),
    ({}, {"vllm_xargs": {"job_id": "6"}}),
    ({}, {"vllm_xargs": {"session_id": "7"}}),
    ({"x-session-id": "8"}, {}),
    ({"x-program-id": "9"}, {}),
    ({"x-dynamo-session-id": "10"}, {}),
    ({"x-claude-code-session-id": "11"}, {}),
    ({"session-id": "12"}, {}),
    ({"x-session-affinity": "13"}, {}),
    ({"x-aibrix-session-key": "14"}, {}),
]


@pytest.mark.parametrize("first", range(len(PRECEDENCE)))
def test_precedence_of_programs(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {"vllm_xargs": {}}
    for said_in_headers, said_in_body in reversed(PRECEDENCE[first:]):
        headers |= said_in_headers
        body["vllm_xargs"] |= said_in_body.get("vllm_xargs", {})
        body |= {key: value for key, value in said_in_body.items() if key != "vllm_xargs"}
    identified = identify(headers, body)
    assert identified.identity.program_id == str(first)
    assert len(identified.conflicts) == len(PRECEDENCE) - first - 1


def test_precedence_holds_for_each_field() -> None:
    identified = identify(
        {"x-dynamo-session-id": "d", "x-dynamo-session-final": "1", "x-vllm-priority": "9"},
        {"program_id": "p", "nvext": {"agent_hints": {"osl": 7}}, "priority": 2, "tool_choice": CALL_GREP},
    )
    assert identified.identity == ProgramIdentity(
        "p", last_turn=True, hints=Hints(priority=2, expected_output_tokens=7, expected_tool="grep")
    )


def test_conflicts_name_both_sources() -> None:
    identified = identify({"x-session-id": "b", "x-program-id": "a"}, {"session_id": "a", "priority": 1})
    assert identified.identity.program_id == "a"
    (conflict,) = identified.conflicts
    assert conflict == "program_id: session_id says 'a', which counts; x-session-id says 'b'"


def test_sources_that_agree_do_not_conflict() -> None:
    body = {"session_id": "a", "program_id": "a", "priority": 1}
    assert identify({"x-session-id": "a", "x-vllm-priority": "1"}, body).conflicts == ()


def test_a_program_is_not_its_own_parent() -> None:
    body = {"agent_hint": {"session_id": "a", "parent_session_id": "a"}}
    assert identify({}, body).identity == ProgramIdentity("a")


def test_what_vllm_serves_from_stays() -> None:
    body = {
        **CHAT,
        "vllm_xargs": {"job_id": "p", "top_w": 0.5, WIRE_KEY: '{"tenant":"someone else"}'},
        "tool_choice": CALL_GREP,
        "priority": 1,
        "cache_salt": "s",
    }
    assert identify({}, body).body == {
        **CHAT,
        "vllm_xargs": {"top_w": 0.5},
        "tool_choice": CALL_GREP,
        "cache_salt": "s",
    }


def test_tenant_scopes_the_key() -> None:
    assert identify({"x-session-id": "p"}, CHAT).identity.key == "default/p"
    assert identify({"x-session-id": "p"}, CHAT, tenant="t").identity.key == "t/p"
    for tenant in ("a/b", "a\nb", "a" * (MAX_ID_LENGTH + 1)):
        with pytest.raises(BadRequest) as refused:
            identify({}, CHAT, tenant=tenant)
        assert refused.value.param == "tenant"


def test_ids_at_the_bound_and_trimmed() -> None:
    longest = "x" * MAX_ID_LENGTH
    assert identify({"x-session-id": f"  {longest} "}, CHAT).identity.program_id == longest
    assert identify({}, {"program_id": -12}).identity.program_id == "-12"
    assert identify({}, {"program_id": "é日"}).identity.program_id == "é日"
    assert identify({}, {"program_id": None, "session_id": ""}).identity == ProgramIdentity()


BAD: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"x-session-id": "x" * (MAX_ID_LENGTH + 1)}, {}, "x-session-id"),
    ({"x-program-id": "a\tb"}, {}, "x-program-id"),
    ({"x-dynamo-session-final": "maybe"}, {}, "x-dynamo-session-final"),
    ({"x-vllm-priority": "high"}, {}, "x-vllm-priority"),
    ({"x-vllm-priority": "nan"}, {}, "x-vllm-priority"),
    ({"x-claude-code-agent-id": "\x00"}, {}, "x-claude-code-agent-id"),
    ({}, {"session_id": "a\u2028b"}, "session_id"),
    ({}, {"program_id": "\ud800"}, "program_id"),
    ({}, {"program_id": True}, "program_id"),
    ({}, {"program_id": 1.5}, "program_id"),
    ({}, {"program_id": ["a"]}, "program_id"),
    ({}, {"program_id": 10**MAX_ID_LENGTH}, "program_id"),
    ({}, {"program_id": 10**9999}, "program_id"),
    ({}, {"priority": "soon"}, "priority"),
    ({}, {"priority": True}, "priority"),
    ({}, {"priority": 0.5}, "priority"),
    ({}, {"priority": MAX_NUMBER + 1}, "priority"),
    ({}, {"priority": -(10**400)}, "priority"),
    ({}, {"vllm_xargs": ["a"]}, "vllm_xargs"),
    ({}, {"vllm_xargs": "a"}, "vllm_xargs"),
    ({}, {"vllm_xargs": {"is_last_step": 2}}, "vllm_xargs.is_last_step"),
    ({}, {"vllm_xargs": {"is_last_step": {}}}, "vllm_xargs.is_last_step"),
    ({}, {"vllm_xargs": {"job_id": {}}}, "vllm_xargs.job_id"),
    ({}, {"vllm_xargs": {"agentic_context": []}}, "vllm_xargs.agentic_context"),
    ({}, {"vllm_xargs": {"agentic_context": "{"}}, "vllm_xargs.agentic_context"),
    ({}, {"vllm_xargs": {"agentic_context": "[" * 100_000}}, "vllm_xargs.agentic_context"),
    ({}, {"vllm_xargs": {"agentic_context": "[1]"}}, "vllm_xargs.agentic_context"),
    (
        {},
        {"vllm_xargs": {"agentic_context": {"deadline_seconds": -1}}},
        "vllm_xargs.agentic_context.deadline_seconds",
    ),
    ({}, {"agentic_context": {"deadline_seconds": float("nan")}}, "agentic_context.deadline_seconds"),
    ({}, {"agentic_context": {"expected_resume": float("inf")}}, "agentic_context.expected_resume"),
    ({}, {"agentic_context": {"expected_output_length": -1}}, "agentic_context.expected_output_length"),
    ({}, {"agentic_context": {"expected_output_length": False}}, "agentic_context.expected_output_length"),
    ({}, {"agentic_context": "{}"}, "agentic_context"),
    ({}, {"agentic_context": {"session_id": "s" * MAX_ID_LENGTH, "agent_id": "a"}}, "agentic_context.session_id"),
    ({}, {"agent_hint": {"cache_control": 300}}, "agent_hint.cache_control"),
    ({}, {"agent_hint": {"cache_control": {"ttl": "5m"}}}, "agent_hint.cache_control.ttl"),
    ({}, {"nvext": []}, "nvext"),
    ({}, {"nvext": {"agent_hints": 1}}, "nvext.agent_hints"),
    ({}, {"nvext": {"agent_hints": {"osl": [1]}}}, "nvext.agent_hints.osl"),
    ({}, {"nvext": {"session_control": {"action": ["close"]}}}, "nvext.session_control.action"),
    (
        {},
        {"tool_choice": {"type": "function", "function": {"name": "x" * (MAX_ID_LENGTH + 1)}}},
        "tool_choice.function.name",
    ),
]


@pytest.mark.parametrize(("headers", "body", "param"), BAD, ids=[f"{i}-{row[2]}" for i, row in enumerate(BAD)])
def test_refused_with_the_field(headers: dict[str, str], body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        identify(headers, body)
    assert refused.value.param == param
    assert refused.value.status == 400
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("choice", ["auto", {"type": "function"}, {"function": {"name": 3}}, 7, ["x"], None])
def test_tool_choice_is_left_to_vllm(choice: Any) -> None:
    body = {**CHAT, "tool_choice": choice}
    assert identify({}, body).identity == ProgramIdentity()
    assert identify({}, body).body == body


NAMES = sorted(
    {key for _, extra, _ in ROWS.values() for key in extra}
    | {key for _, extra, _ in ROWS.values() for value in extra.values() if isinstance(value, dict) for key in value}
    | set(AGENTIC_CONTEXT)
    | {"session_control", "agent_hints", "action", "ttl", "osl", "function", "name", "agent_id", WIRE_KEY}
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**400),
    st.floats(),
    st.text(),
    st.sampled_from(["close", "true", "1", "nan", "1e999", '{"program_id": 3}', "[]"]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), inner, max_size=5),
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), JSON, max_size=6)
HEADERS = st.dictionaries(
    st.one_of(st.sampled_from(sorted({name for headers, _, _ in ROWS.values() for name in headers})), st.text()),
    st.text(max_size=2 * MAX_ID_LENGTH),
    max_size=6,
)


@given(headers=HEADERS, body=BODIES)
def test_any_request_is_identified_or_refused(headers: dict[str, str], body: dict[str, Any]) -> None:
    before = copy.deepcopy((headers, body))
    try:
        identified = identify(headers, body)
    except BadRequest as refused:
        assert refused.param
    else:
        assert identified.body.keys() <= body.keys()
        assert WIRE_KEY not in (identified.body.get("vllm_xargs") or {})
        # What was read reaches the scheduler: the wire carries it whole.
        assert ProgramIdentity.decode(identified.identity.encode()) == identified.identity
        for name in ("program_id", "parent_id"):
            value = getattr(identified.identity, name)
            assert value is None or (0 < len(value) <= MAX_ID_LENGTH and value.isprintable())
        again = identify({}, identified.body).identity
        assert again in (ProgramIdentity(), ProgramIdentity(hints=Hints(expected_tool=again.hints.expected_tool)))
    assert repr((headers, body)) == repr(before)  # by repr, since NaN is not equal to itself


def test_every_hint_has_a_source() -> None:
    heard = {
        field.name
        for _, _, identity in ROWS.values()
        for field in fields(Hints)
        if getattr(identity.hints, field.name) is not None
    }
    assert heard == {field.name for field in fields(Hints)}


def test_an_object_that_comes_as_text_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"program_id": "p", "priority": 2, "expected_output_length": 5}'
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda source: parsed.append(source) or loads(source))
    identified = identify({}, {"vllm_xargs": {"agentic_context": text}})
    assert (identified.identity.program_id, identified.identity.hints.expected_output_tokens) == ("p", 5)
    assert parsed == [text]
