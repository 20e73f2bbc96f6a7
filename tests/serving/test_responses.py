"""OpenAI's client against the responses of a real cluster: real replicas, real tools, a real Redis."""

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest
from openai import ConflictError, NotFoundError, OpenAI

from cluster.local.cluster import LocalCluster
from tests.serving.conftest import CONTEXT_TOKENS
from tests.serving.program_requests import BLOCK, ended, outputs, plan, runs, server_side, text_of, until
from tests.serving.tool_site import COMMANDING, FLOOD_CAP_BYTES, ToolSite
from tools_runtime.text import restored, sanitized

pytestmark = pytest.mark.cluster

LAST_STATUSES = ("completed", "incomplete")
LAST = ("response.completed", "response.incomplete")

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def told(events: list[Any]) -> list[dict[str, Any]]:
    return [event.to_dict() for event in events]


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def session(program: str) -> dict[str, str]:
    return {"X-Session-Id": program}


def test_a_plain_response_says_something_and_what_it_took(openai: OpenAI) -> None:
    response = openai.responses.create(model="tiny", input="Say a word.", max_output_tokens=12)
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 12
    assert openai.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_a_stream_is_numbered_without_a_gap_and_adds_up_to_its_response(openai: OpenAI) -> None:
    events: list[Any] = list(openai.responses.create(**plan("calculator"), stream=True))
    assert numbers(events) == list(range(len(events)))
    assert events[0].type == "response.created"
    assert [event.type for event in events if event.type in LAST] == [events[-1].type]
    texts: dict[str, str] = defaultdict(str)
    for event in events:
        if event.type == "response.output_text.delta":
            texts[event.item_id] += event.delta
    final = events[-1].response
    said = {item.id: item.content[0].text for item in final.output if item.type == "message" and item.content}
    assert said
    assert texts == said
    assert outputs(final)
    assert openai.responses.retrieve(final.id).to_dict() == final.to_dict()


BUDGETS = (8, 16, 24, 32, 40, 56, 72)


@pytest.mark.parametrize("form", ["plain", "stream", "background"])
def test_a_budget_that_ends_within_a_call_runs_and_completes_none(openai: OpenAI, site: ToolSite, form: str) -> None:
    """`book` is ours, `weather` the caller's. Some of the budgets end within the call."""
    cut = 0
    for budget in BUDGETS:
        for name in ("rest", "weather"):
            tools = [WEATHER] if name == "weather" else server_side("rest")
            forced = {"tool_choices": [{"type": "function", "name": name}], "max_turns": 2}
            asked: dict[str, Any] = {"model": "tiny", "input": "Go.", "tools": tools, "max_output_tokens": budget}
            booked = len(site.bookings)
            if form == "stream":
                *_, last = openai.responses.create(**asked, extra_body=forced, stream=True)
                response = last.response  # type: ignore[union-attr]
            else:
                response = openai.responses.create(**asked, extra_body=forced, background=form == "background")
                response = ended(openai, response.id)
            calls = [item for item in response.output if item.type in ("function_call", "mcp_call")]
            if not calls or calls[0].status == "completed":
                continue
            cut += 1
            assert (response.status, calls[0].status) == ("incomplete", "incomplete")
            assert response.incomplete_details.reason == "max_output_tokens"
            assert len(site.bookings) == booked
            assert not outputs(response)
    assert cut > 0, "no budget ended within a call: choose others"


def test_a_background_response_is_polled_to_its_end(openai: OpenAI) -> None:
    response = openai.responses.create(**plan("calculator", "shell"), background=True)
    assert response.status in ("queued", "in_progress")
    done = ended(openai, response.id)
    assert done.status in ("completed", "incomplete")
    assert [item.name for item in done.output if item.type == "mcp_call"][:2] == ["calculator", "shell"]
    assert len(outputs(done)) >= 2


