"""The pieces of a turn become Anthropic's events, and the same message without a stream."""

from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cluster.api.anthropic.answer import MessageFold
from cluster.api.anthropic.content import signature
from cluster.api.anthropic.errors import error_body, error_type, in_anthropics_words, is_messages
from cluster.core.errors import BadRequest
from cluster.core.turn import CallDelta, PromptMode, TurnBegan, TurnDelta, TurnDone, TurnPiece, pack_ids

BEGAN = TurnBegan(PromptMode.FIRST, pack_ids(range(10)))
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def done(reason: str, stop: str | None = None) -> TurnDone:
    return TurnDone(reason, 10, 4, 3, stop)


def call(arguments: str, *, index: int = 0, first: bool = True) -> TurnDelta:
    head = (f"c{index}", "ls") if first else (None, None)
    return TurnDelta(pack_ids([1]), calls=(CallDelta(index, *head, arguments),))


def folded(*pieces: TurnPiece) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    fold = MessageFold("msg_1", "tiny")
    events = [event for piece in (BEGAN, *pieces) for event in fold.take(piece)]
    for event in events:
        EVENTS.validate_python(event)
    Message.model_validate(fold.message())
    return events, fold.message()


def use(arguments: Any, name: str = "c0") -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "ls", "input": arguments}


TEXT = {"type": "text", "text": "Hi."}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": signature("hm")}


@pytest.mark.parametrize(
    ("pieces", "content", "reason", "sequence"),
    [
        ([TurnDelta(content="H"), TurnDelta(content="i."), done("stop")], [TEXT], "end_turn", None),
        ([TurnDelta(content="Hi."), done("length")], [TEXT], "max_tokens", None),
        ([TurnDelta(content="Hi."), done("stop", "END")], [TEXT], "stop_sequence", "END"),
        ([TurnDelta(reasoning="hm"), TurnDelta(content="Hi."), done("stop")], [THOUGHT, TEXT], "end_turn", None),
        ([TurnDelta(content="Hi.", reasoning="hm"), done("stop")], [THOUGHT, TEXT], "end_turn", None),
        (
            [TurnDelta(content="Hi."), call('{"a"'), call(": 1}", first=False), done("tool_calls")],
            [TEXT, use({"a": 1})],
            "tool_use",
            None,
        ),
        ([call(""), call("{}", index=1), done("tool_calls")], [use({}), use({}, "c1")], "tool_use", None),
        ([call("false"), done("tool_calls")], [use({"unparsed_arguments": "false"})], "tool_use", None),
        ([call("{}"), done("length")], [], "max_tokens", None),
        ([call("{}"), call('{"a', index=1), done("length")], [use({})], "max_tokens", None),
        ([call("{}"), done("stop", "}")], [], "stop_sequence", "}"),
        ([done("stop")], [], "end_turn", None),
    ],
)
def test_a_turn(pieces: list[TurnPiece], content: Any, reason: str, sequence: str | None) -> None:
    events, message = folded(*pieces)
    assert message["content"] == content
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert events[0]["message"]["usage"]["input_tokens"] == 10
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == list(range(len(content)))


def test_a_thinking_block_is_signed_before_it_ends() -> None:
    events, _ = folded(TurnDelta(reasoning="hm"), TurnDelta(content="Hi."), done("stop"))
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_types_of_errors(status: int, kind: str) -> None:
    assert error_type(status) == kind


def test_the_form_of_an_error() -> None:
    error = BadRequest("tools.0.name: no", param="tools.0.name")
    details = {"type": "invalid_request_error", "message": "tools.0.name: no", "param": "tools.0.name"}
    assert error_body(error, "r1") == {"type": "error", "error": details, "request_id": "r1"}


@pytest.mark.parametrize(
    ("path", "ours"),
    [("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v1/messagesX", False), ("/v1/models", False)],
)
def test_paths(path: str, ours: bool) -> None:
    assert is_messages(path) is ours


LENGTH = (
    "This model's maximum context length is 100 tokens. However, you requested {} output tokens and your prompt "
    "contains {} {}, for a total."
)


@pytest.mark.parametrize(
    ("output", "prompt", "unit", "message"),
    [
        (10, "120", "input tokens", "prompt is too long: 120 tokens > 100 tokens maximum"),
        (10, "4000", "characters (more than 90)", "prompt is too long: 4000 characters > 100 tokens maximum"),
        (10, "at least 91", "input tokens", "prompt is too long: at least 91 tokens > 90 tokens maximum"),
        (60, "at least 41", "input tokens", "input length and `max_tokens` exceed context limit: 41 + 60 > 100, "),
        (40, "61", "input tokens", "input length and `max_tokens` exceed context limit: 61 + 40 > 100, "),
    ],
)
def test_a_prompt_that_does_not_fit_is_told_as_anthropic_does(
    output: int, prompt: str, unit: str, message: str
) -> None:
    error = in_anthropics_words(BadRequest(LENGTH.format(output, prompt, unit)))
    assert error.message.startswith(message)
    assert (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")


def test_other_errors_stay() -> None:
    error = BadRequest("no")
    assert in_anthropics_words(error) is error


def test_an_error_names_the_requests_own_field() -> None:
    error = in_anthropics_words(BadRequest("response_format: too large", param="response_format"))
    assert (error.message, error.param) == ("output_config.format: too large", "output_config.format")


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("tools.1.function.parameters.properties.a", "tools.4.input_schema.properties.a"),
        ("tools.0.function.parameters", "tools.2.input_schema"),
        ("tools.1.function.name", "tools.4.name"),
        ("tools.1", "tools.4"),
        ("tools.2.function.parameters", "tools.2.function.parameters"),
        ("tools", "tools"),
        ("response_format.json_schema.schema.properties.a", "output_config.format.schema.properties.a"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
    ],
)
def test_an_error_names_the_requests_own_tool_and_schema(param: str, own: str) -> None:
    """The first two tools of the chat completion are the third and the fifth of the request."""
    error = in_anthropics_words(BadRequest(f"{param}: no", param=param), places=(2, 4))
    assert (error.message, error.param) == (f"{own}: no", own)
