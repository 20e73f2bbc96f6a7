"""Renders and tokenizes a chat prompt with the code that vLLM 0.29 uses for its own prompts.

It uses these private names of vLLM (tests/contracts/test_program_turn.py checks what they do):
    OnlineRenderer          render_chat, use_harmony, exclude_tools_when_tool_choice_none, default_chat_template_kwargs
    BaseRenderer            render_messages, tokenize_prompt, get_eos_token_id, _executor
    ModelConfig             try_get_generation_config, get_diff_sampling_param, is_multimodal_model
    ChatCompletionRequest   build_chat_params, build_tok_params
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from vllm.exceptions import VLLMClientError
from vllm.inputs import TextPrompt, tokens_input
from vllm.renderers import merge_kwargs
from vllm.utils.mistral import is_mistral_tokenizer

from cluster.api.content_parts import check_parts
from cluster.api.images import DATA, images_of
from cluster.core.errors import BadRequest
from replicas.continuation import Again, CannotRender, Examined, Message, Sample, Tokens, examine, rest_of_prompt
from replicas.plain_text import PlainText
from replicas.requests import parse_request
from replicas.unseen_images import without_images

Result = TypeVar("Result")

NOT_TEXT = Examined((), ("the prompts are not text",))


class ChatText:
    """The two steps of vLLM's chat renderer: messages to text, and text to token ids.

    Args:
        online: vLLM's OnlineRenderer.
        may_see: whether the model reads images if it can.
    """

    def __init__(self, online: Any, *, may_see: bool = True) -> None:
        self._online = online
        self._renderer = online.renderer
        self._sees = may_see and bool(online.model_config.is_multimodal_model)
        self._is_text = not (
            online.use_harmony
            or is_mistral_tokenizer(self._renderer.tokenizer)
            or online.model_config.enable_prompt_embeds
        )
        self._plain = PlainText(getattr(self._renderer.tokenizer, "all_special_tokens", ()) if self._is_text else ())
        self._lengths = parse_request("chat", {"messages": []}).build_tok_params(online.model_config)
        self._tokens = Tokens(self.ids, *(self._added_and_stops() if self._is_text else ({}, frozenset())))

    def legible(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a chat body that this model can read: without images if it sees none."""
        return body if self._sees else without_images(body)

    def check_parts(self, body: dict[str, Any], *, required: bool = False) -> None:
        """Check that vLLM fetches nothing for a body: the ingress has put the images of a request into it.

        Args:
            body: the body of a chat completion.
            required: whether a model that sees none cannot answer the request.

        Raises:
            BadRequest: an image has another URL, or is for a model that sees none; or a part is of another kind.
        """
        check_parts(body)
        for image in images_of(body) if self._sees or required else ():
            if not self._sees:
                raise BadRequest(f"{image.path}: this model reads no images", param=image.path, code="invalid_image")
            if isinstance(image.url, str) and image.url[: len(DATA)].lower() != DATA:
                message = f"{image.path}: a replica fetches no images; send `data:image/TYPE;base64,...`"
                raise BadRequest(message, param=image.path, code="invalid_image")

    def make_plain(self, request: Any) -> None:
        """Escape the special tokens in the messages and the tools of a chat request of vLLM, if its prompt is text."""
        request.messages = [self._plain.message(message) for message in request.messages]
        for tool in request.tools or ():
            function = tool.function
            function.parameters = self._plain.schema(function.parameters)
            if function.description is not None:
                function.description = self._plain.text(function.description)

    async def examine(self) -> Examined:
        """Return how the model's own template renders the sample conversations."""
        return await self.in_thread(self._examine) if self._is_text else NOT_TEXT

    async def rest(self, request: Any, examined: Examined, known: int, known_ids: bytes) -> list[int] | Again:
        """Call `replicas.continuation.rest_of_prompt` for a chat request of vLLM.

        Args:
            request: vLLM's chat request.
            examined: the result of `examine` for this model.
            known: number of leading messages that have ids.
            known_ids: these ids, packed.

        Returns:
            The ids that follow ``known_ids``, or the reason why the prompt has to be rendered again.

        Raises:
            ValueError, VLLMClientError: the messages cannot be rendered.
        """
        if not self._is_text:
            return Again.NOT_TEXT
        if request.chat_template is not None or (request.chat_template_kwargs or {}).get("chat_template") is not None:
            return Again.OWN_TEMPLATE
        if request.add_special_tokens:
            return Again.SPECIAL_TOKENS
        if not all(_only_text(message) for message in request.messages):
            return Again.NOT_ONLY_TEXT
        return await self.in_thread(
            rest_of_prompt,
            lambda messages, generation: self.text(request, messages, generation),
            self._tokens,
            examined,
            request.messages,
            known,
            known_ids,
        )

    def bound_output(self, request: Any, prompt_tokens: int = 0) -> None:
        """Lower the request's bound of output tokens where the context has no room for it after ``prompt_tokens``.

        The request's bound is the rest of its program's output. vLLM would reject a turn whose bound exceeds the
        context, but a bound of the whole program need not fit one turn.
        """
        left = self._online.model_config.max_model_len - prompt_tokens
        asked = request.max_completion_tokens
        if asked is not None and asked >= left:
            request.max_completion_tokens = left if prompt_tokens and left > 0 else None

    def check_length(self, request: Any, token_ids: list[int]) -> None:
        """Check a prompt's length as vLLM does for text. vLLM omits the check for a prompt that comes as ids.

        Raises:
            VLLMClientError: the prompt and the requested output together are longer than the model's context.
        """
        params = request.build_tok_params(self._online.model_config)
        params.apply_post_tokenization(self._renderer.tokenizer, tokens_input(token_ids))

    def plain(self, text: str) -> str:
        """Return the text with its special tokens escaped, as `make_plain` does it for messages."""
        return self._plain.text(text)

    @property
    def window(self) -> int:
        """The model's context window in tokens."""
        return int(self._online.model_config.max_model_len)

    async def count(self, request: Any) -> int:
        """Return the length of the prompt that vLLM makes of a chat request, in tokens. 0: vLLM rejects the request.

        Raises:
            VLLMClientError: the prompt is longer than the model's context.
        """
        return len(await self.prompt_ids(request))

    async def prompt_ids(self, request: Any) -> list[int]:
        """Return the prompt that vLLM makes of a chat request. It is empty if vLLM rejects the request.

        Raises:
            VLLMClientError: the prompt is longer than the model's context.
        """
        # vLLM changes the request that it renders.
        copy = request.model_copy(deep=True, update={"max_completion_tokens": None, "max_tokens": None})
        made = await self._online.render_chat(copy, skip_mm_cache=True)
        return [number for one in made[1] for number in one["prompt_token_ids"]] if isinstance(made, tuple) else []

    def text(self, request: Any, messages: Sequence[Message], generation: bool) -> str:
        """Render ``messages`` with the template and the other parameters of ``request``.

        Args:
            request: vLLM's chat request.
            messages: the messages to render, instead of those of the request.
            generation: whether the beginning of the next answer is rendered too.

        Raises:
            ValueError, VLLMClientError: the template rejects them.
        """
        online = self._online
        hidden = request.tools is None or (request.tool_choice == "none" and online.exclude_tools_when_tool_choice_none)
        tools = None if hidden else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(online.chat_template, online.chat_template_content_format).with_defaults(
            merge_kwargs(online.default_chat_template_kwargs, {"tools": tools, "tokenize": False})
        )
        params = replace(
            params, chat_template_kwargs={**params.chat_template_kwargs, "add_generation_prompt": generation}
        )
        _, prompt = self._renderer.render_messages(list(messages), params)
        return str(prompt["prompt"])

    def ids(self, text: str) -> list[int]:
        """Return the token ids of ``text``.

        Raises:
            VLLMClientError: the text is longer than the model's context.
        """
        return list(self._renderer.tokenize_prompt(TextPrompt(prompt=text), self._lengths)["prompt_token_ids"])

    def _added_and_stops(self) -> tuple[dict[str, int], frozenset[int]]:
        model, tokenizer = self._online.model_config, self._renderer.tokenizer
        generation = model.try_get_generation_config()
        stops = [self._renderer.get_eos_token_id()]
        for ids in (
            generation.get("eos_token_id"),
            generation.get("stop_token_ids"),
            model.get_diff_sampling_param().get("stop_token_ids"),
        ):
            stops += ids if isinstance(ids, list) else [ids]
        # A tokenizer that does not list its added tokens has none that end a message: its prompts are rendered again.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return {str(token): number for number, token in added.items()}, frozenset(stops) - {None}

    def _examine(self) -> Examined:
        def render(sample: Sample, messages: Sequence[Message], generation: bool) -> str:
            body = {"messages": list(messages)} | ({"tools": list(sample.tools)} if sample.tools else {})
            request = parse_request("chat", body)
            try:
                return self.text(request, request.messages, generation)
            except (ValueError, VLLMClientError) as error:
                raise CannotRender(str(error)) from error

        with _quiet(logging.getLogger("vllm.renderers.hf")):
            try:
                return examine(render, self._tokens)
            except VLLMClientError:
                return Examined((), ("samples of some hundred tokens, for which this model's context is too short",))

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call ``function`` in the thread that renders the prompts of this context."""
        # The executor is `RenderThreads` in a replica. No other thread may use the tokenizer: only HfRenderer has a
        # copy of it for each call, and it would make a further copy for a third thread.
        return await asyncio.get_running_loop().run_in_executor(self._renderer._executor, function, *arguments)


def _only_text(message: Message) -> bool:
    content = message.get("content")
    return not isinstance(content, list) or all(isinstance(part, str) or part.get("type") == "text" for part in content)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Disable a logger in the block, because a template may reject a sample, which is no error."""
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
