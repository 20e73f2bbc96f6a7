"""Computes a program's next prompt in its pause where that does not extend the context (`replicas.early_prefill`).

A client that runs its own tools sends the assistant's message back without its reasoning, and some chat templates
render the history again. The next prompt then differs from the context where the answer begins, or before. All of it
up to the tool's answer is known when the turn has ended. So it is rendered at once, with two different answers, and
the tokens that both begin with are computed in steps with room.

Nothing about the next prompt is assumed: the next turn finds blocks by the hashes of its own tokens. A client that
sends something else has only caused waste, which is counted.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from cluster.core.errors import ControlError
from replicas.chat_text import ChatText
from replicas.continuation import Examined
from replicas.early_prompt import SIGN, beginning
from replicas.render_threads import reading_ahead
from replicas.requests import parse_request

logger = logging.getLogger("ray.serve")

MAX_RENDERING = 16
"""Prompts that are rendered ahead at the same time. Of more, the next turns are rendered when they come, as always."""
TAILS = ("a", SIGN)
"""Two answers of the tool, or of the user, that have no beginning in common."""
REASONING = ("reasoning", "reasoning_content")
DATA = "data: "


class AnswerSoFar:
    """The assistant's message of one turn, as its client sends it back, put together from what the client gets."""

    def __init__(self) -> None:
        self.reasons = False
        """Whether the answer has reasoning, which clients do not send back."""
        self.choices = 0
        self._content: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def feed(self, piece: bytes) -> None:
        """Take a whole answer, or some server-sent events of a stream."""
        for answer in _answers(piece.decode()):
            for choice in answer.get("choices") or ():
                self.choices = max(self.choices, 1 + int(choice.get("index") or 0))
                self._add(choice.get("message") or choice.get("delta") or {})

    def _add(self, part: Mapping[str, Any]) -> None:
        self.reasons = self.reasons or any(part.get(name) for name in REASONING)
        if text := part.get("content"):
            self._content.append(text)
        for number, call in enumerate(part.get("tool_calls") or ()):
            known = self._calls.setdefault(call.get("index", number), {"id": "", "name": "", "arguments": ""})
            function = call.get("function") or {}
            known["id"] = call.get("id") or known["id"]
            known["name"] += function.get("name") or ""
            known["arguments"] += function.get("arguments") or ""

    def messages(self, answer: str) -> list[dict[str, Any]]:
        """Return the message, and the next one with this answer of the tool or the user."""
        text = "".join(self._content) or None
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self._calls.items())
        ]
        if not calls:
            return [{"role": "assistant", "content": text or ""}, {"role": "user", "content": answer}]
        assistant = {"role": "assistant", "content": text, "tool_calls": calls}
        return [assistant, {"role": "tool", "tool_call_id": calls[0]["id"], "content": answer}]


def _answers(piece: str) -> Iterator[dict[str, Any]]:
    events = [line.removeprefix(DATA) for line in piece.split("\n") if line.startswith(DATA)]
    for text in events if events else [piece]:
        if text.startswith("{"):
            yield json.loads(text)


class RewrittenAhead:
    """Sends the scheduler the next prompts that do not extend their contexts.

    Args:
        text: the renderer of chat prompts.
        examined: how this model's template renders the sample conversations.
        extend: runs the scheduler's operation `extend`.
        enabled: whether it is wanted.
        may_reason: whether answers may have reasoning. Where they have none and the template does not render the
            history again, each next prompt extends its context, and no answer is collected.
    """

    def __init__(
        self,
        text: ChatText,
        examined: Examined,
        extend: Callable[..., Awaitable[dict[str, Any]]],
        *,
        enabled: bool,
        may_reason: bool = True,
    ) -> None:
        self._text = text
        self._renders_again = not examined.stable
        self._extend = extend
        self._enabled = enabled and (may_reason or self._renders_again)
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, method: str, key: str | None, *, resumed: bool = False) -> AnswerSoFar | None:
        """Return what collects a turn's answer; None: the next prompt is not rendered ahead.

        ``resumed``: another replica sent the beginning of the answer, so that it cannot be collected here.
        """
        wanted = self._enabled and method == "chat" and key is not None and not resumed
        return AnswerSoFar() if wanted else None

    def turn_ended(self, key: str, body: Mapping[str, Any], answer: AnswerSoFar) -> None:
        """Render the next prompt in the background, if it does not extend the context."""
        if answer.choices != 1 or not (answer.reasons or self._renders_again) or len(self._tasks) >= MAX_RENDERING:
            return
        task = asyncio.create_task(self._send(key, body, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Wait until nothing is rendered."""
        await asyncio.gather(*self._tasks)

    async def _send(self, key: str, body: Mapping[str, Any], answer: AnswerSoFar) -> None:
        reading_ahead()
        try:
            one, other = [await self._ids(body, answer.messages(tail)) for tail in TAILS]
            ids = await self._text.in_thread(beginning, one, other)
            await self._extend(key=key, at=0, ids=ids, rewrites=True)
        except ControlError as error:
            logger.debug("the next prompt of %s is not computed ahead: %s", key, error)
        except Exception as error:  # noqa: BLE001 - a prompt that cannot be rendered is refused when it comes
            logger.debug("the next prompt of %s cannot be rendered ahead: %r", key, error)

    async def _ids(self, body: Mapping[str, Any], more: list[dict[str, Any]]) -> list[int]:
        request = parse_request("chat", self._text.legible({**body, "messages": [*body["messages"], *more]}))
        self._text.make_plain(request)
        return await self._text.prompt_ids(request)
