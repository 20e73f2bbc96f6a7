"""The threads that render and tokenize prompts: small requests have one of their own, and tenants take turns.

All requests share one where the tokenizer is not made for several threads.

vLLM has one thread for all, in the order of arrival. A request with very many messages or tools takes it for up to a
second, and the small requests of all other tenants wait.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

from cluster.core.interpreter import computing
from replicas.fair_threads import FairThreads

LARGE = 64 << 10
"""Estimated number of characters of a prompt from which on it counts as large."""
MESSAGE, PART, TOOL = 32, 32, 256
"""Estimated number of characters of a message, a part of a message and a tool, beside the text."""

_whose: ContextVar[tuple[str, bool]] = ContextVar("whose_prompt", default=("", False))
"""The tenant of the request that is being read, and whether its prompt is large."""


class RenderThreads:
    """In place of the executor of a renderer. The threads end with the process.

    Args:
        is_pooled: whether each call of the tokenizer uses a copy that no other call uses. A thread sets the length at
            which the tokenizer cuts a prompt, and the prompt of another thread would be cut there too. So all prompts
            share one thread if it is False.
    """

    def __init__(self, *, is_pooled: bool = True) -> None:
        self._large = FairThreads(1, "large prompts" if is_pooled else "prompts")
        self._small = FairThreads(1, "small prompts") if is_pooled else self._large

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Call ``function`` in a thread, for the request of `reading` in this context."""
        tenant, is_large = _whose.get()
        if not is_large:
            return self._small.submit(tenant, lambda: function(*arguments, **options))

        def compute() -> Any:
            with computing():
                return function(*arguments, **options)

        return self._large.submit(tenant, compute)


def reading(tenant: str, body: Mapping[str, Any]) -> None:
    """Let the prompts that are rendered in this context be those of a request."""
    _whose.set((tenant, is_large(body)))


def is_large(body: Mapping[str, Any]) -> bool:
    """Return whether a request's prompt is large, as estimated. Fields may have any type."""
    size = TOOL * _length(body.get("tools"))
    for value in (body.get("prompt"), body.get("messages")):
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list):
            size += MESSAGE * len(value)
            if size < LARGE:
                size += sum(_characters(one) for one in value)
    return size >= LARGE


def _characters(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return PART * len(content) + sum(len(text) for text in texts if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0