@pytest.mark.parametrize("seen", [1, 7, 25])
def test_a_broken_stream_is_resumed_where_it_broke(openai: OpenAI, seen: int) -> None:
    stream = openai.responses.create(**plan("calculator", "shell", "calculator"), background=True, stream=True)
    events: list[Any] = []
    for event in stream:
        events.append(event)
        if len(events) == seen:
            break
    stream.close()
    response_id = events[0].response.id
    rest = list(openai.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number))
    assert numbers(events + rest) == list(range(len(events) + len(rest)))
    assert rest[-1].type in LAST
    again = list(openai.responses.retrieve(response_id, stream=True))
    assert told(events + rest) == told(again)


def test_a_callers_tool_is_answered_and_the_next_turn_goes_on_token_exact(openai: OpenAI, client: httpx.Client) -> None:
    shared: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "max_output_tokens": 60, "temperature": 0.0}
    forced = {"tool_choices": [{"type": "function", "name": "weather"}]}
    first = openai.responses.create(**shared, input="What is the weather?", extra_body=forced)
    assert first.status == "completed"
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
    second = openai.responses.create(
        **shared, previous_response_id=first.id, input=[answer], extra_body={"max_turns": 1}
    )
    assert second.previous_response_id == first.id
    assert second.status in ("completed", "incomplete"), (second.to_dict(), runs(client, first.id))
    before, after = runs(client, first.id)
    [turn] = after["turns"]
    assert turn["rendering"] == "continued"
    assert turn["cached_tokens"] >= len(before["token_ids"]) - BLOCK
    assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
    assert "sunny, 21 degrees" in text_of(client, turn["prompt_ids"])


def test_a_background_response_is_cancelled_while_its_tool_works(openai: OpenAI, site: ToolSite) -> None:
    site.gate.clear()
    booked = len(site.bookings)
    response = openai.responses.create(**plan("book"), background=True)
    until(lambda: len(site.bookings) > booked, "the tool was not called")
    with pytest.raises(ConflictError):
        openai.responses.delete(response.id)
    cancelled = openai.responses.cancel(response.id)
    site.gate.set()
    assert cancelled.status == "cancelled"
    assert [(item.type, item.status) for item in cancelled.output] == [("mcp_call", "incomplete")]  # type: ignore[union-attr]
    assert openai.responses.cancel(response.id).to_dict() == cancelled.to_dict()


def test_what_was_put_in_can_be_listed_and_what_is_deleted_is_gone(openai: OpenAI) -> None:
    said: Any = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    response = openai.responses.create(model="tiny", input=said, max_output_tokens=4)
    items: Any = list(openai.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.content if isinstance(item.content, str) else item.content[0].text for item in items] == [
        "one",
        "two",
        "three",
    ]
    openai.responses.delete(response.id)
    for gone in (response.id, "resp_nobody", "chatcmpl-1"):
        for ask in (
            openai.responses.retrieve,
            openai.responses.cancel,
            openai.responses.delete,
            lambda name: list(openai.responses.input_items.list(name)),
            lambda name: list(openai.responses.retrieve(name, stream=True)),
        ):
            with pytest.raises(NotFoundError):
                ask(gone)


def test_each_token_of_a_text_has_its_log_probability(openai: OpenAI) -> None:
    stream = openai.responses.create(
        model="tiny", input="Say something.", max_output_tokens=24, top_logprobs=2, temperature=0, stream=True
    )
    events = list(stream)
    response = events[-1].response  # type: ignore[union-attr]
    [said] = [item for item in response.output if item.type == "message"]
    [part] = said.content
    assert part.type == "output_text"
    assert len(part.logprobs) == response.usage.output_tokens
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in part.logprobs]


