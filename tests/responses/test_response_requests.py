"""What a request for a response becomes, and which requests are refused."""

import json

import msgspec
import pytest

from cluster.core.errors import BadRequest
from cluster.core.program import ProgramIdentity
from cluster.core.tools import ToolId, ToolOffer, function_object
from cluster.responses.compaction import packed
from cluster.responses.events import unchanging
from cluster.responses.input_items import input_items
from cluster.responses.offers import brought
from cluster.responses.request import read_request
from cluster.responses.spec import RequestContext, run_spec
from cluster.runs.events import Accepted, Compaction, Limits, encode
from cluster.runs.state import fold
from tests.responses.run_logs import COMPLETED, LIMITS, listed, turn

SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {"q": {}}}}
SEARCHING = {"type": "function", "name": "search"}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
DOCS = {"type": "mcp", "server_label": "docs", "server_url": "https://docs.example/mcp"}
LISTINGS = {
    "docs": [
        listed("docs", "read", "reads", read_only=True),
        listed("docs", "write", "writes"),
    ]
}
CLOCK = {"type": "object", "x": 1}
REGISTERED = {
    "clock": ToolOffer(
        "clock", function_object("clock", "the time", CLOCK), here=True, tool=ToolId.of_operator("clock")
    )
}


def around(**fields):
    known = {
        "run_id": "resp_1",
        "created_s": 1.0,
        "identity": ProgramIdentity(),
        "model": "m",
        "limits": LIMITS,
        "registered": REGISTERED,
        "listings": LISTINGS,
    }
    return RequestContext(**{**known, **fields})


def allowed(mode, *tools):
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": list(tools)}}


def wanted(**body):
    return run_spec(read_request({"input": "hi", **body}), around())


def spec(**body):
    return wanted(**body).spec


def test_a_plain_question() -> None:
    made = spec()
    assert made.messages == ({"role": "user", "content": "hi"},)
    assert (made.program, made.store, made.background, made.parallel) == ("resp_1", True, False, True)
    assert ProgramIdentity.decode(made.identity).program_id == "resp_1"
    assert made.limits == LIMITS


def test_only_a_request_without_a_turn_may_be_empty() -> None:
    assert not spec(input=[], generate=False).generate
    for body in ({}, {"generate": True}, {"generate": None}):
        assert spec(**body).generate
        with pytest.raises(BadRequest, match="it is empty"):
            spec(input=[], **body)


def test_a_response_may_have_a_cache_salt() -> None:
    assert spec(cache_salt="s").sampling == {"cache_salt": "s"}


def test_instructions_are_a_system_message_at_the_front() -> None:
    made = spec(instructions="be brief")
    assert made.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})


def test_a_program_that_the_request_names_is_kept() -> None:
    made = run_spec(read_request({"input": "hi"}), around(identity=ProgramIdentity("agent-7", tenant="t"))).spec
    assert (made.program, made.tenant) == ("agent-7", "t")


def test_only_what_nobody_can_go_on_with_is_a_programs_last_run() -> None:
    named = run_spec(read_request({"input": "hi", "store": False}), around(identity=ProgramIdentity("agent-7"))).spec
    assert (spec().last, spec(store=False).last, named.last) == (False, True, False)


def test_a_request_may_ask_for_less_than_the_operator_allows_and_not_for_more() -> None:
    made = spec(max_output_tokens=5, max_turns=2, max_tool_calls=10**6)
    assert made.limits == Limits(turns=2, tool_calls=16, output_tokens=5, wall_s=60.0, turn_attempts=3)


def test_sampling_goes_to_each_turn_in_the_words_of_chat_completions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = spec(
        temperature=0,
        top_p=0.5,
        seed=7,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}},
    )
    assert made.sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "seed": 7,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    }


def test_what_clients_send_for_openais_own_sake_is_no_error() -> None:
    made = spec(
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        service_tier="auto",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        text={"verbosity": "medium"},
        conversation=None,
        prompt=None,
        tools=[],
        top_logprobs=0,
    )
    assert made.echo["user"] == "u"
    assert made.sampling == {}


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_function_is_the_callers_and_a_registered_tool_is_ours() -> None:
    theirs, ours = spec(tools=[SEARCH, {"type": "function", "name": "clock", "server_side": True}]).offers
    assert not theirs.here
    assert theirs.function == {"name": "search", "parameters": SEARCH["parameters"]}
    assert ours.here
    assert ours == REGISTERED["clock"]


