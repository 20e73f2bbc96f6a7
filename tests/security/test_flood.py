"""The worst bodies in a real ingress, without a replica: how long one step of its event loop takes.

Seconds are CPU time of the loop's thread, so that a busy machine does not matter. Each body is tried several times and
the fastest counts, because caches of the processor do.
"""

import asyncio
import gc
import json
from asyncio.events import Handle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import thread_time
from typing import Any

import pytest
from starlette.requests import Request

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import MonotonicClock
from cluster.core.errors import HttpError, Overloaded
from cluster.core.lineage import LineageIndex
from cluster.dispatch.predictions import predictions
from cluster.dispatch.quarantine import Quarantine
from cluster.dispatch.replica_client import ReplicaClient
from cluster.http.body import MAX_ITEMS, MAX_KEYS
from cluster.http.idempotency import read_idempotency
from cluster.http.ingress import ProgramIngress
from cluster.http.requests import TurnReader
from cluster.observing.slo_tracker import SloTracker
from cluster.responses.request import read_request
from tests.security.corpus import GROWING, chat, schema, tools

STEP_S = 0.05
"""Longest CPU time of one step of the loop."""
PER_BYTE_S = 0.005 / 100_000
"""Longest CPU time of the loop for each byte of a body, of all its steps."""
FIXED_S = 0.005
"""CPU time of a request that does not depend on its body."""
SHARED = 2.0
"""Factor of the bound for all steps. On a machine with other work, steps that allocate much are slower than a parse."""
TRIES = 3
PARSED = b'{"messages": [' + b'{"role": "user", "content": "x"}, ' * 19_999 + b'{"role": "user", "content": "x"}]}'
PARSED_S = 0.0033
"""CPU time to parse `PARSED` on a machine on which the bounds hold. On a slower or busier one they are longer by the
same factor."""


def encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps({"model": "tiny", **body}).encode()


