"""Streams that report their progress, and streams that continue where a stream of another replica ended.

A client between vLLM's serving layer and its engine records the ids of each output. For a resumed stream it first
yields outputs made of the ids that are already known. This brings the serving layer (tool parsers, reasoning parsers,
usage) to the state that it had on the other replica. The events of these outputs were already sent, and `events` leaves
them out. The engine then gets the prompt and the known ids as its prompt. The text is made here, because a character or
a stop string may begin in the known ids and end in the new ones.

It uses these names of vLLM 0.29 (tests/contracts/test_resumption.py checks what they do):
    AsyncLLM.generate, RequestOutput, SamplingParams, IncrementalDetokenizer
    AsyncLLM.output_processor.external_req_ids   the requests that the engine has got (tests/contracts/test_weights.py)
    GenerateBaseServing.engine_client   replaced by a ContinuedClient
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.core.errors import HttpError, UpstreamFailed
from cluster.core.program import tenant_of
from cluster.core.stream import Begun, Ending, Progress, StreamChunk, TokenLogprobs, prompt_digest
from cluster.core.turn import ID_BYTES, pack_ids, unpack_ids
from cluster.core.turn_tokens import TurnTokens, WeightSpan
from replicas.finish_reasons import corrected_event
from replicas.grammar_queue import COMPILED_S_KEY
from replicas.grammar_trials import GrammarTrials
from replicas.requests import of_first_event
from replicas.resumed_logprobs import Position, ResumedLogprobs, packed
from replicas.stop_strings import stop
from replicas.turn_recorder import TurnRecorder, WeightSpans
from replicas.turn_reports import take_alone_s
from replicas.vllm_patches import RESUMED_KEY

Other = TypeVar("Other")

TICKET = "caesura_stream"
"""The key of ``vllm_xargs`` with which a request passes its Watch's name to the engine's client."""

REPLAYED = 32
"""Number of known outputs that are yielded without a turn of the event loop's other tasks."""

OUR_KEYS = (TICKET, RESUMED_KEY, COMPILED_S_KEY)
"""The keys of vLLM's ``extra_args`` that have a meaning here."""

WITH_IDS = ("token", "multimodal")
"""Types of vLLM's engine inputs whose prompt is token ids."""

_CREATED = re.compile(r'"created":(\d+)')