A_CALL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"extra_body": {"top_logprobs": None, "structured_outputs": {"regex": "(<tool_ca ){3}"}}},
        {"tools": [A_CALL], "tool_choice": "required"},
    ],
    ids=["text", "text that begins like a call", "a call"],
)
def test_chat_logprobs_without_a_number_of_alternatives_have_one_entry_a_token(
    openai: OpenAI, more: dict[str, Any], stream: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 24,
        "logprobs": True,
        "extra_body": {"top_logprobs": None},
        **more,
    }
    if stream:
        chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert not any('token_ids":[' in chunk.model_dump_json() for chunk in chunks)
        usage = chunks[-1].usage
        found = [
            one
            for chunk in chunks
            for choice in chunk.choices
            for one in (choice.logprobs and choice.logprobs.content) or ()
        ]
    else:
        answer = openai.chat.completions.create(**asked)
        usage, logprobs = answer.usage, answer.choices[0].logprobs
        found = (logprobs and logprobs.content) or []
    assert usage is not None
    assert len(found) == usage.completion_tokens
    assert all(one.logprob <= 0 and one.top_logprobs == [] for one in found)


def test_a_conversation_is_continued_from_its_exact_tokens_and_then_compacted(
    openai: OpenAI, client: httpx.Client
) -> None:
    made = openai.conversations.create(items=[{"type": "message", "role": "user", "content": "Remember: blue. " * 20}])
    asked: Any = {"model": "tiny", "conversation": made.id, "max_output_tokens": 16}
    openai.responses.create(**asked, input="What was it?")
    openai.responses.create(**asked, input="And now?")
    before, after = runs(client, made.id)
    assert after["turns"][0]["rendering"] == "continued"
    assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
    items = list(openai.conversations.items.list(made.id, order="asc"))
    assert [getattr(item, "role", "") for item in items] == ["user", "user", "assistant", "user", "assistant"]
    compacted = openai.responses.compact(model="tiny", input=[item.to_dict() for item in items])  # type: ignore[misc]
    assert [item.type for item in compacted.output] == ["message"] * 3 + ["compaction"]
    counted = openai.responses.input_tokens.count(
        model="tiny",
        input=[item.to_dict() for item in compacted.output],  # type: ignore[misc]
    )
    again = openai.responses.create(
        model="tiny",
        input=[item.to_dict() for item in compacted.output],  # type: ignore[misc]
        max_output_tokens=8,
    )
    assert again.usage is not None
    assert again.usage.input_tokens == counted.input_tokens


def test_a_client_that_goes_away_takes_its_program_with_it(openai: OpenAI, client: httpx.Client) -> None:
    wanted = plan("calculator", max_output_tokens=3000, tool_choice="required", extra_body={"max_turns": 64})
    stream = openai.responses.create(**wanted, stream=True, extra_headers=session("left"))
    next(event for event in stream if event.type == "response.mcp_call_arguments.delta")
    stream.close()

    def status() -> str:
        return next(head["status"] for head in client.get("/v1/programs").json()["data"] if head["id"] == "left")

    until(lambda: status() == "cancelled", "the run goes on")

    def idle() -> bool:
        replicas = client.get("/admin/statistics").json()["replicas"]
        return all(replica["running"] == replica["waiting"] == 0 for replica in replicas)

    until(idle, "a replica still works for nobody")


def test_what_a_tool_says_cannot_speak_for_anybody_else(openai: OpenAI, client: httpx.Client) -> None:
    response = openai.responses.create(**plan("obey", "calculator"), extra_headers=session("obey"))
    said = outputs(response)[0]
    assert said == sanitized(COMMANDING) != COMMANDING
    assert restored(said) == COMMANDING
    assert not set(said) & {chr(code) for code in range(32) if chr(code) not in "\t\n"}
    [run] = runs(client, "obey")
    _, poisoned, harmless = (turn["prompt_ids"] for turn in run["turns"][:3])
    assert sanitized(COMMANDING) in text_of(client, poisoned)
    special = set(client.post("/tokenize", json={"model": "tiny", "prompt": COMMANDING[:10]}).json()["tokens"][:1])
    special |= set(client.post("/tokenize", json={"model": "tiny", "prompt": "<|im_start|>"}).json()["tokens"][:1])
    assert len(special) == 2
    # The template writes some itself, as many around any answer.
    assert [token for token in poisoned if token in special] == [token for token in harmless if token in special]


