"""What a client is told of a run, event by event."""

import pytest
from msgspec.structs import replace
from openai.types.responses import Response

from cluster.core.tools import ToolId, ToolOffer
from cluster.core.turn import CallDelta
from cluster.responses.compaction import unpacked
from cluster.responses.events import ResponseFold
from cluster.runs.events import (
    MAX_TURNS,
    MAX_WALL_TIME,
    Ended,
    Fault,
    Generated,
    LateAnswer,
    TakenOver,
    ToolAnswer,
    TurnIntent,
)
from tests.responses.run_logs import COMPLETED, accepted, call, offer, piece, result, tool_round, turn

CLOCK = offer("clock", here=True)
READ = offer("read", server="docs")


def told(*log):
    """All events, and the response at the end."""
    reader = ResponseFold()
    events = [event for entry in log for event in reader.feed(entry)]
    for number, event in enumerate(events):
        assert event.sequence_number == number
        assert type(event).model_validate_json(event.to_json(), strict=True) == event
    assert Response.model_validate_json(reader.response.to_json(), strict=True) == reader.response
    return events, reader.response


def names(events):
    return [event.type.removeprefix("response.") for event in events]


def output(response):
    return [(item.type, getattr(item, "status", None)) for item in response.output]


def test_an_answer_in_pieces() -> None:
    events, response = told(
        accepted(),
        TurnIntent(1),
        Generated(1, "hel"),
        Generated(1, "lo"),
        result(1, "hello"),
        COMPLETED,
    )
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.delta for event in events if event.type.endswith("text.delta")] == ["hel", "lo"]
    assert response.output_text == "hello"
    assert events[-1].response == response
    assert (response.status, response.completed_at) == ("completed", 105.0)
    assert events[0].response.status == "in_progress"
    assert events[2].item.content == []
    assert events[2].item.id == events[4].item_id == response.output[0].id


