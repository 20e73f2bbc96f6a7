"""Lets the built-in model call the tools that it is offered, so that an agent's loop can be tried without a real model.

The built-in model has random weights and calls no tool by itself. With this logits processor, it calls an offered tool
`CALLS` times after each message of the user, with arguments that are valid by the tool's schema, and then answers with
a short text. Requests without tools are not changed. It is off unless the engine arguments name it:

    engine: {logits_processors: ["replicas.tiny.tool_loop:ToolLoop"]}

It raises the logit of the intended token, after vLLM has applied the request's grammar, so that a grammar always
prevails. Everything else is as for any model: the scheduler, sampling, the tool parser and the stream.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from replicas.tiny.model import END, START
from replicas.tiny.tool_arguments import arguments_of

CALLS = 3
"""Number of tool results after the user's last message at which the model stops calling tools."""

ANSWER = "The tools have answered. The task is complete."

HARMLESS = ("bash", "shell", "exec_command", "shell_command", "local_shell", "glob", "ls", "list", "read")
"""Names of tools, in lowercase, that are called rather than the first one offered: their arguments are harmless."""

BOOST = 1e4
"""Added to the logit of the intended token: more than any logit, penalty or temperature can outweigh."""

_TOOLS, _TOOLS_END = "\n<tools>\n", "\n</tools>\n"
_USER, _RESULT, _ASSISTANT = f"{START}user\n", f"{START}tool\n", f"{START}assistant\n"


def chosen(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the tool to call: the first of `HARMLESS` that is offered, else the first one offered."""
    by_name = {str(tool["name"]).lower(): tool for tool in reversed(tools)}
    return next((by_name[name] for name in HARMLESS if name in by_name), tools[0])


def intended(prompt: str) -> str | None:
    """Return what the model is to write after ``prompt``, a text of the built-in chat template, with its end token.

    None: no tools are offered, so that the model writes what its weights say.
    """
    head = prompt.split(END, 1)[0]
    if _TOOLS not in head or _TOOLS_END not in head:
        return None
    listed = head.rpartition(_TOOLS)[2].partition(_TOOLS_END)[0]
    tools = [json.loads(line)["function"] for line in listed.splitlines() if line]
    if not tools:
        return None
    results = prompt.rpartition(_USER)[2].count(_RESULT)
    if results >= CALLS:
        return ANSWER + END
    tool = chosen(tools)
    call = {"name": tool["name"], "arguments": arguments_of(tool.get("parameters") or {}, results)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>{END}"


class Script:
    """The tokens that one request is to write.

    Args:
        tokenizer: the built-in model's.
        prompt: ids of the prompt. They may include the beginning of the answer, which another replica wrote.
        written: ids of the output so far. The engine appends to this list.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], written: Sequence[int]) -> None:
        text = tokenizer.decode(list(prompt), skip_special_tokens=False)
        asked, mark, begun = text.rpartition(_ASSISTANT)
        wanted = intended(asked) if mark else None
        self._tokens: list[int] = [] if wanted is None else tokenizer.encode(wanted, add_special_tokens=False).ids
        self._begun: list[int] = tokenizer.encode(begun, add_special_tokens=False).ids
        self._written = written

    def next_token(self) -> int | None:
        """Return the id that is to follow. None: the output has left the script, or there is none."""
        so_far = [*self._begun, *self._written]
        if len(so_far) >= len(self._tokens) or self._tokens[: len(so_far)] != so_far:
            return None
        return self._tokens[len(so_far)]


@cache
def _tokenizer(file: str) -> Tokenizer:
    return Tokenizer.from_file(file)


class ToolLoop(LogitsProcessor):
    """vLLM's logits processor for `Script`; see the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = _tokenizer(f"{vllm_config.model_config.model}/tokenizer.json")
        self._scripts: dict[int, Script] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False, because greedy decoding follows the script too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep one script for each request of the batch: vLLM's order is removed, added, moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._scripts.pop(row, None)
        for row, _, prompt, written in batch_update.added:
            self._scripts[row] = Script(self._tokenizer, prompt or (), written)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._scripts.pop(source, None), self._scripts.pop(target, None)
            if moved is not None:
                self._scripts[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._scripts[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Raise the logit of each request's intended token in place."""
        for row, script in self._scripts.items():
            token = script.next_token()
            if token is not None:
                logits[row, token] += BOOST
        return logits