def test_tools_that_flood_hang_or_wait_keep_nobody_else_waiting(
    openai: OpenAI, client: httpx.Client, site: ToolSite
) -> None:
    site.gate.clear()
    booked, hung = len(site.bookings), site.hung
    waiting = openai.responses.create(**plan("book"), background=True)
    hanging = openai.responses.create(**plan("hang"), background=True)
    flooded = openai.responses.create(**plan("flood"), background=True, extra_headers=session("flood"))
    until(lambda: len(site.bookings) > booked and site.hung > hung, "the tools were not called")
    served = openai.responses.create(**plan("calculator"))
    assert served.status in ("completed", "incomplete")
    assert outputs(served)
    flood = ended(openai, flooded.id)
    assert flood.status in ("completed", "incomplete"), flood
    [cut] = outputs(flood)
    assert cut.startswith("water water")
    assert cut.endswith(f"[... cut: the answer is longer than {FLOOD_CAP_BYTES} bytes]")
    [run] = runs(client, "flood")
    assert run["turns"][0]["calls"][0]["truncated"]
    hang = ended(openai, hanging.id)
    assert hang.status in ("completed", "incomplete"), hang
    assert outputs(hang)[0].startswith("timeout: ")
    assert openai.responses.retrieve(waiting.id).status == "in_progress"
    site.gate.set()
    assert ended(openai, waiting.id).status in ("completed", "incomplete")


def test_an_answer_that_exceeds_the_context_is_cut_for_the_model_and_whole_for_the_caller(
    openai: OpenAI, client: httpx.Client
) -> None:
    response = openai.responses.create(**plan("deluge"), extra_headers=session("deluge"))
    assert response.status in LAST_STATUSES, response.error
    [answer] = outputs(response)
    assert len(answer) > 60_000
    more = plan(input="And now?", previous_response_id=response.id)
    assert openai.responses.create(**more, extra_headers=session("deluge")).status in LAST_STATUSES
    run, _ = runs(client, "deluge")
    first, second = run["turns"]
    assert first["answer_chars"] is None and 200 < second["answer_chars"] < len(answer)
    assert second["rendering"] == "continued" and second["prompt_tokens"] <= CONTEXT_TOKENS - 300
    assert "characters of this answer were left out" in text_of(client, second["prompt_ids"])


def test_registered_tools_are_listed_with_what_is_known_of_their_durations(
    openai: OpenAI, client: httpx.Client, cluster: LocalCluster
) -> None:
    from typer.testing import CliRunner

    from cluster.cli import app

    openai.responses.create(**plan("shell", "notes__add"))
    listed = client.get("/v1/tools").json()
    tools = {tool["name"]: tool for tool in listed["data"]}
    assert {"calculator", "shell", "notes__add", "notes__count", "book"} <= set(tools)
    assert tools["notes__add"]["owner"] == "notes"
    assert "operation" in tools["calculator"]["parameters"]["properties"]
    # The shell's calls are told apart by the program that they run.
    [note], shell = tools["notes__add"]["durations"], tools["shell"]["durations"]
    assert {"count", "p50_s", "p90_s", "p99_s"} == set(note["run"]) == set(note["queue"])
    assert note["run"]["p50_s"] <= note["run"]["p99_s"]
    assert {each["name"].partition(":")[0] for each in shell} == {"shell"}
    assert any(":" in each["name"] for each in shell)
    assert listed["overall"]["run"]["count"] >= 2
    table = CliRunner().invoke(app, ["tools", "--url", cluster.url], env={"COLUMNS": "160"})
    assert table.exit_code == 0, table.output
    assert all(name in table.output for name in ("calculator", shell[-1]["name"], "notes__add", "all tools"))
    told_again = CliRunner().invoke(app, ["tools", "--url", cluster.url, "--json"])
    assert {tool["name"] for tool in json.loads(told_again.output)["data"]} == set(tools)
