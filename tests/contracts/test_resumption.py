"""Streams on the real CPU engine, broken off anywhere and gone on with: nothing is missing, nothing comes twice."""

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from starlette.datastructures import State
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.api.generate import completion_of
from cluster.app import ENGINE
from cluster.config.schema import PolicyConfig
from cluster.core.errors import HttpError, UpstreamFailed
from cluster.core.program import ProgramIdentity
from cluster.core.stream import Progress, StreamChunk, joined
from cluster.core.turn import TurnBegan, TurnDelta, TurnDone, pack_ids, unpack_ids
from replicas.chat_text import ChatText
from replicas.coalescing import Ticks
from replicas.continuation import TOOLS
from replicas.engine import ReplicaEngine
from replicas.finish_reasons import correct_answer
from replicas.grammar_queue import COMPILED_S_KEY
from replicas.program_turn import ProgramTurns
from replicas.render_threads import reading
from replicas.requests import attach_program, of_first_event, parse_request
from replicas.resumption import Watch, events
from replicas.server import _as_sent
from replicas.settings import SchedulerSettings

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

NAMED = {"type": "function", "function": {"name": "weather"}}
QUESTION = [{"role": "user", "content": "What is it like in Ulm?"}]
BREAKS = 5
"""Places at which each stream is broken off, at least."""
HEADERS = {"x-request-id": "one"}
SPLIT = "snow \N{SNOWMAN} and \U0001f30a, \u6f22\u5b57!"
"""Characters of which the tokenizer makes several tokens each."""


