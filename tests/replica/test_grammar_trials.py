"""Grammars are tried in a process that ends at its limits, before the engine compiles them."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from vllm.sampling_params import StructuredOutputsParams

from cluster.api.structured_output_limits import CODE
from replicas.fair_threads import FairThreads
from replicas.grammar_trials import (
    LARGE_AT_ONCE,
    Compiled,
    Exceeded,
    Grammar,
    GrammarProcess,
    GrammarRejected,
    GrammarTrials,
    Invalid,
    Trial,
    TrialCancelled,
    Verdict,
    grammar_of,
)
from replicas.requests import as_refusal
from tests.waiting import until

VOCABULARY = [bytes([number]) for number in range(256)] + [b"ab", b'":', b'", "', b"</s>"]
ENDLESS = Grammar(
    "json", json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20000)}})
)
"""xgrammar compiles it for minutes, and with gigabytes."""
PATTERN = {"json": {"type": "string", "pattern": "^[^\\x00-\\x1f]{1,9}$"}}
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
    started = GrammarProcess(info.serialize_json)
    yield started
    started.close()


def run(grammar: Grammar, process: GrammarProcess, max_s: float = TIMEOUT_S, max_bytes: int = 1 << 30) -> Verdict:
    return Trial(grammar).run(process, max_s, max_bytes)


def children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_no_children(process: GrammarProcess) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while children(process.pid):
        assert time.monotonic() < until_s, "a trial did not end"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json", '{"type": "string", "pattern": "^a+$"}'),
        Grammar("regex", "[0-9]+"),
        Grammar("grammar", 'root ::= "a" | "b"'),
        Grammar("lark", 'start: "a" | "b"'),
        Grammar(
            "structural_tag", json.dumps({"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]})
        ),
        Grammar(
            "structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})
        ),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_each_kind_is_compiled(grammar: Grammar, process: GrammarProcess) -> None:
    assert isinstance(run(grammar, process), Compiled)


def test_what_cannot_be_compiled_is_invalid(process: GrammarProcess) -> None:
    verdict = run(Grammar("regex", "[z-a]"), process)
    assert isinstance(verdict, Invalid)
    assert "lower bound" in verdict.message


def test_a_trial_ends_at_its_time(process: GrammarProcess) -> None:
    assert run(ENDLESS, process, max_s=0.3) is Exceeded.TIME
    wait_for_no_children(process)


def test_a_trial_ends_at_its_memory(process: GrammarProcess) -> None:
    assert run(ENDLESS, process, max_bytes=16 << 20) is Exceeded.MEMORY
    wait_for_no_children(process)


def test_a_trial_whose_client_has_gone_ends(process: GrammarProcess) -> None:
    trial = Trial(ENDLESS)
    future = FairThreads(1).submit("t", lambda: trial.run(process, TIMEOUT_S, 1 << 40))
    while process.pid is None or not children(process.pid):
        time.sleep(0.01)
    trial.cancel()
    assert isinstance(future.exception(TIMEOUT_S / 4), TrialCancelled)
    wait_for_no_children(process)


def test_the_process_ends_with_the_one_that_started_it_and_starts_with_the_next_trial(process: GrammarProcess) -> None:
    assert process._channel is not None
    assert process._process is not None
    process._channel.shutdown(socket.SHUT_RDWR)  # as the kernel does when a process ends
    assert process._process.wait(TIMEOUT_S) == 0
    assert isinstance(run(Grammar("regex", "a"), process), Compiled)


async def test_it_starts_before_the_first_trial_and_only_where_grammars_are_tried() -> None:
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
    ahead, never = (GrammarProcess(info.serialize_json) for _ in range(2))
    GrammarTrials("guidance", never).start()
    GrammarTrials("xgrammar", ahead).start()
    await until(lambda: ahead._channel is not None)
    started = ahead.pid
    try:
        assert isinstance(run(Grammar("regex", "a"), ahead), Compiled)
        assert ahead.pid == started
        assert never.pid is None
    finally:
        ahead.close()


async def test_a_start_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
    answers = iter((None, info.serialize_json()))

    def tokenizer() -> str:
        if (answer := next(answers)) is None:
            raise OSError("no file")
        return answer

    process = GrammarProcess(tokenizer)
    process.start_ahead()
    await until(lambda: "starts it again" in caplog.text)
    try:
        assert isinstance(run(Grammar("regex", "a"), process), Compiled)
    finally:
        process.close()


def test_the_process_imports_neither_torch_nor_transformers(process: GrammarProcess) -> None:
    run(Grammar("regex", "a"), process)
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "xgrammar" in mapped
    assert "libtorch" not in mapped


def test_a_process_that_is_killed_before_each_trial_is_no_verdict() -> None:
    def connect() -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    with pytest.raises(OSError, match="killed"):
        run(ENDLESS, SimpleNamespace(connect=connect))  # type: ignore[arg-type]


# --- which grammars are tried, and in which order ---------------------------------------------------------------------


HALF = Compiled(0.5)


class FakeProcess:
    """Needs no process: the trial is replaced."""


class Tried:
    """The verdicts of trials, and what was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verdict: Verdict = HALF) -> None:
        self.specs: list[str] = []
        self.verdict = verdict
        self.release = threading.Event()

        def run(trial: Trial, process: Any, max_s: float, max_bytes: int) -> Verdict:
            spec = trial._grammar.spec
            self.specs.append(spec)
            if "endless" in spec:
                self.release.wait(TIMEOUT_S)
                return Exceeded.TIME
            return self.verdict

        monkeypatch.setattr(Trial, "run", run)


