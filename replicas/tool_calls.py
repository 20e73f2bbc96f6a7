"""A turn's output tokens -> the names of the tools it asks for (`cluster.tool_naming`).

This runs in the engine's process at the end of a turn: no text is refused.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.tool_naming import bounded, classed, tool_names

_log = logging.getLogger(__name__)

MAX_TOKENS = 16_384
"""Only so many tokens, the last ones, are read."""

TEXT_PARSERS = frozenset(
    (
        "hermes",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "mistral",
        "openai",
        "pythonic",
        "qwen3_coder",
        "qwen3_xml",
    )
)
"""vLLM tool parsers whose formats `tool_names` reads. For any other name vLLM's own parser is asked first."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of ``ids``."""
        ...


class ToolNames:
    """Reads tool names out of the output tokens of one model.

    Attributes:
        parser_failures: how often vLLM's parser raised; the text formats were read instead.
    """

    def __init__(self, tokenizer: Decoder, parser_name: str | None) -> None:
        self.parser_failures = 0
        self._tokenizer = tokenizer
        self._parser_name = parser_name
        self._parse: Callable[[str], list[str]] | None = None
        if parser_name is not None and parser_name not in TEXT_PARSERS:
            try:
                self._parse = _vllm_parser(tokenizer, parser_name)
            except Exception as error:  # noqa: BLE001
                # It may need a package, or a special token, that is not there.
                self._fall_back(error)

    def __call__(self, output_token_ids: Sequence[int]) -> tuple[str, ...]:
        """The names in order, repeated where a tool is called twice; ``()`` when the output asks for no tool."""
        # Special tokens stay: in some formats they are what marks a call.
        text = self._tokenizer.decode(list(output_token_ids[-MAX_TOKENS:]), skip_special_tokens=False)
        if self._parse is not None:
            try:
                names = bounded(self._parse(text))
            except Exception as error:  # noqa: BLE001
                # Whatever a foreign parser raises on what a model made up: it must not end the engine.
                self._fall_back(error)
            else:
                if names:
                    return names
        return tool_names(text)

    def _fall_back(self, error: Exception) -> None:
        self.parser_failures += 1
        if self.parser_failures == 1:
            _log.warning("tool parser %r failed, reading text formats instead: %r", self._parser_name, error)


def _vllm_parser(tokenizer: Decoder, name: str) -> Callable[[str], list[str]]:
    """vLLM's parser ``name`` as a function of the text. Raises whatever vLLM does."""
    # Imported here, as only such a model pays for it (12 MB, 0.8 s).
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser_class = ToolParserManager.get_tool_parser(name)
    request = ChatCompletionRequest(messages=[], model="")

    def parse(text: str) -> list[str]:
        # A parser keeps the state of one reply: each reply gets its own.
        calls = parser_class(tokenizer).extract_tool_calls(text, request).tool_calls
        return [classed(call.function.name, call.function.arguments) for call in calls]

    parse("")
    return parse