def _message(role: str = "user", content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


ACCEPTED: dict[str, bytes] = {
    "messages": chat(messages=[_message()] * (MAX_KEYS // 2 - 9)),
    "parts of a message": chat(messages=[_message(content=[{"type": "text", "text": "x"}] * (MAX_KEYS // 2 - 9))]),
    "calls of messages": chat(
        messages=[_message("assistant", None, tool_calls=[_call(number)]) for number in range(MAX_KEYS // 9)]
    ),
    "one long message": chat(messages=[_message(content="x " * 3_900_000)]),
    "tools": chat(tools=tools(MAX_KEYS // 6)),
    "metadata": chat(metadata={f"k{number}": "v" for number in range(MAX_KEYS - 9)}),
    "echo and stop strings": chat(stop=["x"] * (MAX_ITEMS - 9), echo=True),
    "token ids": encoded({"prompt": list(range(MAX_ITEMS - 9))}),
    "optional properties": schema({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2400)}}),
}
RESPONSES: dict[str, bytes] = {
    "items": encoded({"input": [_message()] * (MAX_KEYS // 2 - 9)}),
    "outputs": encoded(
        {
            "input": [
                {"type": "function_call_output", "call_id": f"c{number}", "output": "x"}
                for number in range(MAX_KEYS // 3 - 9)
            ]
        }
    ),
    "tools": encoded(
        {
            "input": "x",
            "tools": [
                {"type": "function", "name": f"t{number}", "parameters": {"type": "object"}}
                for number in range(MAX_KEYS // 4 - 9)
            ],
        }
    ),
    "include": encoded({"input": "x", "include": ["x"] * (MAX_ITEMS - 9)}),
    "numbers": encoded({"input": "x", "other": [1.5] * (MAX_ITEMS - 9)}),
}


@pytest.fixture(scope="module", autouse=True)
def _started() -> None:
    """As in an ingress that has started: what is there before a request costs the garbage collector nothing."""
    gc.collect()
    gc.freeze()


class Steps:
    """The CPU time of the steps of an event loop, in seconds."""

    longest_s = 0.0
    total_s = 0.0


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """Measure all steps in the context."""
    steps, run = Steps(), Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        begun_s = thread_time()
        run(handle)
        took_s = thread_time() - begun_s
        steps.longest_s, steps.total_s = max(steps.longest_s, took_s), steps.total_s + took_s

    with monkeypatch.context() as patched:
        patched.setattr(Handle, "_run", timed)
        yield steps


class NoPlacer:
    """A cluster without a replica."""

    async def place(self, *_: Any, **__: Any) -> Any:
        raise Overloaded("no replica", retry_after_s=1)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class NoReplicas:
    """A handle of no deployment."""

    def options(self, **_: Any) -> "NoReplicas":
        return self


class Ingress(ProgramIngress):
    """Nothing of it was opened, so that nothing has to be closed."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def ingress() -> ProgramIngress:
    """An ingress as far as a turn's way to its placement."""
    config = CaesuraConfig.model_validate({"redis": {"url": "redis://127.0.0.1:1"}})
    clock = MonotonicClock()
    made = Ingress.__new__(Ingress)
    made._config, made._lineage, made._reader = config, LineageIndex(), TurnReader(config)
    made._turns = SloTracker(config, clock)
    made._fleet = ReplicaClient(  # type: ignore[assignment]
        NoReplicas(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        NoPlacer(),  # type: ignore[arg-type]
        Quarantine(clock, 60.0),
        5.0,
        predictions(config, clock, "ingress", None),
    )
    return made


async def sent(part: ProgramIngress, body: bytes, path: str) -> None:
    """Send a body to the route. Nothing answers it."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"idempotency-key", b"once")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    request = Request(scope, receive)
    try:
        if path == "/v1/responses":
            read, identity = await part._reader.identified(request)
            await asyncio.sleep(0)
            assert read_idempotency(request, "responses") is not None
            await asyncio.sleep(0)
            read_request(read)
            await asyncio.sleep(0)
            part._lineage.attribute(identity, read)
        else:
            await part._turn(request, "completions" if b'"prompt"' in body[:40] else "chat")
    except HttpError:
        pass


def cost(monkeypatch: pytest.MonkeyPatch, body: bytes, path: str) -> tuple[float, float]:
    """The CPU seconds of the loop's longest step, and of all its steps above those of the smallest body."""
    found = []
    gc.collect()
    for _ in range(TRIES):

        async def run() -> Steps:
            part = ingress()
            with measured(monkeypatch) as steps:
                await asyncio.create_task(sent(part, body, path))
            return steps

        found.append(asyncio.run(run()))
    return min(one.longest_s for one in found), min(one.total_s for one in found)


@pytest.mark.parametrize("name", ACCEPTED)
def test_no_step_of_the_loop_is_long_for_a_body_that_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, ACCEPTED[name], "/v1/chat/completions")


@pytest.mark.parametrize("name", RESPONSES)
def test_no_step_of_the_loop_is_long_for_a_response(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, RESPONSES[name], "/v1/responses")


@pytest.mark.parametrize("name", GROWING)
def test_no_step_of_the_loop_is_long_for_the_corpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, GROWING[name](MAX_KEYS // 5), "/v1/chat/completions")


def check(monkeypatch: pytest.MonkeyPatch, body: bytes, path: str) -> None:
    """Check both bounds."""
    slowness = max(1.0, parse_s() / PARSED_S)
    longest_s, total_s = cost(monkeypatch, body, path)
    slowness = max(slowness, parse_s() / PARSED_S)
    assert longest_s <= slowness * STEP_S
    assert total_s <= SHARED * slowness * (FIXED_S + PER_BYTE_S * max(len(body), 100_000))


def parse_s() -> float:
    """The CPU seconds to parse `PARSED`."""
    found = []
    for _ in range(TRIES):
        begun_s = thread_time()
        json.loads(PARSED)
        found.append(thread_time() - begun_s)
    return min(found)