def trials(backend: str = "xgrammar") -> GrammarTrials:
    return GrammarTrials(backend, FakeProcess())  # type: ignore[arg-type]


def params(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "is_tried"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, False),
        ({"json": {"type": "object", "properties": {f"p{n}": {} for n in range(300)}}}, True),
        ({"json": {"patternProperties": {"^a": {}}}}, True),
        ({"json": {"type": "object", "properties": {"pattern": {"type": "string"}}}}, False),
        (PATTERN, True),
        ({"regex": "a"}, True),
        ({"grammar": "root ::= 'a'"}, True),
        ({"choice": ["a", "b"]}, True),
        ({"json_object": True}, False),
    ],
)
async def test_what_is_surely_small_is_not_tried(
    fields: dict[str, Any], is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried(monkeypatch)
    assert await trials().check(params(**fields), "t", "response_format") == (0.5 if is_tried else None)
    assert bool(tried.specs) is is_tried


async def test_a_verdict_is_remembered_unless_a_limit_was_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, checked = Tried(monkeypatch), trials()
    for _ in range(3):
        assert await checked.check(params(**PATTERN), "t", "tools") == 0.5
    assert len(tried.specs) == 1
    tried.release.set()
    for _ in range(2):
        with pytest.raises(GrammarRejected):
            await checked.check(params(regex="endless"), "t", "tools")
    assert len(tried.specs) == 1 + 4  # among the small ones first


@pytest.mark.parametrize(
    ("verdict", "code"), [(Exceeded.TIME, CODE), (Exceeded.MEMORY, CODE), (Invalid("no range"), None)]
)
async def test_a_refusal_names_the_field(verdict: Verdict, code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    Tried(monkeypatch, verdict)
    with pytest.raises(GrammarRejected) as caught:
        await trials().check(params(**PATTERN), "t", "response_format")
    refusal = as_refusal(caught.value)
    assert (refusal.status, refusal.param, refusal.code) == (400, "response_format", code)
    assert refusal.message == str(caught.value)


async def test_another_backend_judges_its_own_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Tried(monkeypatch, Invalid("no"))
    assert await trials("guidance").check(params(**PATTERN), "t", "tools") is None
    assert not tried.specs
    assert await trials("auto").check(params(**PATTERN), "t", "tools") is None
    assert tried.specs


async def test_a_small_pattern_does_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, checked = Tried(monkeypatch), trials()
    large = [
        asyncio.create_task(checked.check(params(regex="endless" + "(a|b)" * 400), "flood", "tools")) for _ in range(9)
    ]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(TIMEOUT_S / 2):
            await checked.check(params(regex="a+"), "flood", "tools")
        assert not any(task.done() for task in large)
    finally:
        tried.release.set()
    await asyncio.gather(*large, return_exceptions=True)


async def test_who_waits_no_longer_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, checked = Tried(monkeypatch), trials()
    waiting = [
        asyncio.create_task(checked.check(params(regex=f"endless{n}" + "(a|b)" * 400), "t", "tools")) for n in range(4)
    ]
    await until(lambda: len(tried.specs) == LARGE_AT_ONCE)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    tried.release.set()
    later = params(regex="later" + "(a|b)" * 400)
    assert await checked.check(later, "t", "tools") == 0.5
    assert len(tried.specs) == LARGE_AT_ONCE + 1, "and the one that is tried last"


def test_what_vllm_rejects_itself_has_no_grammar() -> None:
    assert grammar_of(None, True) is None
    assert grammar_of(SimpleNamespace(all_constraints_none=lambda: True), True) is None
    lark = params(grammar='start: "a" | unknown_rule\n?bad: (')
    assert grammar_of(lark, True) is None or grammar_of(lark, True).kind in ("grammar", "lark")  # type: ignore[union-attr]
    plain = grammar_of(params(grammar='start: "a"'), True)
    assert plain is not None
    assert (plain.kind, "::=" in plain.spec) in (("grammar", True), ("lark", False)), "as this vLLM compiles it"
    choice = grammar_of(params(choice=["a", "b"]), True)
    assert choice is not None
    assert choice.kind == "grammar"
