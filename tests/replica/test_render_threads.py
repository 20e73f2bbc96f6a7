"""Which prompts are large, and in which thread they are rendered."""

import asyncio
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from cluster.core.interpreter import SWITCH_S, computing
from cluster.http.fair_thread import SHORT_BYTES, FairThread
from replicas.render_threads import LARGE, RenderThreads, _is_spare, _whose, is_large, reading
from replicas.server import ProgramServer
from replicas.vllm_patches import share_rendering

TIMEOUT_S = 20


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, False),
        ({"messages": [{"role": "user", "content": "x" * LARGE}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * LARGE}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text"}] * 3000}]}, True),
        ({"messages": [{"role": "user", "content": "x"}] * 3000}, True),
        ({"messages": [], "tools": [{}] * 300}, True),
        ({"messages": [{}] * 100, "tools": [{}] * 100}, False),
        ({"messages": [{"content": None, "tool_calls": [{"function": {"arguments": "x" * LARGE}}]}]}, True),
        ({"messages": [{"tool_calls": [{"function": {"arguments": {"text": ["x" * LARGE]}}}]}]}, True),
        ({"messages": [{"content": "hi", "reasoning": "x" * LARGE}]}, True),
        ({"messages": [{"content": "hi", "reasoning_content": "x" * LARGE}]}, True),
        ({"messages": [], "tools": [{"function": {"description": "x" * LARGE}}]}, True),
        ({"messages": [], "tools": [{"function": {"parameters": {"properties": {"x" * LARGE: {}}}}}]}, True),
        ({"messages": [], "tools": [{"function": {"parameters": {"enum": list(range(LARGE))}}}]}, True),
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x" * LARGE}}]}]}, False),
        ({"messages": [{"tool_calls": 7, "reasoning": 8}], "tools": "x"}, False),
        ({"prompt": "x" * LARGE}, True),
        ({"prompt": list(range(3000))}, True),
        ({"prompt": ["x" * LARGE]}, True),
        ({"prompt": 5, "messages": "x", "tools": 7}, False),
        ({"messages": [7, None, {"content": 8}, {"content": [9]}]}, False),
    ],
)
def test_a_prompt_is_large_by_its_parts_and_its_text(body: dict[str, Any], large: bool) -> None:
    assert is_large(body) is large


async def test_the_early_prompt_of_a_program_is_its_tenants_has_a_size_and_waits_for_those_of_turns() -> None:
    whose: list[tuple[str, bool, bool]] = []

    class Prompts:
        async def send(self, key: str, body: Mapping[str, Any], continuation: None) -> None:
            whose.append((*_whose.get(), _is_spare.get()))

    server: Any = ProgramServer.__new__(ProgramServer)
    server._early_prompts = Prompts()
    for text in ("hi", "x" * LARGE):
        body = {"messages": [{"role": "tool", "content": text}]}
        assert await asyncio.create_task(server.extend("acme/program", body, None)) == (None, None)
    assert whose == [("acme", False, True), ("acme", True, True)]


def test_a_small_prompt_does_not_wait_for_large_ones() -> None:
    threads, begin = RenderThreads(), threading.Event()

    def sent(body: dict[str, Any], *job: Any) -> Any:
        reading("t", body)
        return threads.submit(*job)

    large = [copy_context().run(sent, {"prompt": "x" * LARGE}, begin.wait, TIMEOUT_S) for _ in range(3)]
    assert copy_context().run(sent, {"prompt": "x"}, sum, (1, 2)).result(TIMEOUT_S) == 3
    assert threads.submit(int, "7").result(TIMEOUT_S) == 7
    assert not any(future.done() for future in large)
    begin.set()
    assert all(future.result(TIMEOUT_S) for future in large)


@pytest.mark.parametrize("is_pooled", [True, False])
def test_a_tokenizer_is_used_by_one_thread_unless_each_call_has_a_copy(is_pooled: bool) -> None:
    """The length at which a prompt is cut is a state of the tokenizer: a thread would set it for another one."""
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, "<unk>"))
    tokenizer = get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    if is_pooled:  # as only vLLM's HfRenderer does
        maybe_make_thread_pool(tokenizer, 2)
    renderer = SimpleNamespace(_executor=ThreadPoolExecutor(1), tokenizer=tokenizer)
    share_rendering(renderer)
    begin = threading.Event()

    def sent(body: dict[str, Any], *job: Any) -> Any:
        reading("t", body)
        return renderer._executor.submit(*job)

    large = copy_context().run(sent, {"prompt": "x" * LARGE}, begin.wait, TIMEOUT_S)
    small = copy_context().run(sent, {"prompt": "x"}, threading.get_ident)
    if is_pooled:
        assert small.result(TIMEOUT_S)
    begin.set()
    assert large.result(TIMEOUT_S)
    thread = copy_context().run(sent, {"prompt": "x" * LARGE}, threading.get_ident).result(TIMEOUT_S)
    assert (thread == small.result(TIMEOUT_S)) is not is_pooled


def test_a_large_prompt_gives_way_to_the_event_loop_and_a_small_one_need_not() -> None:
    usual_s, threads = sys.getswitchinterval(), RenderThreads()

    def rendered(body: dict[str, Any]) -> float:
        reading("t", body)
        return threads.submit(sys.getswitchinterval).result(TIMEOUT_S)

    assert copy_context().run(rendered, {"prompt": "x" * LARGE}) == pytest.approx(SWITCH_S)
    assert copy_context().run(rendered, {"prompt": "x"}) == usual_s
    assert sys.getswitchinterval() == usual_s


async def test_a_large_body_gives_way_to_the_event_loop() -> None:
    usual_s = sys.getswitchinterval()
    assert await FairThread().run("t", 2 * SHORT_BYTES, sys.getswitchinterval) == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == usual_s


def test_the_interval_is_short_until_the_last_of_several_threads_ends() -> None:
    usual_s = sys.getswitchinterval()
    with computing():
        with computing():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    with pytest.raises(ValueError, match="no"), computing():
        raise ValueError("no")
    assert sys.getswitchinterval() == usual_s