def test_tools_of_a_server_have_its_label_and_need_consent_unless_the_request_says_otherwise() -> None:
    made = spec(tools=[DOCS])
    assert [(one.name, one.server, one.server_tool, one.here) for one in made.offers] == [
        ("docs__read", "docs", "read", True),
        ("docs__write", "docs", "write", True),
    ]
    assert all(one.approval for one in made.offers)
    assert made.definitions == {"docs": {"kind": "mcp", "url": "https://docs.example/mcp"}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_tools": ["write"]}, {"docs__write"}),
        ({"allowed_tools": {"tool_names": ["read", "gone"]}}, {"docs__read"}),
        ({"allowed_tools": {"read_only": True}}, {"docs__read"}),
        ({"allowed_tools": []}, set()),
    ],
)
def test_a_request_may_want_some_of_a_servers_tools(fields, names) -> None:
    assert {one.name for one in spec(tools=[DOCS | fields]).offers} == names


@pytest.mark.parametrize(
    ("approval", "asked"),
    [
        ("never", set()),
        ("always", {"docs__read", "docs__write"}),
        ({"never": {"tool_names": ["read"]}}, {"docs__write"}),
        ({"never": {"read_only": True}}, {"docs__write"}),
        ({"always": {"tool_names": ["read"]}, "never": {"tool_names": ["read", "write"]}}, {"docs__read"}),
        ({"always": {"tool_names": ["read"]}}, {"docs__read", "docs__write"}),
    ],
)
def test_which_calls_need_consent(approval, asked) -> None:
    offers = spec(tools=[DOCS | {"require_approval": approval}]).offers
    assert {one.name for one in offers if one.approval} == asked


def test_secrets_are_beside_the_run_and_not_in_its_log() -> None:
    secret = DOCS | {"authorization": "token-1", "headers": {"X-Key": "token-2", "authorization": "token-3"}}
    made = wanted(tools=[secret])
    assert made.brought.secrets == {"docs": {"headers": {"X-Key": "token-2", "Authorization": "Bearer token-1"}}}
    assert made.brought.whole()["docs"]["headers"]["X-Key"] == "token-2"
    assert b"token-" not in encode(Accepted(made.spec))
    assert "token-" not in repr(read_request({"input": "hi", "tools": [secret]}))


def test_choices_are_chat_completions() -> None:
    made = spec(
        tools=[SEARCH, DOCS],
        tool_choice="auto",
        tool_choices=[
            {"type": "function", "name": "search"},
            {"type": "mcp", "server_label": "docs", "name": "read"},
            "required",
        ],
    )
    assert made.tool_choice == "auto"
    assert made.tool_choices == (
        {"type": "function", "function": {"name": "search"}},
        {"type": "function", "function": {"name": "docs__read"}},
        "required",
    )


# --- bad input --------------------------------------------------------------------------------------------------------


def message(**fields):
    return {"input": [{"role": "user", "content": "hi"} | fields]}