def test_reasoning_words_and_a_call_of_the_caller() -> None:
    one = call("look", '{"at":1}')
    events, response = told(accepted(offer("look")), *turn(1, "let me see", one, reasoning="hm"), COMPLETED)
    assert names(events)[2:-1] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
    ]
    assert [event.output_index for event in events[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4
    reasoning, _, asked = response.output
    assert reasoning.content[0].text == "hm"
    assert (asked.name, asked.arguments, asked.call_id) == ("look", '{"at":1}', one.id)
    assert output(response) == [("reasoning", "completed"), ("message", "completed"), ("function_call", "completed")]


def test_no_client_takes_a_call_of_a_registered_tool_for_its_own() -> None:
    one = call("clock")
    events, response = told(
        accepted(CLOCK), *turn(1, "", one), *tool_round(one, text="noon"), *turn(2, "it is noon"), COMPLETED
    )
    ran, said = response.output
    assert (ran.type, ran.server_label, ran.name, ran.output) == ("mcp_call", "clock", "clock", "noon")
    assert said.type == "message"
    assert "function_call_arguments.delta" not in names(events)


def test_a_tool_of_the_operators_server_is_called_by_its_own_name() -> None:
    there = ToolOffer(
        "docs__read", READ.function, here=True, server_tool="read", tool=ToolId.of_operator("docs", "read")
    )
    one = call("docs__read")
    _, response = told(accepted(there), *turn(1, "", one), *tool_round(one), COMPLETED)
    assert (response.output[0].server_label, response.output[0].name) == ("docs", "read")


def test_a_call_of_no_tool_is_the_clusters_where_it_runs_tools() -> None:
    one = call("look out!")
    _, response = told(
        accepted(CLOCK), *turn(1, "", one), *tool_round(one, outcome="refused", text="no such tool"), COMPLETED
    )
    [ran] = response.output
    assert (ran.type, ran.server_label, ran.name, ran.status) == ("mcp_call", "caesura", "look out!", "failed")
    _, response = told(accepted(offer("look")), *turn(1, "", one), COMPLETED)
    assert response.output[0].type == "function_call"


def test_an_asynchronous_tool_is_in_progress_until_its_last_answer() -> None:
    one = call("clock")
    events, response = told(
        accepted(CLOCK),
        *turn(1, "", one),
        *tool_round(one, outcome="started", text="wait"),
        *turn(2, "soon"),
        LateAnswer(ToolAnswer(1, 0, "ok", "noon")),
        *turn(3, "noon"),
        COMPLETED,
    )
    ran = response.output[0]
    assert (ran.type, ran.status, ran.output) == ("mcp_call", "completed", "noon")
    assert names(events).index("mcp_call.completed") > names(events).index("output_text.delta")


def test_a_call_of_a_custom_tool_is_its_input_alone() -> None:
    patch = ToolOffer("patch", {"name": "patch"}, here=False, custom=True, namespace="files")
    one = call("patch", '{"input": "a\\n\\u00e9\\ud83d\\ude00 \\"b\\""}')
    pieces = [Generated(1, calls=(CallDelta(0, one.id, "patch"),))]
    pieces += [Generated(1, calls=(CallDelta(0, arguments=letter),)) for letter in one.arguments]
    events, response = told(accepted(patch), TurnIntent(1), *pieces, result(1, "", one), COMPLETED)
    [asked] = response.output
    assert (asked.type, asked.name, asked.namespace, asked.call_id) == ("custom_tool_call", "patch", "files", one.id)
    assert asked.input == 'a\né\U0001f600 "b"'
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) == len(asked.input)
    assert "".join(deltas) == asked.input
    assert names(events)[-3:-1] == ["custom_tool_call_input.done", "output_item.done"]


def test_arguments_of_another_form_are_the_input_of_a_custom_tool() -> None:
    patch = ToolOffer("patch", {"name": "patch"}, here=False, custom=True)
    for arguments in ('{"text": "a"}', "[1]", "{", '{"input": 3}'):
        one = call("patch", arguments)
        _, response = told(accepted(patch), *turn(1, "", one), COMPLETED)
        assert response.output[0].input == arguments


def test_the_tokens_of_a_text_have_their_log_probabilities() -> None:
    first, second = (
        {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": [
            {"token": token, "logprob": -0.5, "bytes": list(token.encode())}
        ]}
        for token in ("hel", "lo")
    )  # fmt: skip
    events, response = told(
        accepted(), TurnIntent(1), Generated(1, "hel", logprobs=(first,)), Generated(1, "lo", logprobs=(second,)),
        result(1, "hello"), COMPLETED,
    )  # fmt: skip
    part = response.output[0].content[0]
    assert [entry.to_dict() for entry in part.logprobs] == [first, second]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [["hel"], ["lo"]]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.top_logprobs[0].token for entry in done.logprobs] == ["hel", "lo"]


def test_a_summary_is_one_item_and_its_text_is_not_told() -> None:
    ended = replace(result(2, "two files"), summary=True)
    events, response = told(
        accepted(offer("look")), *turn(1, "hm"), TurnIntent(2, 1, summary=True), Generated(2, "two fi"), ended,
        *turn(3, "so two"), COMPLETED,
    )  # fmt: skip
    assert [item.type for item in response.output] == ["message", "compaction", "message"]
    assert unpacked(response.output[1].encrypted_content) == "two files"
    assert [event.delta for event in events if event.type.endswith("text.delta")] == ["hm", "so two"]


def test_a_summary_that_is_cut_is_no_item() -> None:
    cut = replace(result(2, "two fi"), summary=True, finish_reason="length")
    _, response = told(
        accepted(offer("look")), *turn(1, "hm"), TurnIntent(2, 1, summary=True), cut, *turn(3, "so two"), COMPLETED
    )
    assert [item.type for item in response.output] == ["message", "message"]


# --- servers ----------------------------------------------------------------------------------------------------------


def test_a_listing_reports_the_tools_that_cannot_be_used() -> None:
    echo = {"told_servers": ["docs", "more"], "unusable_tools": {"docs": "deep: its parameters are too deep"}}
    events, response = told(accepted(READ, echo=echo), *turn(1, "hi"), COMPLETED)
    assert [item.error for item in response.output[:2]] == ["deep: its parameters are too deep", None]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done[0].error == "deep: its parameters are too deep"


def test_a_servers_tools_and_a_call_of_one() -> None:
    one = call("docs__read", "{}")
    events, response = told(
        accepted(READ, echo={"told_servers": ["docs"]}), *turn(1, "", one), *tool_round(one), COMPLETED
    )
    assert names(events)[2:-1] == [
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
    ]
    listing, ran = response.output
    assert [tool.name for tool in listing.tools] == ["read"]
    assert (ran.server_label, ran.name, ran.output, ran.status) == ("docs", "read", "found", "completed")


