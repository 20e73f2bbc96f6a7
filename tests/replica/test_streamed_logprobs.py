"""Events of a stream whose token ids were requested only for its log probabilities."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from replicas.streamed_logprobs import without_ids


def event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"choices": [{"delta": {"content": "a"}, "token_ids": [5]}], "prompt_token_ids": [1]},
         {"choices": [{"delta": {"content": "a"}}]}),
        ({"error": {"message": "token_ids: no"}}, {"error": {"message": "token_ids: no"}}),
        ({"choices": [], "usage": {"total_tokens": 3}}, {"choices": [], "usage": {"total_tokens": 3}}),
    ],
)  # fmt: skip
async def test_only_token_ids_are_taken_out(sent: Any, expected: Any) -> None:
    async def events() -> AsyncGenerator[str | bytes]:
        yield event(sent)
        yield b"other"
        yield "data: [DONE]\n\n"

    first, *rest = [one async for one in without_ids(events())]
    assert isinstance(first, str) and first.endswith("\n\n")
    assert json.loads(first.removeprefix("data: ")) == expected
    assert rest == [b"other", "data: [DONE]\n\n"]
