"""Items of a request's input as the messages that a chat template sees."""

import pytest

from cluster.core.errors import BadRequest
from cluster.core.program import ProgramIdentity
from cluster.core.tools import MAX_CALLED_NAME_LENGTH, ToolId
from cluster.responses.events import ResponseFold
from cluster.responses.output import CLUSTER_LABEL
from cluster.responses.request import read_request
from cluster.responses.spec import RequestContext, run_spec
from cluster.runs.events import Call, Ended, LateAnswer, Prior, ToolAnswer, ToolIntent, TurnIntent
from cluster.runs.state import fold
from tests.responses.run_logs import COMPLETED, LIMITS, accepted, call, listed, offer, result, tool_round, turn

DOCS = {"type": "mcp", "server_label": "docs", "server_url": "https://docs.example/mcp"}
LISTINGS = {"docs": [listed("docs", "read", "docs__read!")]}
LOOK = {"type": "function", "name": "look", "description": "look!", "parameters": {"type": "object"}}


def run_of(*items, previous=None, sees=False, **body):
    if previous is not None:
        body["previous_response_id"] = previous.spec.id
    known = RequestContext(
        "resp_2", 1.0, ProgramIdentity(), "m", LIMITS, listings=LISTINGS, previous=previous, sees=sees
    )
    return run_spec(read_request({"input": list(items), **body}), known).spec


def messages(*items, **fields):
    return list(run_of(*items, **fields).messages)


def user(text):
    return {"role": "user", "content": text}


def asked(*calls, content="", **fields):
    """The assistant's message with these calls: id, name, arguments."""
    functions = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls
    ]
    return {"role": "assistant", "content": content, **fields, "tool_calls": functions}


def answered(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


def called(id="c1", name="look", arguments="{}"):
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def output(id="c1", text="found"):
    return {"type": "function_call_output", "call_id": id, "output": text}


def refused(*items, **fields):
    with pytest.raises(BadRequest) as caught:
        run_of(*items, **fields)
    return caught.value


# --- what is said -----------------------------------------------------------------------------------------------------


def test_messages_in_both_forms() -> None:
    assert messages(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        user("a"),
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d", "annotations": []}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ) == [
        {"role": "system", "content": "be brief"},
        user("a"),
        user([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]),
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "no"},
    ]


def test_a_turn_is_one_message_with_its_reasoning_words_and_calls() -> None:
    assert messages(
        user("where?"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "let me see"},
        called("c1"),
        called("c2"),
        output("c2", "two"),
        output("c1", [{"type": "input_text", "text": "one"}]),
        called("c3"),
        output("c3"),
    ) == [
        user("where?"),
        asked(("c1", "look", "{}"), ("c2", "look", "{}"), content="let me see", reasoning="hm"),
        answered("c1", "one"),
        answered("c2", "two"),
        asked(("c3", "look", "{}")),
        answered("c3", "found"),
    ]


@pytest.mark.parametrize("name", ["repo.search", "", "a b", "n" * MAX_CALLED_NAME_LENGTH])
def test_a_call_may_have_any_name_that_the_model_invented(name: str) -> None:
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": name, "input": "x"}
    ran = {
        "type": "mcp_call",
        "id": "c3",
        "server_label": CLUSTER_LABEL,
        "name": name,
        "arguments": "{}",
        "output": "no",
    }
    patched = {"type": "custom_tool_call_output", "call_id": "c2", "output": "no"}
    made = messages(called(name=name), custom, ran, output(), patched)
    assert made[0] == asked(("c1", name, "{}"), ("c2", name, '{"input": "x"}'), ("c3", name, "{}"))


def test_a_tool_that_is_offered_has_a_name_that_parsers_can_read() -> None:
    assert refused(user("x"), tools=[LOOK | {"name": "repo.search"}]).param == "tools.0.name"


def test_answers_of_a_server_that_ran_before() -> None:
    mcp = {"type": "mcp_call", "id": "m1", "server_label": "docs", "name": "read", "arguments": "{}"}
    failed = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "broken"}]}
    assert messages(
        {"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": []},
        user("read"),
        mcp | {"output": "text"},
        mcp | {"id": "m2", "error": failed, "status": "failed"},
        {"role": "assistant", "content": "done"},
    ) == [
        user("read"),
        asked(("m1", "docs__read", "{}"), ("m2", "docs__read", "{}")),
        answered("m1", "text"),
        answered("m2", "broken"),
        {"role": "assistant", "content": "done"},
    ]