def test_a_call_of_a_server_that_fails() -> None:
    one = call("docs__read", "{}")
    events, response = told(accepted(READ), *turn(1, "", one), *tool_round(one, outcome="timeout"), COMPLETED)
    assert "mcp_call.failed" in names(events)
    ran = response.output[0]
    assert (ran.status, ran.output, ran.error.content) == ("failed", None, [{"type": "text", "text": "found"}])


def test_a_call_that_waits_for_consent_is_told_whole() -> None:
    one = call("docs__read", '{"a":1}')
    log = [accepted(offer("read", server="docs", approval=True)), *turn(1, "", one), COMPLETED]
    events, response = told(*log)
    assert names(events)[2:-1] == ["output_item.added", "output_item.done"]
    asked = response.output[0]
    assert (asked.type, asked.server_label, asked.name, asked.arguments) == (
        "mcp_approval_request",
        "docs",
        "read",
        '{"a":1}',
    )


def test_an_approved_call_is_run_before_the_first_turn() -> None:
    one = call("docs__read", "{}", turn=0)
    events, response = told(
        accepted(READ, approved=(one,), echo={"approvals": ["mcpr_0"]}), *tool_round(one), *turn(1, "ok"), COMPLETED
    )
    ran = response.output[0]
    assert (ran.type, ran.approval_request_id, ran.output) == ("mcp_call", "mcpr_0", "found")
    assert names(events)[2:8] == [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"),
        *("mcp_call.completed", "output_item.done"),
    ]


def test_an_approved_call_that_was_refused_is_told_too() -> None:
    one = call("docs__read", "{}", turn=0)
    _, response = told(accepted(READ, approved=(one,)), ToolAnswer(0, 0, "refused", "no"), *turn(1, "ok"), COMPLETED)
    assert output(response) == [("mcp_call", "failed"), ("message", "completed")]


# --- turns that are lost ----------------------------------------------------------------------------------------------


def test_a_turn_that_is_tried_again_begins_new_items() -> None:
    one = call("look", '{"zone":"here"}')
    lost = Generated(1, "I think", "hm", (CallDelta(0, "call_lost", "look", '{"zo'),))
    events, response = told(
        accepted(offer("look")), TurnIntent(1), lost, TakenOver("r2"), TurnIntent(1, 2),
        Generated(1, calls=(piece(one),)), result(1, "", one), COMPLETED,
    )  # fmt: skip
    assert output(response) == [("function_call", "completed")]
    ended = [(event.item.type, event.item.status) for event in events if event.type == "response.output_item.done"]
    assert ended == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
        ("function_call", "completed"),
    ]
    assert response.output[0].id.endswith("_0003")  # the position in the stream
    # A client that runs what is complete has never seen the lost call complete.
    complete = [event.item.call_id for event in events if event.type == "response.output_item.done"
                and event.item.type == "function_call" and event.item.status == "completed"]  # fmt: skip
    assert complete == [one.id]


def test_a_turn_that_was_lost_before_it_said_anything_leaves_nothing() -> None:
    events, response = told(accepted(), TurnIntent(1), TurnIntent(1, 2), *turn(1, "hello")[1:], COMPLETED)
    assert output(response) == [("message", "completed")]
    assert len(events) == 9


def test_what_a_lost_attempt_began_to_call_is_forgotten() -> None:
    one = call("look", "{}")
    lost = Generated(1, calls=(CallDelta(0, "call_lost", None, '{"lost'),))
    _, response = told(
        accepted(offer("look")),
        *[TurnIntent(1), lost, TurnIntent(1, 2), Generated(1, calls=(CallDelta(0, None, "look"),))],
        *[result(1, "", one), COMPLETED],
    )
    assert output(response) == [("function_call", "completed")]


# --- the result counts ------------------------------------------------------------------------------------------------


def test_what_the_pieces_left_out_is_told_with_the_result() -> None:
    calls = call("look", '{"at":1}'), call("look", index=1)
    events, response = told(
        accepted(offer("look")), TurnIntent(1),
        Generated(1, "let me", calls=(CallDelta(0, calls[0].id, "look", '{"at'),)),
        result(1, "let me see", *calls), COMPLETED,
    )  # fmt: skip
    assert response.output_text == "let me see"
    arguments = [item.arguments for item in response.output if item.type == "function_call"]
    assert arguments == ['{"at":1}', "{}"]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == "let me see"