class Replica:
    """The engine's part of a ProgramServer, without Ray Serve around it."""

    def __init__(self, client: AsyncLLM, state: State) -> None:
        self.client = client
        self.engine = ReplicaEngine.__new__(ReplicaEngine)
        self.engine._engine_client = client
        self.engine._oai_serving_chat = state.openai_serving_chat
        self.engine._oai_serving_completion = state.openai_serving_completion
        self.engine._serving_tokens = state.serving_tokens
        self.engine.watch_streams()
        self.turns = ProgramTurns(self.engine, ChatText(self.engine.chat_renderer), Ticks(0.0), lambda rendering: None)

    async def stream(self, method: str, body: dict[str, Any], so_far: Progress | None = None) -> list[StreamChunk[str]]:
        request, watch = parse_request(method, body), Watch(so_far)
        attach_program(request, HEADERS, None, ProgramIdentity().encode())
        headers = RawRequestInfo(headers=HEADERS)
        with self.engine.streams.watching(request, watch):
            made = [piece async for piece in events(getattr(self.engine, method)(request, headers), watch)]
        for piece in made:
            if isinstance(piece, HttpError):
                raise piece
            assert isinstance(piece, StreamChunk)
        return made  # type: ignore[return-value]

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer to a chat request."""
        request, watch = parse_request("chat", body | {"stream": False, "stream_options": None}), Watch()
        attach_program(request, HEADERS, None, ProgramIdentity().encode())
        with self.engine.streams.watching(request, watch):
            [made] = [piece async for piece in self.engine.chat(request, RawRequestInfo(headers=HEADERS))]
        correct_answer(made, watch.endings)
        return made.model_dump()  # type: ignore[no-any-return]

    async def whole(self, method: str, body: dict[str, Any]) -> StreamChunk[bytes]:
        """A whole answer, as the ingress gets it."""
        request, watch = parse_request(method, body | {"stream": False, "stream_options": None}), Watch()
        attach_program(request, HEADERS, None, ProgramIdentity().encode())
        with self.engine.streams.watching(request, watch):
            answers = getattr(self.engine, method)(request, RawRequestInfo(headers=HEADERS))
            [made] = [piece async for piece in _as_sent(answers, watch)]
        assert isinstance(made, StreamChunk)
        return made

    async def turn(self, body: dict[str, Any], so_far: Progress | None = None) -> list[StreamChunk[Any]]:
        batches = self.turns.run(body, HEADERS, None, None, None, Watch(so_far))
        return [batch async for batch in batches]  # type: ignore[misc]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["sync", "async"])
async def replica(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Replica]:
    settings = SchedulerSettings(policy=PolicyConfig(name="continuum"), tool_parser="hermes")
    arguments = AsyncEngineArgs(
        model=str(tiny_model),
        served_model_name=["tiny"],
        max_model_len=2048,
        enforce_eager=True,
        block_size=32,
        num_gpu_blocks_override=129,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        scheduler_cls="replicas.control.AgentScheduler",
        additional_config=settings.additional_config(),
        structured_outputs_config=StructuredOutputsConfig(**ENGINE["structured_outputs_config"]),
    )
    front = FrontendArgs(enable_auto_tool_choice=True, tool_call_parser="hermes", enable_prompt_tokens_details=True)
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = request.param
    client = AsyncLLM.from_vllm_config(config)
    state = State()
    await init_app_state(client, state, Namespace(**(vars(front) | vars(arguments))), ("generate",))
    yield Replica(client, state)
    client.shutdown()


def folded(pieces: list[StreamChunk[str]]) -> dict[str, Any]:
    """What a client makes of a stream, however its tokens came together."""
    told: dict[str, Any] = {"heads": set(), "text": "", "ids": [], "calls": {}, "ends": [], "usage": [], "roles": []}
    told["logprobs"] = []
    for piece in pieces:
        data = piece.data.removeprefix("data: ").strip()
        if data == "[DONE]":
            told["ends"].append(data)
            continue
        event = json.loads(data)
        told["heads"].add(tuple(event.get(name) for name in ("id", "request_id", "object", "created", "model")))
        if event.get("usage") and not event["choices"]:
            told["usage"].append(event["usage"])
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            told["text"] += choice.get("text") or delta.get("content") or ""
            told["ids"] += choice.get("token_ids") or []
            told["logprobs"] += logprobs_of(choice.get("logprobs"))
            told["roles"] += [delta["role"]] if delta.get("role") else []
            if choice.get("finish_reason"):
                told["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
            for call in delta.get("tool_calls") or ():
                known = told["calls"].setdefault(call["index"], {"ids": 0, "name": "", "arguments": ""})
                known["ids"] += call.get("id") is not None
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
    return told


def logprobs_of(told: dict[str, Any] | None) -> list[Any]:
    """The tokens, the numbers of alternatives and the log probabilities of a choice. `text_offset` is left out: in a
    stream, it depends on how many tokens come together, also without a break.
    """
    if told is None:
        return []
    if "content" in told:
        entries = told["content"] or ()
        # In answers of token ids, vLLM 0.32 has the id, and 0.29 has it within a text.
        named = [one["token_id"] if "token_id" in one else one["token"] for one in entries]
        return [(name, len(one["top_logprobs"]), one["logprob"]) for name, one in zip(named, entries, strict=True)]
    alternatives = [len(one) for one in told["top_logprobs"]]
    return list(zip(told["tokens"], alternatives, told["token_logprobs"], strict=True))


def completion(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": "Once upon a time",
        "temperature": 0.0,
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": QUESTION,
        "temperature": 0.0,
        "max_completion_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **more,
    }


def token_ids(**sampling: Any) -> dict[str, Any]:
    """A request of token ids, as the ingress sends it to a replica."""
    asked = {"temperature": 0.0, "max_tokens": 24, "logprobs": 1, "ignore_eos": True, **sampling}
    stream = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    return completion_of({**stream, "token_ids": [5, 9, 17, 3], "sampling_params": asked})


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", completion(ignore_eos=True)),
    "with its ids": ("completions", completion(ignore_eos=True, return_token_ids=True)),
    "echo": ("completions", completion(ignore_eos=True, echo=True)),
    "repetition penalty": ("completions", completion(ignore_eos=True, repetition_penalty=1.3)),
    "split characters": ("completions", completion(structured_outputs={"choice": [SPLIT]}, max_tokens=100)),
    "logprobs": ("completions", completion(ignore_eos=True, logprobs=2)),
    "logprobs of split characters": (
        "completions",
        completion(structured_outputs={"choice": [SPLIT]}, max_tokens=100, logprobs=1),
    ),
    "token ids": ("generate", token_ids()),
    "token ids of split characters": ("generate", token_ids(structured_outputs={"choice": [SPLIT]}, max_tokens=100)),
    "at least": ("completions", completion(min_tokens=20, logit_bias={"2": 5.0})),
    "chat": ("chat", chat(ignore_eos=True)),
    "chat with logprobs": (
        "chat",
        chat(ignore_eos=True, logprobs=True, top_logprobs=2, return_token_ids=True),
    ),
    "chat with its ids": ("chat", chat(ignore_eos=True, return_token_ids=True)),
    "named tool": ("chat", chat(tools=list(TOOLS), tool_choice=NAMED, max_completion_tokens=120)),
    "any tool": ("chat", chat(tools=list(TOOLS), tool_choice="auto")),
    "schema": (
        "chat",
        chat(response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}),
    ),
    "cut": ("chat", chat(ignore_eos=True, max_completion_tokens=5)),
}


async def check_everywhere(replica: Replica, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """Break the stream off after its first event and in some more places; what came of the unbroken one."""
    whole = await replica.stream(method, body)
    expected = folded(whole)
    assert joined(piece.progress for piece in whole).begun.obstacle is None  # type: ignore[union-attr]
    for count in range(1, len(whole), max(1, len(whole) // BREAKS)):
        before = whole[:count]
        rest = await replica.stream(method, body, joined(piece.progress for piece in before))
        got = folded([*before, *rest])
        place = f"broken off after {count} of {len(whole)} events"
        scores, others = got.pop("logprobs"), {name: value for name, value in expected.items() if name != "logprobs"}
        assert got == others, place
        for one, other in zip(scores, expected["logprobs"], strict=True):
            # The other replica computes the known tokens as a prompt.
            assert one == (*other[:2], pytest.approx(other[2], abs=1e-3)), place
        known, unbroken = (joined(piece.progress for piece in pieces) for pieces in ((*before, *rest), whole))
        assert (known.token_ids, known.output_tokens) == (unbroken.token_ids, unbroken.output_tokens), place
        assert known.output_tokens == len(unpack_ids(known.token_ids)), place
    return expected


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_goes_on_where_it_broke_off(replica: Replica, case: str) -> None:
    expected = await check_everywhere(replica, *CASES[case])
    assert len(expected["heads"]) == 1
    assert len(expected["ends"]) == 2
    if case == "split characters":
        assert expected["text"] == SPLIT
    if case == "named tool":
        [call] = expected["calls"].values()
        assert (call["ids"], call["name"]) == (1, "weather")
        json.loads(call["arguments"])


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("method", ["completions", "chat"])
async def test_a_stop_string_over_the_break_is_found(replica: Replica, method: str, included: bool) -> None:
    body = (completion if method == "completions" else chat)(ignore_eos=True)
    text = folded(await replica.stream(method, body))["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    body |= {"stop": [stop, "never there"], "include_stop_str_in_output": included}
    expected = await check_everywhere(replica, method, body)
    assert ("stop", stop) in expected["ends"]
    assert expected["text"].endswith(stop) is included


async def test_a_stop_string_ends_no_other_request_of_the_same_client_s_id(replica: Replica) -> None:
    body = completion(ignore_eos=True)
    text = folded(await replica.stream("completions", body))["text"]
    body |= {"stop": [text[len(text) // 2 : len(text) // 2 + 6]]}
    whole = await replica.stream("completions", body)
    known = joined(piece.progress for piece in whole[:2])
    other = asyncio.create_task(replica.stream("completions", completion(ignore_eos=True, max_tokens=400)))
    while not replica.engine.streams.submitted():  # noqa: ASYNC110 - the engine has no event
        await asyncio.sleep(0.001)
    assert folded([*whole[:2], *await replica.stream("completions", body, known)]) == folded(whole)
    assert not other.done()
    assert joined(piece.progress for piece in await asyncio.wait_for(other, 60)).output_tokens == 400


async def test_what_is_known_may_be_ahead_of_what_was_sent(replica: Replica) -> None:
    method, body = CASES["named tool"]
    whole = await replica.stream(method, body)
    known = replace(joined(piece.progress for piece in whole), events=7)
    assert folded([*whole[:7], *await replica.stream(method, body, known)])["calls"][0]["ids"] == 1
    assert folded([*whole[:7], *await replica.stream(method, body, known)]) == folded(whole)


async def test_a_resumed_stream_can_be_resumed(replica: Replica) -> None:
    method, body = CASES["chat"]
    whole = await replica.stream(method, body)
    first = whole[:9]
    second = (await replica.stream(method, body, joined(piece.progress for piece in first)))[:11]
    third = await replica.stream(method, body, joined(piece.progress for piece in (*first, *second)))
    assert folded([*first, *second, *third]) == folded(whole)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2, "temperature": 0.5}, "n > 1"),
        ({"logprobs": 1}, None),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"vllm_xargs": {"caesura_resumed": 3}}, None),
        ({"prompt": ["One", "Two"]}, "several prompts"),
    ],
)
async def test_what_cannot_be_resumed_says_why(replica: Replica, more: dict[str, Any], why: str | None) -> None:
    pieces = await replica.stream("completions", completion(**more))
    progress = joined(piece.progress for piece in pieces)
    assert progress.begun is not None
    assert progress.begun.obstacle == why
    [usage] = folded(pieces)["usage"]
    assert progress.output_tokens == usage["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("chat", chat(messages=[{"role": "user", "content": "Ulm " * 400}], return_token_ids=True)),
        ("chat", chat(prompt_logprobs=1)),
        ("completions", completion(n=2, temperature=0.5)),
        ("completions", completion(prompt=["One", "Two"])),
        ("generate", token_ids()),
    ],
    ids=["ids of the prompt", "log probabilities of the prompt", "two answers", "two prompts", "token ids"],
)
async def test_the_tokens_of_a_whole_answer_are_told_beside_it(
    replica: Replica, method: str, body: dict[str, Any]
) -> None:
    piece = await replica.whole(method, body)
    usage = json.loads(piece.data)["usage"]
    told = piece.progress.prompt_tokens, piece.progress.output_tokens
    assert told == (usage["prompt_tokens"], usage["completion_tokens"])
    assert all(told)


async def test_another_prompt_is_refused(replica: Replica) -> None:
    method, body = CASES["text"]
    whole = await replica.stream(method, body)
    with pytest.raises(UpstreamFailed, match="prompt"):
        await replica.stream(method, body | {"prompt": "Twice"}, joined(piece.progress for piece in whole[:5]))


async def test_tokens_that_do_not_fit_the_grammar_end_in_an_error(replica: Replica) -> None:
    method, body = CASES["split characters"]
    whole = await replica.stream(method, body)
    known = joined(piece.progress for piece in whole)
    ids = [*unpack_ids(known.token_ids)[:3], 7]
    wrong = replace(known, events=4, token_ids=pack_ids(ids), sizes=pack_ids([1] * len(ids)), ending=None)
    with pytest.raises(HttpError, match="internal error"):
        await replica.stream(method, body, wrong)
    again = await replica.stream(method, body)
    assert folded(again)["text"] == folded(whole)["text"], "the engine lives"


async def test_a_turn_of_a_run_goes_on_where_it_broke_off(replica: Replica) -> None:
    body = {"messages": QUESTION, "tools": list(TOOLS), "tool_choice": NAMED, "temperature": 0.0}
    body["max_completion_tokens"] = 120
    whole = await replica.turn(body)

    def read(batches: list[StreamChunk[Any]]) -> tuple[Any, ...]:
        began, *deltas, done = [piece for batch in batches for piece in batch.data]
        assert isinstance(began, TurnBegan)
        assert isinstance(done, TurnDone)
        assert all(isinstance(delta, TurnDelta) for delta in deltas)
        ids = b"".join(delta.token_ids for delta in deltas)
        calls = [call for delta in deltas for call in delta.calls]
        named = [call.name for call in calls if call.name]
        return (
            began,
            ids,
            named,
            "".join(call.arguments for call in calls),
            sum(call.id is not None for call in calls),
            done,
        )

    for count in range(1, len(whole), max(1, len(whole) // BREAKS)):
        rest = await replica.turn(body, joined(batch.progress for batch in whole[:count]))
        assert read([*whole[:count], *rest]) == read(whole)


# --- whether a client may run the calls -------------------------------------------------------------------------------

TO_ULM = {
    "type": "function",
    "function": {
        "name": "travel",
        "parameters": {"type": "object", "properties": {"to": {"enum": ["Ulm"]}}, "required": ["to"]},
    },
}
ONE_CALL = '<tool_call>{"name": "travel", "arguments": {"to": "Ulm"}}</tool_call>'
CALLS = {"tools": [TO_ULM], "structured_outputs": {"choice": [ONE_CALL]}, "max_completion_tokens": 120}
MUST = {"tools": [TO_ULM], "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 120}
ENDINGS: dict[str, tuple[dict[str, Any], str]] = {
    "the model called a tool and stopped": (CALLS, "tool_calls"),
    "the budget ended within a call": (MUST | {"max_completion_tokens": 10}, "length"),
    "a stop string ended within a call": (MUST | {"stop": ["name"]}, "stop"),
    "the budget ended after the call's last token": (CALLS, "length"),
    "the model only wrote text": ({"tools": [TO_ULM], "structured_outputs": {"choice": ["It rains."]}}, "stop"),
}


@pytest.mark.parametrize("case", ENDINGS)
async def test_tool_calls_is_the_reason_only_where_the_model_ended_after_a_call(replica: Replica, case: str) -> None:
    more, expected = ENDINGS[case]
    body = chat(**more)
    if "last token" in case:
        whole = await replica.answer(body)
        body["max_completion_tokens"] = whole["usage"]["completion_tokens"] - 1  # without the end-of-turn token
    told = folded(await replica.stream("chat", body))
    assert told["ends"][0][0] == expected
    [choice] = (await replica.answer(body))["choices"]
    assert choice["finish_reason"] == expected
    if expected == "tool_calls":
        assert [call["arguments"] for call in told["calls"].values()] == ['{"to": "Ulm"}']
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"to": "Ulm"}


async def test_each_of_several_choices_has_its_own_reason(replica: Replica) -> None:
    body = chat(**MUST | {"max_completion_tokens": 10}, n=2, temperature=0.7)
    told = folded(await replica.stream("chat", body))
    assert [end[0] for end in told["ends"] if end != "[DONE]"] == ["length", "length"]
    answer = await replica.answer(body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


async def test_a_schema_that_cannot_be_enforced_is_refused_and_changes_nothing_for_others(replica: Replica) -> None:
    # With vLLM's own default, this schema would give all later requests a backend that fails on tool calls.
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked = chat(response_format={"type": "json_schema", "json_schema": {"name": "places", "schema": unique}})
    first, *_ = await replica.stream("chat", asked)
    refusal = of_first_event(first.data.encode())
    assert refusal is not None
    assert (refusal.status, "not supported" in refusal.message) == (400, True)
    assert folded(await replica.stream("chat", chat(**CALLS)))["ends"][0][0] == "tool_calls"


# --- grammars ---------------------------------------------------------------------------------------------------------


def of_pattern(pattern: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": pattern}
    return chat(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, max_completion_tokens=8
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "^[^\\x00-\\x1f]{1,20}$",
        "^[\\s\\S]*$",
        "[\\u0000-\\U0010ffff]+",
        "[^\U0010ffff]{1,9}",
        "^[ -~\u00a0-\uffff]{0,20}$",
        "[^\\s\\S]",
        "[\\uD800-\\uDFFF]",
        "\\p{L}+",
        "[z-a]",
        "[]",
        "a{5,2}",
        "[\\x00]",
        "[^\x00]",
    ],
)
async def test_any_pattern_is_answered_or_refused_by_name(replica: Replica, pattern: str) -> None:
    """Never by a 500, and the next request is answered."""
    try:
        first, *_ = await replica.stream("chat", of_pattern(pattern))
        refusal = of_first_event(first.data.encode())
    except HttpError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.status, refusal.param) == (400, "response_format")
    assert folded(await replica.stream("completions", completion(max_tokens=3)))["text"]


async def test_a_grammar_above_a_limit_is_refused_by_name(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica.engine.streams._grammars, "_max_s", 0.0)
    refusal = of_first_event((await replica.stream("chat", of_pattern("^a{1,90}$")))[0].data.encode())
    assert refusal is not None
    assert (refusal.status, refusal.param, refusal.code) == (400, "response_format", "structured_output_too_complex")
    assert refusal.message.startswith("response_format: needs more than")


async def test_the_engine_gets_the_time_of_the_trial(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    generate = replica.client.generate

    def noted(prompt: Any, params: Any, *others: Any, **options: Any) -> Any:
        seen.append((params.extra_args or {}).get(COMPILED_S_KEY))
        return generate(prompt, params, *others, **options)

    monkeypatch.setattr(replica.client, "generate", noted)
    await replica.stream("chat", of_pattern("^b+$"))
    await replica.stream("chat", of_pattern("^b+$") | {"response_format": None, "vllm_xargs": {COMPILED_S_KEY: 9.0}})
    assert seen[0] > 0
    assert seen[1] is None


async def test_a_small_prompt_does_not_wait_for_a_large_one(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are rendered and tokenized in the threads of `RenderThreads`, by their size."""
    begin, threads = threading.Event(), list[str]()
    renderer = replica.client.renderer
    tokenize = renderer.tokenizer.__class__.__call__

    def noted(tokenizer: Any, *arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return tokenize(tokenizer, *arguments, **options)

    monkeypatch.setattr(renderer.tokenizer.__class__, "__call__", noted)
    reading("flood", {"messages": [{}] * 9000})
    large = asyncio.get_running_loop().run_in_executor(renderer._executor, begin.wait, 60)
    reading("other", completion())
    assert folded(await replica.stream("completions", completion(max_tokens=3)))["text"]
    assert not large.done()
    begin.set()
    assert await large
    assert set(threads) == {"small prompts"}
    assert replica.engine.chat_renderer.renderer is renderer
