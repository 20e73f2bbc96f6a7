"""One turn of a program that the cluster runs. Its prompt continues from exact ids, and its output has its ids.

vLLM accepts a prompt's ids beside the messages (``kv_transfer_params.prompt_token_ids``, made for disaggregated
prefill). It then skips templating and tokenization. Everything else of a chat request works as usual: tool choice,
structured output, and the parsing of reasoning and tool calls.
"""

import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse
from ray.llm._internal.serve.core.protocol import RawRequestInfo
from vllm.exceptions import VLLMClientError

from cluster.core.answer_cut import shortened
from cluster.core.errors import CONTEXT_LENGTH_EXCEEDED, BadRequest, HttpError, UpstreamFailed
from cluster.core.stream import Progress, StreamChunk, joined
from cluster.core.tools import ENDED_WITH_CALLS
from cluster.core.turn import (
    CallDelta,
    Continuation,
    PromptMode,
    TurnBegan,
    TurnDelta,
    TurnDone,
    TurnPiece,
    pack_ids,
    unpack_ids,
)
from replicas.chat_text import NOT_TEXT, ChatText
from replicas.coalescing import Ticks, gather
from replicas.continuation import Again, Examined
from replicas.finish_reasons import ended_by_model
from replicas.fitted_answers import Fitted, fitted
from replicas.render_threads import VALUE
from replicas.requests import as_refusal, attach_program, naming_field, of_response, parse_request
from replicas.resumption import Watch

logger = logging.getLogger("ray.serve")

FIXED: Mapping[str, Any] = {
    "n": 1,
    "echo": False,
    "use_beam_search": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "truncate_prompt_tokens": None,
    "kv_transfer_params": None,
}
"""Fields with the only value that a program's turn may have: a turn is one stream of ids, after all earlier ones."""

OURS: Mapping[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "include_reasoning": True,  # without it, vLLM keeps the ids back; what the caller does not want is left out here
}
"""Fields that are set here, whatever the caller requested."""