def test_pieces_that_said_something_else_are_incomplete() -> None:
    one = call("look", "{}")
    pieces = Generated(1, "wrong", calls=(CallDelta(0, "other", "look", "{}"), CallDelta(1, "more", "look", "{}")))
    _, response = told(accepted(offer("look")), TurnIntent(1), pieces, result(1, "right", one), COMPLETED)
    complete = [item for item in response.output if item.status == "completed"]
    assert [item.type for item in complete] == ["message", "function_call"]
    assert (complete[0].content[0].text, complete[1].call_id) == ("right", one.id)


def test_a_call_whose_name_comes_late_begins_with_it() -> None:
    one = call("look", '{"a":1}')
    events, response = told(
        accepted(offer("look")), TurnIntent(1),
        Generated(1, calls=(CallDelta(0, one.id, None, '{"a'),)),
        Generated(1, calls=(CallDelta(0, None, "look", '":'),)),
        result(1, "", one), COMPLETED,
    )  # fmt: skip
    assert [event.delta for event in events if event.type.endswith("delta")] == ['{"a":', "1}"]
    assert response.output[0].arguments == '{"a":1}'


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_in_the_background_it_is_queued_until_somebody_works_on_it() -> None:
    reader = ResponseFold()
    assert names(reader.feed(accepted(background=True))) == ["created", "queued"]
    assert reader.response.status == "queued"
    assert names(reader.feed(TurnIntent(1))) == ["in_progress"]
    assert reader.response.status == "in_progress"


def test_tokens_are_counted_over_all_turns() -> None:
    one = call("clock")
    _, response = told(
        accepted(CLOCK), TurnIntent(1), result(1, "", one, prompt=10, cached=0, output=5), *tool_round(one),
        TurnIntent(2), result(2, "noon", prompt=20, cached=15, output=2), COMPLETED,
    )  # fmt: skip
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 7, 37)
    assert usage.input_tokens_details.cached_tokens == 15


def test_a_turn_that_was_cut_for_length() -> None:
    _, response = told(
        accepted(), TurnIntent(1), result(1, "and so", finish="length"), Ended("incomplete", "max_output_tokens")
    )
    assert output(response) == [("message", "incomplete")]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(("reason", "word"), [(MAX_TURNS, "max_messages"), (MAX_WALL_TIME, None)])
def test_bounds_of_ours_have_openais_word_if_there_is_one(reason, word) -> None:
    events, response = told(accepted(), *turn(1, "x"), Ended("incomplete", reason))
    assert events[-1].type == "response.incomplete"
    assert (response.incomplete_details.reason, response.incomplete_details.detail) == (word, reason)


def test_cancelled_in_the_midst_of_a_turn_and_of_a_call() -> None:
    one = call("docs__read", "{}")
    events, response = told(accepted(READ), *turn(1, "", one), TurnIntent(2), Generated(2, "I"), Ended("cancelled"))
    assert output(response) == [("mcp_call", "incomplete"), ("message", "incomplete")]
    assert (events[-1].type, response.status) == ("response.incomplete", "cancelled")
    assert response.completed_at is None
    assert response.usage.output_tokens == 3


def test_cancelled_before_anybody_worked_on_it() -> None:
    events, response = told(accepted(background=True), Ended("cancelled"))
    assert names(events) == ["created", "queued", "incomplete"]
    assert response.status == "cancelled"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("server_error", "lost", 502), "server_error"),
        (Fault("engine_gone", "dead", 500), "server_error"),
        (Fault("context_length_exceeded", "too long", 400, "input"), "invalid_prompt"),
        (Fault("busy", "later", 429), "rate_limit_exceeded"),
    ],
)
def test_a_failure_has_a_code_of_openais_and_ours_beside_it(fault, code) -> None:
    events, response = told(accepted(), TurnIntent(1), Ended("failed", fault=fault))
    assert events[-1].type == "response.failed"
    error = response.error
    assert (error.code, error.message, error.type, error.param) == (code, fault.message, fault.code, fault.param)