def test_the_second_output_of_a_call_is_the_answer_of_an_asynchronous_tool() -> None:
    assert messages(called(), output("c1", "started"), output("c1", "found")) == [
        asked(("c1", "look", "{}")),
        answered("c1", "started"),
        user("[The call of look that was started earlier has ended]\nfound"),
    ]


def test_a_call_without_its_output_is_refused() -> None:
    error = refused(user("x"), called("c9"))
    assert (error.message, error.param) == ("No tool output found for function call c9.", "input")


@pytest.mark.parametrize("arguments", ["{}", '{"a'])
def test_a_call_of_a_lost_turn_needs_no_output(arguments: str) -> None:
    lost = called("c0", arguments=arguments) | {"status": "incomplete"}
    assert messages(user("go"), lost, called(), output()) == messages(user("go"), called(), output())
    with_output = messages(user("go"), lost, called(), output("c0"), output())
    assert len(with_output) == len(messages(user("go"), called(), output())) + 1


def test_an_output_without_its_call_is_refused() -> None:
    assert refused(user("x"), output("c9")).param == "input.1.call_id"


# --- consent ----------------------------------------------------------------------------------------------------------


def request(id="r1"):
    return {"type": "mcp_approval_request", "id": id, "server_label": "docs", "name": "read", "arguments": "{}"}


def consent(id="r1", approve=True, **fields):
    return {"type": "mcp_approval_response", "approval_request_id": id, "approve": approve, **fields}


def test_an_approved_call_is_run_before_the_first_turn() -> None:
    made = run_of(user("read"), request(), consent(), tools=[DOCS])
    assert made.messages == (user("read"), asked(("r1", "docs__read", "{}")))
    assert made.approved == (Call(0, 0, "r1", "docs__read", "{}", tool=ToolId.of_request("docs", "read")),)
    assert made.echo["approvals"] == ["r1"]


def test_a_denied_call_has_the_denial_for_an_answer() -> None:
    made = run_of(user("read"), request(), consent(approve=False, reason="no!"), user("go on"), tools=[DOCS])
    assert made.approved == ()
    assert list(made.messages)[2:] == [
        answered("r1", "The user did not allow this call. Reason: no!"),
        user("go on"),
    ]


def test_consent_that_was_used_is_not_used_again() -> None:
    ran = {"type": "mcp_call", "server_label": "docs", "name": "read", "arguments": "{}", "output": "text"}
    made = run_of(user("read"), request(), consent(), ran | {"id": "m1", "approval_request_id": "r1"}, tools=[DOCS])
    assert made.approved == ()
    assert list(made.messages) == [user("read"), asked(("m1", "docs__read", "{}")), answered("m1", "text")]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([request()], "input"),
        ([consent()], "input.0.approval_request_id"),
        ([request(), consent(), consent()], "input.2.approval_request_id"),
        ([request(), consent(), user("and now?")], "input.2"),
    ],
    ids=["no answer", "no request", "two answers", "words before the run"],
)
def test_consent_that_fits_nothing_is_refused(items, param) -> None:
    assert refused(*items, tools=[DOCS]).param == param


def test_consent_to_a_call_that_was_asked_for_here_is_used_once() -> None:
    """The id names the consent for the executor; an id that a client made up may stand for several calls."""
    ours = f"mcpr_{'0' * 32}_t1c0"
    [approved] = run_of(user("read"), request(ours), consent(ours), tools=[DOCS]).approved
    assert approved.consent == ours


def test_consent_is_to_a_servers_tool_and_not_to_a_name() -> None:
    asked = {"type": "mcp_approval_request", "id": "r1", "server_label": "doc", "name": "s__read", "arguments": "{}"}
    docs = {**DOCS, "server_label": "docs"}
    assert "is not among them" in refused(user("read"), asked, consent(), tools=[docs]).message


def test_consent_needs_a_response_with_a_turn() -> None:
    items = user("read"), request(), consent()
    assert refused(*items, tools=[DOCS], generate=False).param == "generate"
    assert run_of(*items, tools=[DOCS], generate=True).generate


def test_an_approved_call_needs_its_server() -> None:
    assert refused(request(), consent()).param == "tools"


# --- going on ---------------------------------------------------------------------------------------------------------


def ran(*events, offers=(), **fields):
    """The final state of an earlier run."""
    return fold([accepted(*offers, **fields), *events, COMPLETED])


def test_a_conversation_goes_on_with_its_ids() -> None:
    previous = ran(*turn(1, "hello"))
    made = run_of(user("more"), previous=previous)
    assert made.messages == (user("hi"), {"role": "assistant", "content": "hello"}, user("more"))
    assert made.prior == Prior(previous.token_ids, 2)
    assert (made.program, made.previous) == ("p", "resp_1")