BAD = [
    ("a prompt of OpenAI's", {"prompt": {"id": "p"}}, "prompt"),
    ("a stored prompt", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("verbosity", {"text": {"verbosity": "shouted"}}, "text.verbosity"),
    ("truncation", {"truncation": "middle"}, "truncation"),
    ("top logprobs", {"top_logprobs": 21}, "top_logprobs"),
    ("a tool without a type", {"tools": [SEARCH, {"name": "x"}]}, "tools.1"),
    ("a hosted tool chosen", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ("nothing said", {"input": []}, "input"),
    ("input of a wrong type", {"input": 5}, "input"),
    ("a tool without a name", {"tools": [{"type": "function"}]}, "tools.0.name"),
    ("a bad name", {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    (
        "an unknown registered tool",
        {"tools": [{"type": "function", "name": "no", "server_side": True}]},
        "tools.0.name",
    ),
    ("two tools of a name", {"tools": [SEARCH, SEARCH]}, "tools.1.name"),
    ("two servers of a label", {"tools": [DOCS, DOCS]}, "tools.1.server_label"),
    ("a server that does not answer", {"tools": [DOCS | {"server_label": "gone"}]}, "tools.0"),
    ("a connector", {"tools": [{"type": "mcp", "server_label": "x", "connector_id": "y"}]}, "tools.0.connector_id"),
    ("a server by no URL", {"tools": [DOCS | {"server_url": "file:///x"}]}, "tools.0.server_url"),
    ("a header with a line break", {"tools": [DOCS | {"headers": {"a": "b\r\nc: d"}}]}, "tools.0.headers.a"),
    ("an unknown choice", {"tools": [SEARCH], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ("a hosted choice", {"tools": [SEARCH], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ("a required call of nothing", {"tool_choice": "required"}, "tool_choice"),
    ("an unknown forced choice", {"tool_choices": [{"type": "function", "name": "no"}]}, "tool_choices.0"),
    ("unstored background", {"background": True, "store": False}, "background"),
    ("too much metadata", {"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ("a long key", {"metadata": {"k" * 65: ""}}, "metadata." + "k" * 65),
    ("a long value", {"metadata": {"k": "v" * 513}}, "metadata.k"),
    ("no tokens", {"max_output_tokens": 0}, "max_output_tokens"),
    ("a number as text", {"max_output_tokens": "5"}, "max_output_tokens"),
    ("too hot", {"temperature": 2.5}, "temperature"),
    ("an unknown effort", {"reasoning": {"effort": "mighty"}}, "reasoning.effort"),
    ("an unknown format", {"text": {"format": {"type": "xml"}}}, "text.format"),
    ("a schema without a name", {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ("an item of nobody", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
    ("an unknown item", {"input": [{"type": "telepathy_call"}]}, "input.0"),
    ("an allowed tool that is none", allowed("auto", {"type": "function", "name": "no"}), "tool_choice.tools.0"),
    ("a required call of no allowed tool", allowed("required", {"type": "web_search"}), "tool_choice"),
    ("allowed tools of one turn", {"tool_choices": [allowed("auto", SEARCHING)["tool_choice"]]}, "tool_choices.0"),
    ("a custom tool without a name", {"tools": [{"type": "custom"}]}, "tools.0.name"),
    (
        "a grammar of another syntax",
        {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "abnf"}}]},
        "tools.0.format.syntax",
    ),
    ("an unknown role", message(role="tool"), "input.0.role"),
    (
        "a call without its name",
        {"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]},
        "input.0.name",
    ),
    ("an unknown response", {"previous_response_id": "resp_0"}, "previous_response_id"),
]


@pytest.mark.parametrize(("body", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_be_done_is_refused_by_its_field(body, param) -> None:
    with pytest.raises(BadRequest) as caught:
        wanted(**body)
    assert caught.value.param == param
    assert param in caught.value.message or caught.value.code
    assert caught.value.status in (400, 404, 424)


def test_a_spec_survives_its_log() -> None:
    made = spec(tools=[SEARCH, DOCS], instructions="x", metadata={"a": "b"}, tool_choice="none")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=type(made)) == made
    assert json.dumps(made.echo)


@pytest.mark.parametrize(
    ("label", "says"),
    [("docs__db", "must not contain '__'"), ("docs_", "nor end with '_'"), ("clock", "cannot be a label here")],
)
def test_a_label_that_could_stand_for_something_else_is_refused(label, says) -> None:
    """A server labelled X__db with a tool admin reached the operator's server X and its tool db__admin."""
    with pytest.raises(BadRequest, match=says) as refused:
        brought(read_request({"input": "hi", "tools": [SEARCH, DOCS | {"server_label": label}]}), taken={"clock"})
    assert refused.value.param == "tools.1.server_label"


def test_a_consent_is_for_the_tool_that_was_shown_and_not_for_one_that_has_its_name_now() -> None:
    request = {"type": "mcp_approval_request", "id": "r1", "server_label": "docs", "name": "a.b", "arguments": "{}"}
    consent = {"type": "mcp_approval_response", "approval_request_id": "r1", "approve": True}
    body = {"input": [{"role": "user", "content": "go"}, request, consent], "tools": [DOCS]}
    shown = msgspec.structs.replace(listed("docs", "a.b"), name="docs__a_b")
    same = run_spec(read_request(body), around(listings={"docs": [shown]}))
    assert [call.tool for call in same.spec.approved] == [ToolId.of_request("docs", "a.b")]
    assert listed("docs", "a_b").name == same.spec.approved[0].name
    with pytest.raises(BadRequest, match="is not among them"):
        run_spec(read_request(body), around(listings={"docs": [listed("docs", "a_b")]}))


def test_a_chosen_tool_of_a_server_is_found_by_both_names() -> None:
    listings = {"docs": [listed("docs", "a.b")]}
    chosen = {"type": "mcp", "server_label": "docs", "name": "a.b"}
    body = {"input": "hi", "tools": [DOCS], "tool_choice": chosen}
    made = run_spec(read_request(body), around(listings=listings)).spec
    assert made.tool_choice == {"type": "function", "function": {"name": made.offers[0].name}}
    with pytest.raises(BadRequest, match="not found"):
        run_spec(read_request(body | {"tool_choice": {**chosen, "name": "a_b"}}), around(listings=listings))


def test_a_tool_that_cannot_be_used_is_not_offered_and_its_listing_says_why() -> None:
    deep = msgspec.structs.replace(listed("docs", "deep"), unusable="its parameters are too deep")
    made = run_spec(
        read_request({"input": "hi", "tools": [DOCS]}), around(listings={"docs": [deep, *LISTINGS["docs"]]})
    )
    assert [one.name for one in made.spec.offers] == ["docs__read", "docs__write"]
    assert made.spec.echo["unusable_tools"] == {"docs": "tools that cannot be used: deep: its parameters are too deep"}
    assert "unusable_tools" not in spec(tools=[DOCS]).echo


def test_a_registered_tool_that_cannot_be_used_is_refused_with_the_reason() -> None:
    deep = ToolOffer(
        "db__deep",
        {},
        here=True,
        tool=ToolId.of_request("db", "deep"),
        server_tool="deep",
        unusable="its parameters are too deep",
    )
    registered = REGISTERED | {"db__deep": deep}
    for name, says in (("db__deep", "cannot be used: its parameters are too deep"), ("x", "registered are: clock$")):
        body = {"input": "hi", "tools": [SEARCH, {"type": "function", "name": name, "server_side": True}]}
        with pytest.raises(BadRequest, match=says) as refused:
            run_spec(read_request(body), around(registered=registered))
        assert refused.value.param == "tools.1.name"


# --- what other servers take, and what has no effect here ------------------------------------------------------------


def test_what_has_no_effect_is_ignored_and_named() -> None:
    made = spec(
        temprature=1,
        truncation="auto",
        include=["message.output_text.sources", "reasoning.encrypted_content"],
        text={"verbosity": "low", "tone": "kind", "format": {"type": "text", "colour": "red"}},
        tools=[SEARCH | {"cached": True}, {"type": "web_search", "context": "low"}, {"type": "image_generation"}],
        reasoning={"effort": "low", "context": "some_turns", "mode": "pro"},
        input=[
            {"role": "user", "content": "hi", "mood": "good"},
            {"type": "web_search_call", "id": "ws_1"},
            {"type": "program", "id": "pg_1", "code": "1"},
            {"type": "program_output", "id": "po_1", "output": "1"},
        ],
        tool_choice=allowed("auto", SEARCHING, {"type": "web_search"})["tool_choice"],
    )
    assert made.echo["ignored"] == [
        "include.message.output_text.sources",
        "input.program",
        "input.program_output",
        "input.web_search_call",
        "reasoning.context",
        "reasoning.mode",
        "temprature",
        "text.format.colour",
        "text.tone",
        "text.verbosity",
        "tool_choice.web_search",
        "tools.cached",
        "tools.image_generation",
        "tools.web_search",
    ]
    assert [offer.name for offer in made.offers] == ["search"]
    assert [tool["name"] for tool in made.echo["tools"]] == ["search"]
    shown = unchanging(made).to_dict()
    assert shown["caesura"] == {"ignored": made.echo["ignored"]}
    assert shown["reasoning"] == {"effort": "low"}


def test_a_request_without_such_fields_names_none() -> None:
    usual = {"context": "auto", "mode": "standard"}
    made = spec(tools=[SEARCH], reasoning=usual)
    assert "ignored" not in made.echo
    assert made.echo["reasoning"] == usual


def test_the_functions_of_a_namespace_are_offered_by_their_names() -> None:
    agents = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}, SEARCH]}
    assert [offer.name for offer in spec(tools=[agents]).offers] == ["spawn", "search"]
    with pytest.raises(BadRequest) as caught:
        spec(tools=[SEARCH, agents])
    assert caught.value.param == "tools.1.tools.1.name"


def test_a_custom_tool_is_a_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    group = {"type": "namespace", "name": "files", "tools": [PATCH]}
    made = spec(
        tools=[group, PATCH | {"name": "run", "format": grammar}], tool_choice={"type": "custom", "name": "run"}
    )
    patch, run = made.offers
    assert (patch.custom, patch.namespace, patch.here) == (True, "files", False)
    assert patch.function["parameters"]["required"] == ["input"]
    assert patch.description == "Changes files."
    assert 'start: "a"' in run.description
    assert made.tool_choice == {"type": "function", "function": {"name": "run"}}
    assert unchanging(made).tools[1].to_dict()["format"] == grammar


def test_calls_of_custom_tools_in_a_history() -> None:
    made = spec(
        tools=[PATCH],
        input=[
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'say "hi"'},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "ha", "status": "incomplete"},
        ],
    )
    asked, answer = made.messages
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"input": 'say "hi"'}
    assert answer == {"role": "tool", "tool_call_id": "c", "content": "done"}
    with pytest.raises(BadRequest, match="No tool output found"):
        spec(input=[{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": ""}])


def test_the_model_is_offered_only_the_tools_that_are_allowed() -> None:
    tools = [SEARCH, PATCH, DOCS]
    server = {"type": "mcp", "server_label": "docs"}
    made = spec(tools=tools, **allowed("required", server, {"type": "custom", "name": "patch"}))
    assert [offer.name for offer in made.offers] == ["patch", "docs__read", "docs__write"]
    assert made.tool_choice == "required"
    one = spec(tools=tools, **allowed("auto", server | {"name": "write"}))
    assert ([offer.name for offer in one.offers], one.tool_choice) == (["docs__write"], "auto")
    assert len(one.echo["tools"]) == 3


def summary(text):
    return {"type": "compaction", "encrypted_content": packed(text)}


def test_a_summary_stands_in_place_of_what_the_model_said_before() -> None:
    said = [
        {"role": "user", "content": "count the files"},
        {"role": "assistant", "content": "two"},
        summary("there are two files"),
        {"role": "user", "content": "and now?"},
    ]
    made = spec(instructions="be brief", input=said)
    assert [message["content"] for message in made.messages] == [
        "be brief",
        "count the files",
        "[Summary of the conversation so far]\nthere are two files",
        "and now?",
    ]
    foreign = spec(input=[said[0], {"type": "compaction", "encrypted_content": "gAAAA"}])
    assert foreign.messages[-1]["content"].startswith("A summary that another server made is left out")
    shown = input_items(made, order="asc", limit=9, after=None).data
    assert shown[2].to_dict()["encrypted_content"] == said[2]["encrypted_content"]


def test_a_summary_replaces_the_middle_of_an_earlier_response_too() -> None:
    before = fold((Accepted(spec(instructions="be brief")), *turn(1, "hello"), COMPLETED))
    body = {"previous_response_id": "resp_1", "instructions": "be brief", "input": [summary("we met")]}
    made = run_spec(read_request(body), around(previous=before)).spec
    assert [message["content"] for message in made.messages] == [
        "be brief",
        "hi",
        "[Summary of the conversation so far]\nwe met",
    ]
    assert made.prior is None


def test_old_messages_are_dropped_if_the_caller_wants_it() -> None:
    assert (spec().truncate, spec(truncation="disabled").truncate, spec(truncation="auto").truncate) == (
        False, False, True,
    )  # fmt: skip
    assert unchanging(spec(truncation="auto")).truncation == "auto"


def test_log_probabilities_are_asked_of_each_turn() -> None:
    assert spec(top_logprobs=3).sampling == {"logprobs": True, "top_logprobs": 3}
    assert spec(include=["message.output_text.logprobs"]).sampling == {"logprobs": True, "top_logprobs": 0}
    assert spec(top_logprobs=0).sampling == {}
    assert unchanging(spec(top_logprobs=3)).top_logprobs == 3


def test_a_run_is_told_when_to_summarise() -> None:
    rule = {"type": "compaction", "compact_threshold": 5000}
    assert spec(context_management=[rule]).compaction == Compaction(5000)
    assert spec().compaction is None
    for bad, param in (
        ([rule, rule], "context_management"),
        ([{"type": "compaction"}], "context_management.0.compact_threshold"),
        ([{"type": "clear_tool_uses"}], "context_management.0.type"),
    ):
        with pytest.raises(BadRequest) as caught:
            spec(context_management=bad)
        assert caught.value.param == param


def test_the_bound_on_tools_counts_the_functions_of_namespaces() -> None:
    def spaces(number: int) -> list[dict[str, object]]:
        return [
            {
                "type": "namespace",
                "name": f"n{n}",
                "tools": [{"type": "function", "name": f"f{n}_{i}"} for i in range(32)],
            }
            for n in range(number)
        ]

    assert len(spec(tools=spaces(4)).offers) == 128
    with pytest.raises(BadRequest) as caught:
        spec(tools=[*spaces(4), SEARCH])
    assert caught.value.param == "tools"


def test_a_history_with_an_image_can_be_continued() -> None:
    seen = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
    call = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}
    answer = {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [{"type": "input_text", "text": "Here:"}, seen],
    }
    asked = {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, seen]}
    made = spec(input=[asked, call, answer], tools=[SEARCH])
    note = "[image left out: this model reads text only]"
    assert [part["text"] for part in made.messages[0]["content"]] == ["What is it?", note]
    assert made.messages[-1]["content"] == f"Here:\n{note}"
    shown = input_items(made, order="asc", limit=10, after=None).to_dict()["data"]
    assert shown[0]["content"][1]["image_url"] == seen["image_url"]