CHARACTER_BYTES = 4
"""Largest number of bytes of a character."""
MEDIA = frozenset({"image_url", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds", "video_url"})
"""Keys of the parts of a message whose tokens do not depend on the length of their text."""
ABORTED = "abort"
"""vLLM's finish reason of a request that was ended by somebody other than its caller."""

Piece = TurnPiece | HttpError


@dataclass(frozen=True, slots=True)
class Prompt:
    """The way in which a turn's prompt is made. The lists are empty if vLLM makes it."""

    mode: PromptMode
    known: list[int] = field(default_factory=list)
    """The ids from which it continues."""
    added: list[int] = field(default_factory=list)
    """The ids after them."""
    tokens: int = 0
    """Its length. 0: it was not counted."""


class ProgramTurns:
    """The turns of a replica.

    Args:
        engine: a started `ReplicaEngine`.
        text: the renderer of the engine's chat prompts.
        ticks: the ends of the intervals within which pieces of one turn are sent together.
        count: called for each turn with the way in which its prompt was made.
    """

    def __init__(
        self,
        engine: Any,
        text: ChatText,
        ticks: Ticks,
        count: Callable[[PromptMode], None],
    ) -> None:
        self._engine = engine
        self._text = text
        self._ticks = ticks
        self._count = count
        self._examined: Examined = NOT_TEXT
        self._logged: set[Again] = set()

    @property
    def examined(self) -> Examined:
        """How the model's chat template rendered the samples."""
        return self._examined

    @property
    def template_prefix_stable(self) -> bool:
        """Whether the model's chat template extended every sample conversation exactly."""
        return self._examined.stable

    async def examine(self) -> None:
        """Examine the model's chat template. Until then every prompt is rendered again."""
        self._examined = await self._text.examine()
        if self._examined.faults:
            usable = "extended only where it keeps what it wrote" if self._examined.closings else "rendered again"
            logger.warning(
                "the chat template does not extend: %s; prompts are %s", ", ".join(self._examined.faults), usable
            )

    async def run(
        self,
        body: Mapping[str, Any],
        headers: dict[str, str],
        key: str | None,
        identity: str | None,
        continuation: Continuation | None,
        watch: Watch,
        answers: Sequence[int] | None = None,
    ) -> AsyncGenerator[StreamChunk[tuple[TurnPiece, ...]] | HttpError]:
        """Yield one TurnBegan, TurnDeltas and one TurnDone, or an HttpError at the end. Closing it aborts the turn.

        Pieces that are ready together are sent as one message.

        Args:
            body: the body of a chat completion, with all messages of the program so far.
            headers: headers that vLLM may see.
            key: the program's key.
            identity: the encoded ProgramIdentity.
            continuation: ids of the first messages. None on the program's first turn.
            watch: sees the engine's outputs, and knows how far the turn has come on another replica.
            answers: places of the messages that are shortened if the prompt does not fit. Their content is text. None:
                the turn is no run's, and its client's bound of output is not lowered to fit beside the prompt. One that
                is as large as the window is left out.

        Raises:
            HttpError, Exception: ours and vLLM's, for a request that cannot be served.
        """
        _check_fixed(body)
        self._text.check_parts(dict(body))
        request = parse_request("chat", {**self._text.legible(dict(body)), **OURS})
        self._text.make_plain(request)
        attach_program(request, headers, key, identity)
        texts = {place: body["messages"][place]["content"] for place in answers or ()}
        fit = await self._fitted(request, continuation, texts, bounds=answers is not None)
        prompt = fit.prompt
        if prompt.mode is PromptMode.CONTINUED:
            request.kv_transfer_params = {"prompt_token_ids": prompt.known + prompt.added}
        reasoning = bool(body.get("include_reasoning", True))
        reading = Reading(prompt.mode, pack_ids(prompt.added), reasoning, watch, fit.chars)
        with self._engine.streams.watching(request, watch):
            stream = reading.pieces(self._engine.chat(request, RawRequestInfo(headers=headers)))
            async with aclosing(gather(stream, self._ticks)) as batches:
                async for batch in batches:
                    pieces = together([piece for one in batch for piece in one.data])
                    if any(isinstance(piece, TurnBegan) for piece in pieces):
                        self._count(prompt.mode)
                    progress = joined(one.progress for one in batch)
                    refused = [naming_field(piece, body) for piece in pieces if isinstance(piece, HttpError)]
                    yield StreamChunk(progress, tuple(piece for piece in pieces if not isinstance(piece, HttpError)))
                    for refusal in refused:
                        yield refusal

    async def _fitted(
        self, request: Any, continuation: Continuation | None, answers: Mapping[int, str], *, bounds: bool
    ) -> Fitted[Prompt]:
        """Make the prompt, with shorter answers where it does not fit into the context window.

        Args:
            request: vLLM's chat request. Its messages get the shorter answers, and its bound of output what is left.
            continuation: ids of the first messages.
            answers: the texts that may be shortened, by the places of their messages.
            bounds: whether the bound of output may be lowered.

        Raises:
            BadRequest, VLLMClientError: the continuation makes no sense, or the prompt does not fit.
        """
        window = self._text.window
        tight = bounds and self._is_tight(request)
        counted = tight or (bool(answers) and may_exceed([request.tools, request.messages], window // 2))

        def put(chars: int | None) -> None:
            for place, text in answers.items():
                kept = text if chars is None else shortened(text, chars)
                request.messages[place]["content"] = self._text.plain(kept)

        async def make(chars: int | None) -> Prompt | None:
            put(chars)
            try:
                prompt = await self._prompt(request, continuation, counted)
            except VLLMClientError as error:
                if as_refusal(error).code != CONTEXT_LENGTH_EXCEEDED:
                    raise
                return None
            return prompt if prompt.tokens < window else None

        fit = None
        if answers:
            longest = max(map(len, answers.values()))
            fit = await fitted(make, longest, window, request.max_completion_tokens)
            put(None if fit is None else fit.chars)
        if fit is None:
            fit = Fitted(await self._prompt(request, continuation, counted=tight))
        self._text.bound_output(request, fit.prompt.tokens)
        if fit.prompt.mode is PromptMode.CONTINUED:
            self._text.check_length(request, fit.prompt.known + fit.prompt.added)
        return fit

    def _is_tight(self, request: Any) -> bool:
        """Return whether the prompt and the bound of output may exceed the window. The bound alone does not."""
        window, asked = self._text.window, request.max_completion_tokens
        if asked is None or asked >= window:
            return False
        # A short prompt is counted at once, and the tokens of its template are most of it.
        return bool(asked > window // 2) or may_exceed([request.tools, request.messages], window - asked)

    async def _prompt(self, request: Any, continuation: Continuation | None, counted: bool) -> Prompt:
        """Make a turn's prompt. If vLLM makes it, it is only ``counted``.

        Raises:
            VLLMClientError: the prompt is too long to be tokenized.
        """
        if continuation is None:
            return Prompt(PromptMode.FIRST, tokens=await self._text.count(request) if counted else 0)
        known = known_ids(request, continuation)
        rest = await self._text.rest(request, self._examined, continuation.messages, continuation.token_ids)
        if not isinstance(rest, Again):
            return Prompt(PromptMode.CONTINUED, known, rest, len(known) + len(rest))
        if rest not in self._logged:
            self._logged.add(rest)
            logger.warning("a prompt is rendered again: %s (logged once)", rest.value)
        return Prompt(PromptMode.RENDERED_AGAIN, tokens=await self._text.count(request) if counted else 0)


def may_exceed(value: Any, most: int) -> bool:
    """Return whether a value's texts may have more than ``most`` bytes. Nothing is read after so many.

    A prompt of these texts has hardly more tokens than they have bytes: a token has one at least, and a template adds
    few. Images and other media may have any number of tokens.
    """
    size, left = 0, [value]
    while left and size <= most:
        one = left.pop()
        if isinstance(one, str):
            size += len(one) if one.isascii() else CHARACTER_BYTES * len(one)
        elif isinstance(one, Mapping):
            if not MEDIA.isdisjoint(one):
                return True
            size += VALUE * len(one)
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            size += VALUE * len(one)
            left += one
        elif isinstance(one, BaseModel):
            left.append(dict(one))
        else:
            size += len(str(one))
    return size > most


def _check_fixed(body: Mapping[str, Any]) -> None:
    for name, value in FIXED.items():
        if body.get(name) is not None and body[name] != value:
            raise BadRequest(f"{name} must be {json.dumps(value)} in a program's turn", param=name)


def known_ids(request: Any, continuation: Continuation) -> list[int]:
    """Return the ids of a continuation.

    Raises:
        BadRequest: it does not fit the request.
    """
    try:
        known = unpack_ids(continuation.token_ids)
    except ValueError as error:
        raise BadRequest(f"the continuation's ids cannot be read: {error}") from error
    if not known:
        raise BadRequest("the continuation has no ids")
    if not 0 < continuation.messages <= len(request.messages):
        raise BadRequest(f"the continuation stands for {continuation.messages} of {len(request.messages)} messages")
    if request.messages[continuation.messages - 1].get("role") != "assistant":
        raise BadRequest("the last message that the continuation stands for must be the assistant's")
    return known


class Reading:
    """Reads vLLM's stream of one chat completion.

    Args:
        rendering: how the prompt is made.
        added: packed ids that continue the prompt. If vLLM makes the prompt, its stream has the ids.
        reasoning: whether the caller wants the reasoning.
        watch: the watch of the stream, which knows how many of its events were sent before.
        answer_chars: characters that the prompt has of each longer answer of a tool. None: it has all answers whole.
    """

    def __init__(
        self, rendering: PromptMode, added: bytes, reasoning: bool, watch: Watch, answer_chars: int | None = None
    ) -> None:
        self._rendering = rendering
        self._added = added
        self._reasoning = reasoning
        self._watch = watch
        self._answer_chars = answer_chars
        self._sent = 0 if watch.so_far is None else watch.so_far.events
        self._begun = False
        self._ids = 0
        self._has_calls = False
        self._held: list[dict[str, Any]] = []
        """Log probabilities of tokens whose text has not come yet."""
        self._finish_reason: str | None = None

    async def pieces(self, events: AsyncGenerator[Any]) -> AsyncGenerator[StreamChunk[tuple[Piece, ...]]]:
        """Yield the stream's pieces, event by event. A refusal or the end is the last one.

        Raises:
            Exception: what ended the engine's outputs.
        """
        number = 0
        async with aclosing(events):
            async for event in events:
                if self._watch.failure is not None:
                    raise self._watch.failure
                if isinstance(event, ErrorResponse):
                    yield StreamChunk(Progress(), (of_response(event),))
                    return
                number += 1
                pieces = tuple(self._of(event))
                over = bool(pieces) and isinstance(pieces[-1], TurnDone | HttpError)
                if number > self._sent or over:
                    yield StreamChunk(self._watch.take(events=1), pieces)
                if over:
                    return
        yield StreamChunk(Progress(), (UpstreamFailed("the engine ended the turn without a reason"),))

    def _of(self, event: str) -> Iterator[Piece]:
        data = event.removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if not self._begun and self._rendering is PromptMode.CONTINUED and not data.startswith('{"error"'):
            # Only the role, and the prompt's ids, which are known here and may be many.
            self._begun = True
            yield TurnBegan(self._rendering, self._added, self._answer_chars)
            return
        chunk = json.loads(data)
        if "error" in chunk:
            yield of_response(ErrorResponse.model_validate(chunk))
            return
        if not self._begun:
            self._begun = True
            yield TurnBegan(self._rendering, pack_ids(chunk["prompt_token_ids"]), self._answer_chars)
        for choice in chunk["choices"]:
            delta = self._delta(choice)
            if delta != TurnDelta():
                yield delta
        if chunk.get("usage") is not None and not chunk["choices"]:
            yield self._done(chunk["usage"])

    def _delta(self, choice: Mapping[str, Any]) -> TurnDelta:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        ids, delta = choice.get("token_ids") or (), choice["delta"]
        self._ids += len(ids)
        self._has_calls = self._has_calls or bool(delta.get("tool_calls"))
        return TurnDelta(
            pack_ids(ids),
            delta.get("content") or "",
            (delta.get("reasoning") or "") if self._reasoning else "",
            tuple(map(_call, delta.get("tool_calls") or ())),
            self._logprobs(choice),
        )

    def _logprobs(self, choice: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return the log probabilities of the content's tokens, without those of reasoning and calls."""
        self._held += (choice.get("logprobs") or {}).get("content") or ()
        delta = choice["delta"]
        if not (delta.get("content") or delta.get("reasoning") or delta.get("tool_calls")):
            return ()
        entries, self._held = tuple(self._held), []
        return entries if delta.get("content") else ()

    def _done(self, usage: Mapping[str, Any]) -> Piece:
        if self._ids != usage["completion_tokens"] or self._finish_reason is None:
            return UpstreamFailed("the engine did not send all ids of the turn")
        reason = self._reason(self._finish_reason)
        if reason == ABORTED:
            return UpstreamFailed("the engine gave the turn up")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ending = self._watch.endings.get(0)
        stopped_by = None if ending is None or not isinstance(ending.stop_reason, str) else ending.stop_reason
        used = usage["prompt_tokens"], cached, usage["completion_tokens"]
        return TurnDone(reason, *used, stopped_by, self._watch.alone_s)

    def _reason(self, of_vllm: str) -> str:
        """Return why the turn ended.

        vLLM 0.29 reports `tool_calls` for each streamed turn in which a call began, even if it was cut, and `stop` for
        a named call. The watch knows the engine's own reason.
        """
        ending = self._watch.endings.get(0)
        if ending is None:
            return of_vllm
        return ENDED_WITH_CALLS if ended_by_model(ending) and self._has_calls else ending.finish_reason


def _call(call: Mapping[str, Any]) -> CallDelta:
    function = call.get("function") or {}
    return CallDelta(call["index"], call.get("id"), function.get("name"), function.get("arguments") or "")


def together(batch: list[Piece]) -> list[Piece]:
    """Return the same pieces, with consecutive deltas merged into one."""
    joined: list[Piece] = []
    for piece in batch:
        last = joined[-1] if joined else None
        if isinstance(piece, TurnDelta) and isinstance(last, TurnDelta):
            joined[-1] = TurnDelta(
                last.token_ids + piece.token_ids,
                last.content + piece.content,
                last.reasoning + piece.reasoning,
                _joined_calls((*last.calls, *piece.calls)),
                last.logprobs + piece.logprobs,
            )
        else:
            joined.append(piece)
    return joined


def _joined_calls(calls: tuple[CallDelta, ...]) -> tuple[CallDelta, ...]:
    joined: list[CallDelta] = []
    for call in calls:
        last = joined[-1] if joined else None
        if last is not None and last.index == call.index:
            joined[-1] = CallDelta(
                call.index, last.id or call.id, last.name or call.name, last.arguments + call.arguments
            )
        else:
            joined.append(call)
    return tuple(joined)
