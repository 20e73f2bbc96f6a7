"""The log probabilities of a streamed chat completion, one entry for each token.

vLLM 0.29 sends no event for a token whose text its parser keeps back, such as the beginning of a tool call, and loses
the log probability with it. If the client requests token ids, it sends an event for each token. So ids are requested
here, and taken out of the events again.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

Other = TypeVar("Other")

_PREFIX = "data: "


def request_every_token(request: Any) -> bool:
    """Let vLLM send an event for each token of ``request``, if it is a streamed chat completion with log probabilities.

    Returns:
        Whether `without_ids` has to take the ids out of the events.
    """
    wanted = bool(getattr(request, "stream", False) and "messages" in request.model_fields_set and request.logprobs)
    if not wanted or request.return_token_ids:
        return False
    request.return_token_ids = True
    return True


async def without_ids(events: AsyncGenerator[str | Other]) -> AsyncGenerator[str | Other]:
    """Yield server-sent events of vLLM without token ids. Other pieces are passed on unchanged."""
    async with aclosing(events):
        async for event in events:
            yield _without_ids(event) if isinstance(event, str) else event


def _without_ids(event: str) -> str:
    if "token_ids" not in event:
        return event
    chunk = json.loads(event.removeprefix(_PREFIX))
    chunk.pop("prompt_token_ids", None)
    for choice in chunk.get("choices", ()):  # an error has none
        choice.pop("token_ids", None)
    return f"{_PREFIX}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