def test_other_instructions_replace_the_earlier_ones_and_their_ids_are_not_used() -> None:
    system = {"role": "system", "content": "be brief"}
    previous = ran(*turn(1, "hello"), messages=(system, user("hi")), echo={"instructions": "be brief"})
    same = run_of(user("more"), previous=previous, instructions="be brief")
    other = run_of(user("more"), previous=previous, instructions="be long")
    none = run_of(user("more"), previous=previous)
    assert same.messages[0] == system
    assert same.prior is not None
    assert other.messages[:2] == ({"role": "system", "content": "be long"}, user("hi"))
    assert none.messages[0] == user("hi")
    assert (other.prior, none.prior) == (None, None)


def test_ids_of_a_prompt_with_other_tools_are_not_used() -> None:
    previous = ran(*turn(1, "hello"), offers=[offer("look")])
    assert run_of(user("more"), previous=previous, tools=[LOOK]).prior is not None
    assert run_of(user("more"), previous=previous).prior is None
    assert run_of(user("more"), previous=previous, tools=[LOOK], reasoning={"effort": "low"}).prior is None


def test_the_callers_answers_complete_the_last_turn() -> None:
    first, second = call("look"), call("look", index=1)
    previous = ran(*turn(1, "", first, second), offers=[offer("look")])
    made = messages(output(second.id, "two"), output(first.id, "one"), user("so?"), previous=previous)
    assert made[2:] == [answered(first.id, "one"), answered(second.id, "two"), user("so?")]
    assert "No tool output found" in refused(output(first.id), previous=previous).message
    assert refused(output(first.id), output(second.id), output("c9"), previous=previous).param == "input.2.call_id"


def test_answers_that_are_there_already_need_no_output() -> None:
    here, theirs = call("clock"), call("look", index=1)
    previous = ran(*turn(1, "", here, theirs), *tool_round(here), offers=[offer("clock", here=True), offer("look")])
    made = run_of(output(theirs.id, "seen"), previous=previous)
    assert list(made.messages[2:]) == [answered(here.id, "found"), answered(theirs.id, "seen")]
    assert made.unread == (2,), "only the cluster's own answer may be cut if it does not fit"
    assert run_of(output(theirs.id, "seen"), previous=previous, instructions="be brief").unread == (3,)


def test_consent_by_the_id_that_the_response_gave() -> None:
    one = call("docs__read", '{"a":1}')
    log = [accepted(offer("read", server="docs", approval=True)), *turn(1, "", one), COMPLETED]
    reader = ResponseFold()
    for event in log:
        reader.feed(event)
    asked_for = reader.response.output[-1]
    previous = fold(log)
    approved = run_of(consent(asked_for.id), previous=previous, tools=[DOCS])
    assert approved.approved == (
        Call(0, 0, one.id, one.name, one.arguments, asked_for.id, ToolId.of_request("docs", "read")),
    )
    assert approved.echo["approvals"] == [asked_for.id]
    assert approved.prior is not None
    denied = messages(consent(asked_for.id, approve=False), user("why?"), previous=previous, tools=[DOCS])
    assert denied[2:] == [answered(one.id, "The user did not allow this call."), user("why?")]
    assert "No approval response" in refused(user("well?"), previous=previous, tools=[DOCS]).message


def test_calls_that_were_cut_short_are_told_as_such() -> None:
    calls = call("clock"), call("clock", index=1)
    cut = [TurnIntent(1), result(1, "", *calls), ToolIntent(((1, 0), (1, 1))), ToolAnswer(1, 0, "ok", "noon")]
    previous = fold([accepted(offer("clock", here=True)), *cut, Ended("cancelled")])
    made = run_of(user("again"), previous=previous)
    assert made.unread == (2, 3)
    assert list(made.messages[2:]) == [
        answered(calls[0].id, "noon"),
        answered(calls[1].id, "The call was ended before the tool answered."),
        user("again"),
    ]


def test_what_an_asynchronous_tool_said_last_is_told_to_the_next_run() -> None:
    one = call("clock")
    late = LateAnswer(ToolAnswer(1, 0, "ok", "noon"))
    previous = ran(*turn(1, "", one), *tool_round(one, outcome="started", text="wait"), *turn(2, "bye"), late,
                   offers=[offer("clock", here=True)])  # fmt: skip
    made = run_of(user("more"), previous=previous)
    assert made.unread == (4,)
    assert list(made.messages[-2:]) == [
        user("[The call of clock that was started earlier has ended]\nnoon"),
        user("more"),
    ]


