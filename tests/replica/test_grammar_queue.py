"""Who waits for whose grammar."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

from cluster.api.structured_output_limits import SMALL_S, estimated_s
from replicas.grammar_queue import COMPILED_S_KEY, GrammarQueue
from replicas.vllm_patches import share_compilation

LARGE = json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}})
SMALL = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
TIMEOUT_S = 20


@dataclass
class Asked:
    """What the queue reads of vLLM's request."""

    spec: str
    tenant: str = "t"
    finished: bool = False
    measured_s: float | None = None

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=self.measured_s and {COMPILED_S_KEY: self.measured_s})

    @property
    def session_id(self) -> str:
        return f"{self.tenant}/p"

    @property
    def structured_output_request(self) -> Any:
        return SimpleNamespace(structured_output_key=("json", self.spec))

    def is_finished(self) -> bool:
        return self.finished


class Compiler:
    """Compiles large grammars only when the test lets it."""

    def __init__(self) -> None:
        self.begin = threading.Event()
        self.done: list[str] = []

    def __call__(self, request: Asked) -> str:
        if request.spec is LARGE:
            self.begin.wait(TIMEOUT_S)
        self.done.append(request.tenant)
        return request.tenant


def test_a_schema_costs_by_its_parts_and_by_its_repetitions() -> None:
    assert estimated_s(SMALL) < SMALL_S < estimated_s(LARGE)
    assert estimated_s(json.dumps({"type": "string", "maxLength": 200})) > SMALL_S
    optional = {"type": "object", "properties": {f"p{number}": {} for number in range(120)}}
    assert estimated_s(json.dumps(optional)) > SMALL_S > estimated_s(json.dumps({**optional, "required": ["p"] * 120}))
    assert estimated_s("root ::= [a-z]{1,200}") > SMALL_S
    assert estimated_s("not JSON") < SMALL_S


def test_a_small_grammar_does_not_wait_for_large_ones() -> None:
    compiler, queue = Compiler(), GrammarQueue(1)
    large = [queue.submit(compiler, Asked(LARGE, "flood")) for _ in range(6)]
    assert queue.submit(compiler, Asked(SMALL, "other")).result(TIMEOUT_S) == "other"
    assert not any(future.done() for future in large)
    compiler.begin.set()
    assert {future.result(TIMEOUT_S) for future in large} == {"flood"}


def test_what_was_measured_counts_and_not_what_was_estimated() -> None:
    compiler, queue = Compiler(), GrammarQueue(1)
    slow = queue.submit(compiler, Asked(LARGE, "slow", measured_s=2.0))
    assert queue.submit(compiler, Asked(SMALL, "fast")).result(TIMEOUT_S) == "fast"
    small = queue.submit(compiler, Asked(SMALL, "pattern", measured_s=2.0))
    assert queue.submit(compiler, Asked(SMALL, "fast")).result(TIMEOUT_S) == "fast"
    assert not slow.done() and not small.done()
    compiler.begin.set()
    assert {future.result(TIMEOUT_S) for future in (slow, small)} == {"slow", "pattern"}


def test_tenants_take_turns() -> None:
    compiler, queue = Compiler(), GrammarQueue(1)
    futures = [queue.submit(compiler, Asked(LARGE, "flood")) for _ in range(4)]
    futures += [queue.submit(compiler, Asked(LARGE, "other"))]
    compiler.begin.set()
    wait(futures, TIMEOUT_S)
    assert "other" in compiler.done[:3]


def test_a_request_that_has_ended_is_not_compiled() -> None:
    compiler, queue = Compiler(), GrammarQueue(1)
    first, gone, last = Asked(LARGE, "first"), Asked(LARGE, "gone"), Asked(LARGE, "last")
    futures = [queue.submit(compiler, request) for request in (first, gone, last)]
    gone.finished = True
    compiler.begin.set()
    assert futures[2].result(TIMEOUT_S) == "last"
    assert (compiler.done, futures[1].cancelled()) == (["first", "last"], True)


def test_a_grammar_that_cannot_be_compiled_fails_its_request_only() -> None:
    def fail(request: Asked) -> None:
        raise ValueError("no grammar")

    queue = GrammarQueue(1)
    error = queue.submit(fail, Asked(SMALL)).exception(TIMEOUT_S)
    assert str(error) == "no grammar"
    assert queue.submit(Compiler(), Asked(SMALL)).result(TIMEOUT_S) == "t"


def test_vllm_submits_its_compilations_to_the_managers_executor() -> None:
    """`share_compilation` relies on it."""
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.executor, manager.backend, manager._use_async_grammar_compilation = ThreadPoolExecutor(2), object(), True
    share_compilation(manager)
    assert isinstance(manager.executor, GrammarQueue)
    compiled = Asked(SMALL, "vllm's")
    asked = SimpleNamespace(structured_output_key=("json", SMALL), grammar=None)
    params = SimpleNamespace(structured_outputs=object(), extra_args=None)
    manager._create_grammar = lambda request: compiled
    request = SimpleNamespace(
        structured_output_request=asked, sampling_params=params, session_id=None, is_finished=lambda: False
    )
    manager.grammar_init(request)
    assert asked.grammar.result(TIMEOUT_S) is compiled