def obstacle(prompt: Mapping[str, Any], params: Any) -> str | None:
    """Return why a stream cannot be continued exactly from its ids alone, or None if it can.

    Sampling parameters prevent it if vLLM keeps a state for them, or if they treat the output differently from the
    prompt. A repetition penalty treats both alike. Without a seed, every continuation is an equally good sample.
    """
    reasons = {
        "its prompt is not token ids": prompt.get("type") not in WITH_IDS,
        "n > 1": params.n > 1,
        "logprob_token_ids": params.logprob_token_ids is not None,
        "flat_logprobs": params.logprobs is not None and params.flat_logprobs,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "seed": params.seed is not None,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "bad_words": bool(params.bad_words),
        "thinking_token_budget": params.thinking_token_budget is not None,
        "repetition_detection": params.repetition_detection is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class Watch:
    """Records one request's outputs from the engine.

    Args:
        so_far: progress of the stream on another replica. None: it begins here.
        record: whether to record the tokens of the whole turn.
        version: the version of the model's weights now.
    """

    def __init__(self, so_far: Progress | None = None, *, record: bool = False, version: str = "") -> None:
        self.so_far = so_far
        self._record = record
        self._version = version
        self._recorder: TurnRecorder | None = None
        self._weights: list[WeightSpans] = []
        self._produced: set[int] = set()
        """Indexes of the answers of which an output has come."""
        self._sent_weights: tuple[WeightSpan, ...] = ()
        self._logprobs: list[TokenLogprobs] = []
        self.failure: Exception | None = None
        """The exception that ended the engine's outputs. vLLM only makes an event of it."""
        self.tenant = ""
        """Whose request it is."""
        self.grammar_field = "structured_outputs"
        """The field of the request that has its grammar, if it has one."""
        self.name: str | None = None
        """The name of the request in the engine, or None if the engine has not got it."""
        self.endings: dict[int, Ending] = {}
        """Why the engine's outputs ended, by the index of the choice. Choices that have not ended are missing."""
        self.alone_s: float | None = None if so_far is None else so_far.alone_s
        """See `cluster.core.slo.TurnRecord.alone_s`."""
        self._obstacle: str | None = None
        self._begun: Begun | None = None
        self._ending: Ending | None = None
        self._ids: list[int] = []
        self._sizes: list[int] = []
        self._tokens = 0
        """Number of output tokens since the last `take`, of all answers."""

    def take(self, *, events: int = 0, created: str = "") -> Progress:
        """Return the progress since the last call."""
        weights = self._weights[0].spans if self._weights and self._obstacle is None else ()
        taken = Progress(
            events,
            pack_ids(self._ids),
            pack_ids(self._sizes),
            self._begun,
            self._ending,
            created,
            tuple(self._logprobs),
            () if weights == self._sent_weights else weights,
            self.take_record(),
            self.alone_s,
            self._tokens,
        )
        self._begun = self._ending = None
        self._sent_weights = weights
        self._ids.clear()
        self._sizes.clear()
        self._logprobs.clear()
        self._tokens = 0
        return taken

    def take_record(self) -> TurnTokens | None:
        """Return the recorded tokens of the turn, once, after all answers have ended."""
        if self._recorder is None or (record := self._recorder.tokens(self._weights)) is None:
            return None
        self._recorder = None
        return record

    def weights_changed(self, version: str, tokens: Mapping[str, int], submitted: Collection[str]) -> None:
        """Record that the model has other weights from now on.

        Args:
            version: their version.
            tokens: the number of output tokens of each of the engine's requests, by its id.
            submitted: names of the requests that the engine had got before. What is missing in ``tokens`` of these has
                ended.
        """
        self._version = version
        for index, spans in enumerate(self._weights):
            count = next((n for name, n in tokens.items() if self._is_answer(name, index)), None)
            if count is not None:
                spans.changed(count, version)
            elif index not in self._produced and self.name not in submitted:  # the engine has not got it yet
                spans.changed(0, version)

    def _is_answer(self, request_id: str, index: int) -> bool:
        """Return whether a request of the engine makes this answer. The engine adds a random suffix to the name, and a
        prefix to each of several answers.
        """
        name = self.name if len(self._weights) == 1 else f"{index}_{self.name}"
        return request_id.rpartition("-")[0] == name

    def outputs(
        self,
        generate: Callable[..., AsyncGenerator[RequestOutput]],
        end: Callable[[str], Awaitable[None]],
        tokenizer: Any,
        prompt: Any,
        params: Any,
        name: str,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield all outputs for a prompt: those that were made elsewhere, then the engine's.

        Args:
            generate: AsyncLLM's method with the three arguments prompt, parameters and name.
            end: ends the request of this name, in whose text a stop string was found.
            tokenizer: the engine's tokenizer.
            prompt: vLLM's engine input.
            params: vLLM's SamplingParams.
            name: the request's id.
        """
        self._obstacle = "several prompts" if self.name else obstacle(prompt, params)
        self.name = name
        before = self.so_far.weights if self.so_far is not None else ()
        known = len(self.so_far.token_ids) // ID_BYTES if self.so_far is not None else 0
        self._weights = [WeightSpans(before, known, self._version) for _ in range(params.n)]
        if self._record and self._obstacle != "several prompts" and prompt.get("type") in WITH_IDS:
            if params.logprobs is None:
                params.logprobs = 0  # only that of the token itself
            is_delta = params.output_kind == RequestOutputKind.DELTA
            self._recorder = TurnRecorder(prompt["prompt_token_ids"], params.n, is_delta=is_delta)
        if self.so_far is None:
            return self._watched(generate(prompt, params, name), prompt)
        return self._resumed(generate, end, tokenizer, prompt, params, name, self.so_far)

    async def _watched(self, outputs: AsyncGenerator[RequestOutput], prompt: Any) -> AsyncGenerator[RequestOutput]:
        first = True
        async with aclosing(self._failing(outputs)) as watched:
            async for output in watched:
                self._take_report(output)
                if first and self._obstacle is None:
                    digest = prompt_digest(pack_ids(prompt["prompt_token_ids"]))
                    cached = output.num_cached_tokens, output.num_cache_creation_tokens
                    self._begun = Begun(digest, *cached)
                elif first:
                    self._begun = Begun(b"", None, obstacle=self._obstacle)
                first = False
                for one in output.outputs:
                    if (ending := _ending(one)) is not None:
                        self.endings[one.index] = ending
                    self._produced.add(one.index)
                    self._tokens += len(one.token_ids)
                    self._add_to_record(one)
                if self._obstacle is None:
                    self._note(output.outputs[0])
                yield output

    async def _failing(self, outputs: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            self.failure = error
            raise

    async def _resumed(
        self,
        generate: Callable[..., Any],
        end: Callable[[str], Awaitable[None]],
        tokenizer: Any,
        prompt: Any,
        params: Any,
        name: str,
        so_far: Progress,
    ) -> AsyncGenerator[RequestOutput]:
        ids = list(prompt["prompt_token_ids"])
        begun = so_far.begun
        if begun is None or prompt_digest(pack_ids(ids)) != begun.prompt:
            self.failure = UpstreamFailed("the stream cannot go on: its prompt is another one on this replica")
            raise self.failure
        text = _Text(tokenizer, params, ids, name)
        logprobs = None
        if params.logprobs is not None:
            logprobs = ResumedLogprobs(tokenizer if params.detokenize else None, so_far.logprobs)

        def output_of(
            token_ids: Sequence[int], ending: Ending | None, scores: Sequence[Position] | None
        ) -> RequestOutput:
            made = text.output(token_ids, ending)
            made.logprobs = None if scores is None else list(scores[: len(made.token_ids)])
            self._add_to_record(made)
            return RequestOutput(
                name,
                prompt.get("prompt"),
                ids,
                None,
                [made],
                made.finished(),
                num_cached_tokens=begun.cached_tokens,
                num_cache_creation_tokens=begun.stored_tokens,
            )

        known = unpack_ids(so_far.token_ids)
        *spans, last = _spans(unpack_ids(so_far.sizes))
        for number, (begin, until) in enumerate(spans):
            if number % REPLAYED == 0:
                await asyncio.sleep(0)
            yield output_of(known[begin:until], None, logprobs.known(begin, until) if logprobs else None)
        if so_far.ending is not None:
            self.endings[0] = so_far.ending
        yield output_of(known[last[0] :], so_far.ending, logprobs.known(last[0], len(known)) if logprobs else None)
        if so_far.ending is not None:
            return
        longer = {**prompt, "prompt_token_ids": ids + known}
        async with aclosing(self._failing(generate(longer, _rest_of(params, len(known)), name))) as outputs:
            async for output in outputs:
                self._take_report(output)
                new = output.outputs[0]
                whole = output_of(new.token_ids, _ending(new), logprobs.add(new.logprobs or ()) if logprobs else None)
                if (ending := _ending(whole.outputs[0])) is not None:
                    self.endings[0] = ending
                self._note(whole.outputs[0])
                self._tokens += len(whole.outputs[0].token_ids)
                if whole.finished and not output.finished:
                    await end(name)
                yield whole
                if whole.finished:
                    return

    def _take_report(self, output: RequestOutput) -> None:
        alone_s = take_alone_s(output)
        if self.alone_s is None:
            self.alone_s = alone_s

    def _note(self, output: CompletionOutput) -> None:
        self._ids.extend(output.token_ids)
        self._sizes.append(len(output.token_ids))
        self._logprobs.extend(packed(output.logprobs or ()))
        self._ending = _ending(output)

    def _add_to_record(self, output: CompletionOutput) -> None:
        if self._recorder is not None:
            self._recorder.add(output.index, output.token_ids, output.logprobs, _ending(output))


class ContinuedClient:
    """vLLM's engine client for the serving layer. Everything except `generate` is the engine's own.

    Args:
        client: vLLM's AsyncLLM.
        grammars: bounds the grammars of requests before the engine gets them.
    """

    def __init__(self, client: Any, grammars: GrammarTrials) -> None:
        self._client = client
        self._grammars = grammars
        self._watches: dict[str, Watch] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    @contextmanager
    def watching(self, request: Any, watch: Watch) -> Iterator[None]:
        """Let ``watch`` see the outputs for vLLM's ``request``, if it is a request that generates."""
        if not hasattr(request, "vllm_xargs"):
            yield
            return
        ticket = uuid4().hex
        request.vllm_xargs = {**(request.vllm_xargs or {}), TICKET: ticket}
        watch.tenant = tenant_of(getattr(request, "session_id", None) or "")
        watch.grammar_field = _grammar_field(request)
        self._watches[ticket] = watch
        try:
            yield
        finally:
            del self._watches[ticket]

    def submitted(self) -> frozenset[str]:
        """Return the names of the requests that the engine has got and whose end has not come back yet."""
        return frozenset(self._client.output_processor.external_req_ids)

    def weights_changed(self, version: str, tokens: Mapping[str, int], submitted: Collection[str]) -> None:
        """Report other weights to all requests; see `Watch.weights_changed`."""
        for watch in self._watches.values():
            watch.weights_changed(version, tokens, submitted)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        """Generate as AsyncLLM does, through the request's Watch if it has one.

        The engine gets a name of our own, because clients may give several requests one id.
        """
        engine_name = f"{request_id}-{uuid4().hex}"
        extra = sampling_params.extra_args or {}
        watch = self._watches.get(str(extra.get(TICKET)))
        # A client may have set these keys; only our values count from here on.
        sampling_params.extra_args = {key: extra[key] for key in extra if key not in OUR_KEYS} or None
        whose = watch or Watch()

        def generate(prompt: Any, params: Any, name: str) -> AsyncGenerator[RequestOutput]:
            made: Callable[[], AsyncGenerator[RequestOutput]] = partial(
                self._client.generate, prompt, params, name, **options
            )
            return made() if params.structured_outputs is None else self._checked(made, params, whose)

        if watch is None:
            return generate(prompt, sampling_params, engine_name)
        tokenizer, end = self._client.renderer.tokenizer, partial(stop, self._client)
        return watch.outputs(generate, end, tokenizer, prompt, sampling_params, engine_name)

    async def _checked(
        self, generate: Callable[[], AsyncGenerator[RequestOutput]], params: Any, watch: Watch
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request whose grammar may be compiled.

        Raises:
            GrammarRejected: it may not.
        """
        seconds = await self._grammars.check(params.structured_outputs, watch.tenant, watch.grammar_field)
        if seconds is not None:
            params.extra_args = {**(params.extra_args or {}), COMPILED_S_KEY: seconds}
        async with aclosing(generate()) as outputs:
            async for output in outputs:
                yield output


def _grammar_field(request: Any) -> str:
    """Return the field of vLLM's request that has its grammar, if it has one. vLLM changes the fields later."""
    fields = ("structured_outputs", "response_format")
    return next((field for field in fields if getattr(request, field, None) is not None), "tools")


async def events(
    chunks: AsyncGenerator[str | Other], watch: Watch
) -> AsyncGenerator[StreamChunk[str] | HttpError | Other]:
    """Yield vLLM's server-sent events with their progress, except those that were sent before.

    Raises:
        Exception: what ended the engine's outputs.
    """
    so_far = watch.so_far or Progress()
    number = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            if watch.failure is not None:
                raise watch.failure
            if not isinstance(chunk, str):
                yield chunk
                continue
            if so_far.events and (refusal := of_first_event(chunk.encode())) is not None:
                yield refusal
                return
            number += 1
            if number <= so_far.events:
                continue
            if so_far.created:
                chunk = _CREATED.sub(f'"created":{so_far.created}', chunk, count=1)
            chunk = corrected_event(chunk, watch.endings)
            found = _CREATED.search(chunk) if number == 1 else None
            yield StreamChunk(watch.take(events=1, created=found[1] if found else ""), chunk)


class _Text:
    """Makes text of ids as the engine's output processor does, one id after the other."""

    def __init__(self, tokenizer: Any, params: Any, prompt_ids: list[int], name: str) -> None:
        asked = SimpleNamespace(
            sampling_params=params, prompt_token_ids=prompt_ids, prompt_embeds=None, request_id=name
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, asked)

    def output(self, ids: Sequence[int], ending: Ending | None) -> CompletionOutput:
        """Return the next output. It ends where a stop string does."""
        token = ending is not None and ending.finish_reason == "stop" and not isinstance(ending.stop_reason, str)
        for count, number in enumerate(ids, start=1):
            found = self._detokenizer.update([number], token and count == len(ids))
            if found is not None:
                ids, ending = ids[:count], Ending("stop", found)
                break
        text = self._detokenizer.get_next_output_text(ending is not None, True)
        reasons = (None, None) if ending is None else (ending.finish_reason, ending.stop_reason)
        return CompletionOutput(0, text, list(ids), None, None, finish_reason=reasons[0], stop_reason=reasons[1])


def _rest_of(params: Any, known: int) -> Any:
    """Return the parameters of the request that remains after ``known`` tokens.

    Its text is made here, not by the engine.
    """
    rest = params.clone()
    rest.detokenize, rest.stop = False, []
    rest.max_tokens = None if params.max_tokens is None else params.max_tokens - known
    rest.min_tokens = max(0, params.min_tokens - known)
    rest.extra_args = {**(params.extra_args or {}), RESUMED_KEY: known}
    return rest


def _ending(output: CompletionOutput) -> Ending | None:
    return None if output.finish_reason is None else Ending(output.finish_reason, output.stop_reason)


def _spans(sizes: list[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for size in sizes:
        yield begin, begin + size
        begin += size