def test_a_response_that_is_not_done_cannot_be_followed() -> None:
    assert refused(user("x"), previous=fold([accepted()])).param == "previous_response_id"


def test_servers_whose_tools_were_told_are_not_told_again() -> None:
    assert run_of(user("x"), tools=[DOCS]).echo["told_servers"] == ["docs"]
    known = {"type": "mcp_list_tools", "id": "l", "server_label": "docs", "tools": []}
    assert run_of(known, user("x"), tools=[DOCS]).echo["told_servers"] == []
    previous = ran(*turn(1, "hello"), definitions={"docs": {}})
    assert run_of(user("x"), previous=previous, tools=[DOCS]).echo["told_servers"] == []


SEEN = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
IMAGE = {"type": "image_url", "image_url": {"url": SEEN["image_url"]}}
FILE = {"type": "input_file", "filename": "notes.md", "file_data": "data:text/markdown;base64,IyBIZWxsbw=="}


def test_a_model_that_sees_gets_the_images_of_messages_and_of_answers() -> None:
    asked = {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, SEEN, FILE]}
    first = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    shot = [{"type": "input_text", "text": "Here:"}, SEEN]
    answers = [
        {"type": "function_call_output", "call_id": "c1", "output": shot},
        {"type": "function_call_output", "call_id": "c2", "output": "none"},
    ]
    made = messages(asked, first, first | {"call_id": "c2"}, *answers, user("so?"), tools=[LOOK], sees=True)
    note = {"type": "text", "text": "[file notes.md]\n# Hello"}
    assert made[0]["content"] == [{"type": "text", "text": "What is it?"}, IMAGE, note]
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert [message["content"] for message in made[2:]] == [
        "Here:\n[image: see the next message]",
        "none",
        [IMAGE],
        "so?",
    ]


def test_an_image_in_the_answer_to_an_earlier_response_follows_it() -> None:
    [looked] = [call("look")]
    previous = fold([accepted(offer()), *turn(1, "", looked), COMPLETED])
    answer = {"type": "function_call_output", "call_id": looked.id, "output": [SEEN]}
    made = messages(answer, user("so?"), previous=previous, tools=[LOOK], sees=True)
    assert [message["content"] for message in made[-3:]] == ["[image: see the next message]", [IMAGE], "so?"]
    blind = messages(answer, user("so?"), previous=previous, tools=[LOOK])
    assert [message["content"] for message in blind[-2:]] == ["[image left out: this model reads text only]", "so?"]


PDF = "data:application/pdf;base64,JVBERi0xLjcK"


@pytest.mark.parametrize(
    ("part", "field", "why"),
    [
        ({"type": "input_file", "file_data": PDF}, "file_data", "a PDF is not read here"),
        ({"type": "input_file", "file_url": "https://a.example/x.md"}, "file_url", "files are not fetched"),
        ({"type": "input_file", "file_id": "file-1"}, "file_id", "uploaded files are not read"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id", "uploaded files are not read"),
        ({"type": "input_image"}, "image_url", "Field required"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_their_field(part: dict[str, str], field: str, why: str) -> None:
    for item in (
        {"role": "user", "content": [part]},
        {"type": "function_call_output", "call_id": "c1", "output": [part]},
    ):
        caught = refused(item, tools=[LOOK])
        place = "content" if "content" in item else "output"
        assert (caught.status, caught.param) == (400, f"input.0.{place}.0.{field}"), caught.message
        assert why in caught.message


def test_an_answer_with_images_that_was_sent_back_says_that_they_are_missing() -> None:
    ran_here = {"type": "mcp_call", "id": "m1", "server_label": "docs", "name": "shot", "arguments": "{}"}
    made = messages(user("look"), ran_here | {"output": "Here:\n[image: see the next message]"}, user("so?"))
    assert made[2]["content"] == "Here:\n[image: it was not sent back]"
    cut = call("shot")
    offered = [offer("shot", here=True)]
    started = (accepted(*offered), *turn(1, "", cut, call("shot", index=1)), ToolIntent(((1, 0), (1, 1))))
    previous = fold([*started, ToolAnswer(1, 0, "ok", "x", images=(SEEN["image_url"],)), Ended("cancelled")])
    contents = [message["content"] for message in messages(user("so?"), previous=previous)]
    assert contents[-2:] == [[IMAGE], "so?"]
