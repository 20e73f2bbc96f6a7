"""A Messages request becomes a chat completion, or a 400 that names the field by its path."""

from typing import Any

import pytest

from cluster.api.anthropic.blocks import ServerToolUseBlock
from cluster.api.anthropic.conversation import called_as
from cluster.api.anthropic.request import (
    chat_body,
    check_headers,
    read_messages,
    read_prompt,
    retention_s,
    tokenize_fields,
)
from cluster.api.anthropic.tools import shown_as
from cluster.core.errors import BadRequest
from cluster.core.tools import ToolId, ToolOffer, server_tool_name

CALL = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "/"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}
LS = {"name": "ls", "input_schema": {"type": "object", "properties": {}}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content) if not isinstance(content[0], str) else content[0]}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body_of(*messages: Any, **fields: Any) -> dict[str, Any]:
    request, prompt = read_messages({"max_tokens": 9, "messages": list(messages) or [user("Go.")], **fields})
    return chat_body(request, prompt)


def called(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"path": "/"}'}}


LS_CALL = called("t1", "ls")


@pytest.mark.parametrize(
    ("messages", "made"),
    [
        ([user("Go.")], [{"role": "user", "content": "Go."}]),
        ([user(text("a"), text("b"))], [{"role": "user", "content": "a\nb"}]),
        ([user(text("a"), IMAGE)], [{"role": "user", "content": [text("a"), IMAGE_PART]}]),
        (
            [user("Go."), {"role": "system", "content": "Be brief."}, user("On.")],
            [{"role": "user", "content": "Go."}, {"role": "system", "content": "Be brief."}, user("On.")],
        ),
        (
            [
                user("Go."),
                assistant({"type": "thinking", "thinking": "hm", "signature": "x"}, text("I "), CALL),
                user(text("Note."), RESULT),
            ],
            [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "I ", "reasoning": "hm", "tool_calls": [LS_CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "a.txt"},
                {"role": "user", "content": "Note."},
            ],
        ),
        (
            [user("Go."), assistant(CALL), user({**RESULT, "content": [text("see"), IMAGE], "is_error": True})],
            [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "", "tool_calls": [LS_CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "Error: see\n[image: see the next message]"},
                {"role": "user", "content": [IMAGE_PART]},
            ],
        ),
        (
            [
                user("Go."),
                assistant(
                    {**CALL, "type": "mcp_tool_use", "server_name": "files"},
                    {"type": "mcp_tool_result", "tool_use_id": "t1", "content": [text("a.txt")]},
                    text("Done."),
                ),
                user("On."),
            ],
            [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "", "tool_calls": [called("t1", "files__ls")]},
                {"role": "tool", "tool_call_id": "t1", "content": "a.txt"},
                {"role": "assistant", "content": "Done."},
                {"role": "user", "content": "On."},
            ],
        ),
        (
            [
                user("Go."),
                assistant({"type": "thinking", "thinking": "hm", "signature": "x"}),
                {"role": "assistant", "content": "I "},
                assistant(CALL),
                assistant(text("see.")),
                user(RESULT),
            ],
            [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "I see.", "reasoning": "hm", "tool_calls": [LS_CALL]},
                {"role": "tool", "tool_call_id": "t1", "content": "a.txt"},
            ],
        ),
        (
            [user("Go."), assistant({**CALL, "name": "repo.search" * 99}), user(RESULT)],
            [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "", "tool_calls": [called("t1", "repo.search" * 99)]},
                {"role": "tool", "tool_call_id": "t1", "content": "a.txt"},
            ],
        ),
        (
            [user({"type": "document", "title": "T", "source": {"type": "text", "data": "words"}})],
            [{"role": "user", "content": "T\nwords"}],
        ),
    ],
)
def test_messages(messages: Any, made: Any) -> None:
    assert body_of(*messages)["messages"] == made


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ("Be brief.", "Be brief."),
        ([text("x-anthropic-billing-header: cch=1;"), text("A"), text("B")], "A\n\nB"),
        ("x-anthropic-billing-header: cch=1;\nBe brief.", "Be brief."),
        ([text("x-anthropic-billing-header: cch=1;")], None),
    ],
)
def test_the_system_prompt_loses_what_changes_with_each_request(system: Any, kept: str | None) -> None:
    expected = [] if kept is None else [{"role": "system", "content": kept}]
    assert body_of(system=system)["messages"][:-1] == expected


def test_messages_of_the_system_at_the_beginning_are_one() -> None:
    made = body_of({"role": "system", "content": "Be kind."}, user("Go."), system="Be brief.")["messages"]
    assert made == [{"role": "system", "content": "Be brief.\n\nBe kind."}, user("Go.")]


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 4}, {"temperature": 0, "top_p": 0.5, "top_k": 4}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        ({"tools": [LS], "tool_choice": {"type": "auto"}}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"tools": [LS], "tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tools": [LS], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tools": [LS], "tool_choice": {"type": "tool", "name": "ls", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "ls"}}, "parallel_tool_calls": False},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "between_tools"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high", "chat_template_kwargs": None}),
        (
            {"output_config": {"effort": "max"}, "thinking": {"type": "disabled"}},
            {"reasoning_effort": None, "chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"cache_salt": "s", "vllm_xargs": {"a": 1}}, {"cache_salt": "s", "vllm_xargs": {"a": 1}}),
        (
            {"chat_template_kwargs": {"style": "dry"}, "thinking": {"type": "enabled", "budget_tokens": 9}},
            {"chat_template_kwargs": {"style": "dry", "enable_thinking": True}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"service_tier": "auto", "metadata": {"user_id": "u"}}, {"max_completion_tokens": 9}),
    ],
)
def test_fields(fields: Any, made: dict[str, Any]) -> None:
    body = body_of(**fields)
    assert {name: body.get(name) for name in made} == made
    assert not {"service_tier", "metadata", "system", "max_tokens"} & body.keys()


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, None),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"style": "dry"}}, {"style": "dry"}),
        (
            {
                "output_config": {"effort": "low"},
                "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": False},
            },
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_a_prompt_is_counted_with_the_settings_with_which_it_is_rendered(fields: Any, settings: Any) -> None:
    counted = tokenize_fields(read_prompt({"messages": [user("Go.")], **fields}))
    assert counted.get("chat_template_kwargs") == settings
    assert counted.keys() <= {"messages", "chat_template_kwargs"}


