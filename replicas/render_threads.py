"""The threads that render and tokenize prompts: small requests have one of their own, and tenants take turns.

All requests share one where the tokenizer is not made for several threads. Prompts that no turn waits for, because they
are rendered ahead, wait for all others.

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
MESSAGE, PART, TOOL, VALUE = 32, 32, 256, 4
"""Estimated number of characters of a message, a part of a message, a tool, and a value in JSON, beside the text."""

_whose: ContextVar[tuple[str, bool]] = ContextVar("whose_prompt", default=("", False))
"""The tenant of the request that is being read, and whether its prompt is large."""
_is_spare: ContextVar[bool] = ContextVar("is_spare", default=False)
"""Whether no turn waits for the prompts that are rendered in this context."""


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
            return self._small.submit(tenant, lambda: function(*arguments, **options), is_spare=_is_spare.get())

        def compute() -> Any:
            with computing():
                return function(*arguments, **options)

        return self._large.submit(tenant, compute, is_spare=_is_spare.get())


def reading(tenant: str, body: Mapping[str, Any]) -> None:
    """Let the prompts that are rendered in this context be those of a request."""
    _whose.set((tenant, is_large(body)))


def reading_ahead() -> None:
    """Let the prompts that are rendered in this context wait for those that turns wait for."""
    _is_spare.set(True)


def is_large(body: Mapping[str, Any]) -> bool:
    """Return whether a request's prompt is large, as estimated. Fields may have any type."""
    tools = body.get("tools")
    size = TOOL * len(tools) if isinstance(tools, list) else 0
    for value in (body.get("prompt"), body.get("messages")):
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list):
            size += MESSAGE * len(value)
            for message in value:
                if size >= LARGE:
                    break
                size = _with_message(message, size)
    return _with_text(tools, size) >= LARGE


def _with_message(message: Any, size: int) -> int:
    """Return ``size`` with the characters of a message. Of its content only the text counts, and no image."""
    content = message.get("content") if isinstance(message, Mapping) else message
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        size += PART * len(content) + sum(len(text) for text in texts if isinstance(text, str))
    elif isinstance(content, str):
        size += len(content)
    if isinstance(message, Mapping):
        for key, value in message.items():  # reasoning, and the arguments of calls
            if key == "content":
                continue
            size = size + len(value) if isinstance(value, str) else _with_text(value, size)
    return size


def _with_text(value: Any, size: int) -> int:
    """Return ``size`` with the characters of all that a value contains. It ends where the prompt is large."""
    left = [value]
    while left and size < LARGE:
        one = left.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            size += VALUE * len(one)
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            size += VALUE * len(one)
            left += one
    return size
