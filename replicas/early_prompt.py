"""Makes the beginning of a program's next prompt while its tools still run (`replicas.early_prefill` computes it).

The last message is an answer that may go on. What follows it, and its last word, may change the tokens before them, and
a chat template may write the end of a message in another way. Therefore two prompts are made: one of the answer so far,
and one of the answer without its last word and with a sign that no output has there. The tokens that both begin with do
not depend on what comes.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMClientError

from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, BadRequest, ControlError, ControlRefused
from cluster.core.turn import Continuation, pack_ids
from replicas.chat_text import ChatText
from replicas.continuation import Again, Examined
from replicas.early_prefill import EndReason
from replicas.program_turn import known_ids
from replicas.requests import as_refusal, parse_request

SIGN = "\u00b6"
"""The sign that is put after the answer."""

SLICE = 1024
"""Number of tokens that are compared at a time."""
LONGEST_WORD = 256
"""Characters of the last word that are left out at most. Output without spaces, such as base64, has no words."""


def settled(text: str) -> str:
    """Return ``text`` without its last word and the space before it."""
    words = text.rstrip()
    cut = max((words.rfind(space) for space in " \n\t"), default=-1)
    return text[: max(cut, len(words) - LONGEST_WORD, 0)].rstrip()


class EarlyPrompts:
    """Sends the scheduler what is known of next prompts.

    Args:
        text: the renderer of chat prompts.
        examined: how this model's template renders the sample conversations.
        extend: runs the scheduler's operation `extend`.
    """

    def __init__(self, text: ChatText, examined: Examined, extend: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self._text = text
        self._examined = examined
        self._extend = extend
        self.ends: Counter[EndReason] = Counter()
        """Prompts that were not sent to the scheduler, by reason."""

    async def send(self, key: str, body: Mapping[str, Any], continuation: Continuation | None) -> str | None:
        """Let the scheduler compute the next prompt of a paused program as far as it is known.

        Args:
            key: the program's key.
            body: the body of the next chat completion. Its last message is a tool's answer, which may go on.
            continuation: ids of the first messages. None: the prompt is rendered.

        Returns:
            Why nothing more is computed in this pause, a value of `EndReason`, or None.

        Raises:
            BadRequest: the last message is no answer of a tool in text.
            HttpError, Exception: ours and vLLM's, for a body that cannot be read.
        """
        answer = _last_answer(body)
        try:
            known, whole = await self._ids(body, continuation, answer)
            _, other = await self._ids(body, continuation, settled(answer) + SIGN)
        except VLLMClientError as error:
            if as_refusal(error).code != CONTEXT_LENGTH_EXCEEDED:
                raise
            return self._end(EndReason.TOO_LONG)
        if whole is None or other is None:
            return self._end(EndReason.RENDERED_AGAIN)
        ids = await self._text.in_thread(beginning, whole, other)
        try:
            answered = await self._extend(key=key, at=known, ids=ids)
        except ControlRefused:
            return self._end(EndReason.REWRITTEN)
        except ControlError:
            return self._end(EndReason.NO_ANSWER)
        ended: str | None = answered["ended"]
        return ended

    def add_to(self, snapshot: dict[str, Any]) -> None:
        """Add the prompts that were not sent to the scheduler's numbers."""
        totals = snapshot["early_prefill_ends"]
        for reason, count in self.ends.items():
            totals[str(reason)] += count

    def _end(self, reason: EndReason) -> str:
        self.ends[reason] += 1
        return str(reason)

    async def _ids(
        self, body: Mapping[str, Any], continuation: Continuation | None, answer: str
    ) -> tuple[int, Sequence[int] | None]:
        """Return the number of tokens that are known, and the tokens after them; None: they are rendered again."""
        *before, last = body["messages"]
        given = {**body, "messages": [*before, {**last, "content": answer}]}
        self._text.check_parts(given)
        request = parse_request("chat", self._text.legible(given))
        self._text.make_plain(request)
        if continuation is None:
            return 0, await self._text.prompt_ids(request)
        known = known_ids(request, continuation)
        rest = await self._text.rest(request, self._examined, continuation.messages, continuation.token_ids)
        return len(known), None if isinstance(rest, Again) else rest


def _last_answer(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "tool":
        raise BadRequest("the last message must be a tool's answer, as far as it is known", param="messages")
    if not isinstance(content := last.get("content"), str):
        text = json.dumps(content, default=str)[:100]
        raise BadRequest(f"the last message's content must be text, not {text}", param="messages")
    return content


def beginning(one: Sequence[int], other: Sequence[int]) -> bytes:
    """Return the packed tokens with which both begin. It is for threads, as both may be long."""
    return pack_ids(one[: common(one, other)])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both begin. Whole slices are compared, which takes a tenth of the time."""
    length, place = min(len(one), len(other)), 0
    while place < length and one[place : place + SLICE] == other[place : place + SLICE]:
        place += SLICE
    return next((differs for differs in range(place, length) if one[differs] != other[differs]), length)
