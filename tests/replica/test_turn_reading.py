"""vLLM's stream of one chat completion, read as a turn's pieces; what it may do wrong ends in a refusal."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse

from cluster.core.errors import HttpError
from cluster.core.stream import Ending
from cluster.core.turn import CallDelta, PromptMode, TurnBegan, TurnDelta, TurnDone, pack_ids
from replicas.program_turn import Piece, Reading, together
from replicas.resumption import Watch

FIRST = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}
END = {"choices": [], "usage": USAGE}


def chunk(*ids: int, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "token_ids": list(ids), "finish_reason": finish_reason}]}


async def read(
    *events: Any, rendering: PromptMode = PromptMode.FIRST, reasoning: bool = True, ending: Ending | None = None
) -> list[Piece]:
    watch = Watch()
    if ending is not None:
        watch.endings[0] = ending

    async def stream() -> AsyncIterator[Any]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n" if isinstance(event, dict) else event

    reading = Reading(rendering, pack_ids([9]), reasoning, watch)
    return [piece async for told in reading.pieces(stream()) for piece in told.data]


async def test_a_whole_turn() -> None:
    thought, word = chunk(5, reasoning="Hm."), chunk(2, content="Hi", finish_reason="stop")
    assert await read(FIRST, thought, word, END, "data: [DONE]\n\n") == [
        TurnBegan(PromptMode.FIRST, pack_ids([1, 2, 3])),
        TurnDelta(pack_ids([5]), reasoning="Hm."),
        TurnDelta(pack_ids([2]), content="Hi"),
        TurnDone("stop", 3, 2, 2),
    ]


async def test_of_a_continued_prompt_only_what_was_added_is_told() -> None:
    began, *_ = await read(FIRST, chunk(5, 2, finish_reason="stop"), END, rendering=PromptMode.CONTINUED)
    assert began == TurnBegan(PromptMode.CONTINUED, pack_ids([9]))


async def test_reasoning_that_nobody_wants_is_left_out_and_its_ids_are_not() -> None:
    _, thought, *_ = await read(FIRST, chunk(5, 2, reasoning="Hm.", finish_reason="stop"), END, reasoning=False)
    assert thought == TurnDelta(pack_ids([5, 2]))


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([ErrorResponse(error=ErrorInfo(message="bad", type="x", code=400))], 400),
        ([{"error": {"message": "bad", "type": "x", "code": 400}}], 400),
        ([FIRST, chunk(5), {"error": {"message": "oops", "type": "x", "code": 500}}], 500),
        ([FIRST, chunk(5)], 502),
        ([], 502),
        ([FIRST, chunk(5, finish_reason="stop"), END], 502),
        ([FIRST, chunk(5, 6), END], 502),
    ],
    ids=["refusal", "refusal in the stream", "failure", "cut off", "nothing", "an id is missing", "no reason"],
)
@pytest.mark.parametrize("rendering", PromptMode)
async def test_what_goes_wrong_is_the_last_piece(rendering: PromptMode, events: list[Any], status: int) -> None:
    *_, last = pieces = await read(*events, "data: [DONE]\n\n", rendering=rendering)
    assert isinstance(last, HttpError)
    assert last.status == status
    assert sum(isinstance(piece, HttpError | TurnDone) for piece in pieces) == 1


CALL = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a": 1'}}


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        (Ending("length"), "length"),
        (Ending("stop", "word"), "stop"),
        (Ending("repetition"), "repetition"),
        (Ending("stop"), "tool_calls"),
        (Ending("stop", 7), "tool_calls"),
    ],
    ids=["the budget", "a stop string", "a repetition", "the model", "the model's own token"],
)
@pytest.mark.parametrize("of_vllm", ["tool_calls", "stop"], ids=["auto", "named"])
async def test_a_turn_with_calls_ends_for_the_engines_reason(ending: Ending, reason: str, of_vllm: str) -> None:
    """vLLM says `tool_calls` of every streamed turn in which a call began, and never of a named one."""
    *_, done = await read(FIRST, chunk(5, 2, tool_calls=[CALL], finish_reason=of_vllm), END, ending=ending)
    stopped_by = ending.stop_reason if isinstance(ending.stop_reason, str) else None
    assert done == TurnDone(reason, 3, 2, 2, stopped_by)


async def test_a_turn_that_the_engine_gave_up_is_no_turn() -> None:
    *_, last = await read(FIRST, chunk(5, 2, finish_reason="abort"), END, ending=Ending("abort"))
    assert isinstance(last, HttpError)
    assert last.status == 502


def test_deltas_that_travel_together_are_one() -> None:
    began = TurnBegan(PromptMode.FIRST, b"")
    deltas = [
        TurnDelta(pack_ids([1]), "a", "x", (CallDelta(0, "id0", "f"),)),
        TurnDelta(pack_ids([2]), "b", "y", (CallDelta(0, arguments="{"), CallDelta(0, arguments="}"))),
        TurnDelta(pack_ids([3]), calls=(CallDelta(1, "id1", "g", "{}"),)),
    ]
    calls = (CallDelta(0, "id0", "f", "{}"), CallDelta(1, "id1", "g", "{}"))
    done = TurnDone("stop", 1, 0, 3)
    assert together([began, *deltas, done]) == [began, TurnDelta(pack_ids([1, 2, 3]), "ab", "xy", calls), done]