def test_client_tools_of_anthropic_get_a_schema_and_hosted_ones_are_left_out() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search"},
        LS,
    ]
    _, prompt = read_messages({"max_tokens": 1, "messages": [user("Go.")], "tools": tools})
    assert [function["name"] for function in prompt.tools.functions] == ["bash", "str_replace_based_edit_tool", "ls"]
    assert "command" in prompt.tools.functions[0]["parameters"]["properties"]
    assert prompt.tools.left_out == ("web_search_20250305",)


@pytest.mark.parametrize("rest", ["\u65e5", "x\r\nset-cookie: a=b", "x" * 64])
def test_the_type_of_a_hosted_tool_can_be_named_in_a_header(rest: str) -> None:
    tools = [{"type": f"web_search_{rest}", "name": "web_search"}]
    with pytest.raises(BadRequest, match=r"tools\.0\.type"):
        read_messages({"max_tokens": 1, "messages": [user("Go.")], "tools": tools})


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        (text("a"), None),
        ({**text("a"), "cache_control": {"type": "ephemeral"}}, None),
        ({**text("a"), "cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300.0),
        ({**text("a"), "cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600.0),
    ],
)
def test_an_explicit_ttl_is_a_retention_hint(message: Any, seconds: float | None) -> None:
    request, _ = read_messages({"max_tokens": 1, "messages": [user(message)], "system": [text("s")]})
    assert retention_s(request) == seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
        ({"messages": [user({"type": "riddle"})]}, "messages.0.content.0"),
        ({"messages": [user(text("a"), {"type": "image", "source": {"type": "x"}})]}, "messages.0.content.1.source"),
        ({"messages": [user(RESULT)]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [user("a"), assistant(CALL), user("b")]}, "messages.1.content.0"),
        ({"messages": [user("a"), assistant(CALL, CALL), user(RESULT)]}, "messages.1.content.1.id"),
        ({"messages": [user("a"), assistant(CALL), user(RESULT, RESULT)]}, "messages.2.content.1.tool_use_id"),
        ({"messages": [user("a"), assistant({**CALL, "input": "x"}), user(RESULT)]}, "messages.1.content.0.input"),
        ({"messages": [user("a"), assistant(text("b"))]}, "messages.1"),
        ({"messages": [user("a"), assistant(text("b")), assistant(CALL), user("c")]}, "messages.2.content.0"),
        ({"messages": [user("a"), assistant(CALL), assistant(CALL), user(RESULT)]}, "messages.2.content.0.id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": ["a", " "]}, "stop_sequences.1"),
        ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type"),
        ({"tools": [LS, LS]}, "tools.1.name"),
        ({"tools": [{"type": "oracle_1", "name": "a"}]}, "tools.0.type"),
        ({"tools": [LS], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"output_config": {"effort": "loud"}}, "output_config.effort"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"mcp_servers": [{"type": "url", "name": "a"}]}, "mcp_servers.0.url"),
    ],
)
def test_what_is_wrong_is_named(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        request, prompt = read_messages({"max_tokens": 9, "messages": [user("Go.")], **fields})
        chat_body(request, prompt)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({}, None),
        ({"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219, unknown-2099"}, None),
        ({"anthropic-version": "yesterday"}, "anthropic-version"),
        ({"anthropic-beta": "a b"}, "anthropic-beta"),
        ({"anthropic-beta": "a,,b"}, "anthropic-beta"),
    ],
)
def test_headers(headers: dict[str, str], param: str | None) -> None:
    if param is None:
        check_headers(headers)
        return
    with pytest.raises(BadRequest) as caught:
        check_headers(headers)
    assert caught.value.param == param


def of_server(server: str, tool: str) -> ToolOffer:
    name = server_tool_name(server, tool)
    return ToolOffer(name, {"name": name}, here=True, server_tool=tool, tool=ToolId.of_operator(server, tool))


@pytest.mark.parametrize(
    ("offer", "shown"),
    [
        (None, ("caesura", "no__tool")),
        (ToolOffer("search", {}, here=True, tool=ToolId.of_operator("search")), ("caesura", "search")),
        (of_server("search", "search"), ("search", "search")),
        (of_server("desk", "move.desk"), ("desk", "move.desk")),
        (of_server("caesura", "read"), ("caesura", "caesura__read")),
    ],
)
def test_the_name_of_a_call_is_in_its_block(offer: ToolOffer | None, shown: tuple[str, str]) -> None:
    name = "no__tool" if offer is None else offer.name
    assert shown_as(name, offer) == shown
    block = ServerToolUseBlock(type="mcp_tool_use", id="t1", name=shown[1], server_name=shown[0], input={})
    assert called_as(block) == name
