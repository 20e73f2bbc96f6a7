"""Load: long and steady, in a burst, with slow clients, with a noisy tenant, with clients that try again and again."""

import asyncio
import random
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from cluster.dispatch.turn_client import IDLE_CONNECTION_S
from tests.faults.outsiders.guarded import OF_THE_NOISY, OF_THE_NOISY_PER_S, Guarded, bearer
from tests.faults.outsiders.offered import (
    answered,
    at_once,
    body,
    client_of,
    closed,
    latencies_of_all,
    opened,
    shouting,
)
from tests.faults.promises import percentile
from tests.faults.stand import until
from tests.faults.under_load import Ended, Outcome, ask

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]

CLIENTS = 8
"""As many as fill the engine's steps without a queue."""
STEADY_S, LONG_STEADY_S = 12.0, 1800.0
BLOCK_S, LONG_BLOCK_S = 2.0, 60.0
SAMPLES = 60
SLOW = 12
RETRIES = 3
SETTLED_WITHIN_S = 10.0
FD_SLACK = 8
"""Connections that are kept open, and files of a log that is rotated."""


@pytest.fixture(scope="module")
def capacity(guarded: Guarded) -> float:
    """Answers a second with enough clients."""

    async def measured() -> float:
        async with client_of(guarded, "acme") as client:
            await closed(client, CLIENTS, 1.0)
            seconds = 3.0
            return len(answered(await closed(client, CLIENTS, seconds))) / seconds

    return asyncio.run(measured())


def engine(guarded: Guarded) -> dict[str, Any]:
    (told,) = httpx.get(f"{guarded.url}/admin/statistics", headers=bearer("ops"), timeout=30).json()["replicas"]
    return dict(told)


def resources(guarded: Guarded) -> dict[int, tuple[str, int, int]]:
    """By process: its name, resident bytes, open files. A Ray actor's title has the method in it that runs just now."""
    found = {}
    for process in guarded.family:
        try:
            found[process.pid] = (process.name(), process.memory_info().rss, process.num_fds())
        except psutil.Error:
            continue
    return found


async def files_left(guarded: Guarded, before: dict[int, tuple[str, int, int]]) -> int:
    """By how many a process has more open files, once the ingress has closed its idle connections to replicas."""
    deadline_s = time.monotonic() + 3 * IDLE_CONNECTION_S
    while True:
        now = await asyncio.to_thread(resources, guarded)
        grown = max(files - before[pid][2] for pid, (_, _, files) in now.items() if pid in before)
        if grown <= FD_SLACK or time.monotonic() > deadline_s:
            return grown
        await asyncio.sleep(0.5)


async def left_in_the_engine(guarded: Guarded) -> tuple[int, int]:
    """Turns, and blocks that are not free, once nothing is held and the last copies to the host have ended."""
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while True:
        reset = await asyncio.to_thread(httpx.post, f"{guarded.url}/admin/reset", headers=bearer("ops"), timeout=30)
        assert reset.status_code in (200, 409), reset.text
        now = await asyncio.to_thread(engine, guarded)
        left = now["running"] + now["waiting"], now["total_blocks"] - now["free_blocks"]
        if left == (0, 0) or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.2)


def slope_per_hour(samples: list[tuple[float, int]]) -> float:
    """Least squares, as a part of the mean."""
    mean_t = sum(at for at, _ in samples) / len(samples)
    mean = sum(size for _, size in samples) / len(samples)
    above = sum((at - mean_t) * (size - mean) for at, size in samples)
    return above / sum((at - mean_t) ** 2 for at, _ in samples) / mean * 3600


async def test_steady_load(guarded: Guarded, capacity: float, is_long: bool, promised: Any) -> None:
    seconds = LONG_STEADY_S if is_long else STEADY_S
    samples: dict[int, list[tuple[float, int]]] = {}

    async def watch() -> None:
        while True:
            for pid, (_, rss, _) in (await asyncio.to_thread(resources, guarded)).items():
                samples.setdefault(pid, []).append((time.monotonic(), rss))
            await asyncio.sleep(seconds / SAMPLES)

    async with client_of(guarded, "acme") as client:
        await opened(client, 0.8 * capacity, seconds / 6)
        before = resources(guarded)
        watcher = asyncio.create_task(watch())
        ended = await opened(client, 0.8 * capacity, seconds)
        watcher.cancel()
    after = resources(guarded)
    fault = f"80% of capacity ({0.8 * capacity:.0f}/s) for {seconds / 60:.1f} min"
    promised(fault, f"lost, of {len(ended)}", sum(one.outcome is Outcome.LOST for one in ended), exactly=0)
    promised(fault, "5xx but 503", sum((one.status or 0) >= 500 and one.status != 503 for one in ended), exactly=0)
    kinds = [Counter(name for name, _, _ in some.values()) for some in (before, after)]
    promised(fault, "actors and processes leaked", (kinds[1] - kinds[0]).total(), at_most=0 if is_long else 2)
    promised(fault, "files leaked by a process", await files_left(guarded, before), at_most=FD_SLACK)
    # Else each copy to the host tier leaves its numbers behind for ever.
    assert any("Avg generation throughput" in text for text in guarded.logs().values()), "vLLM's log is not written"
    turns, blocks = await left_in_the_engine(guarded)
    promised(fault, "turns left in the engine", turns, exactly=0)
    promised(fault, "blocks leaked", blocks, exactly=0)
    if is_long:
        broken = []
        for pid, some in samples.items():
            if len(some) > SAMPLES // 2 and pid in after:
                slope = 100 * slope_per_hour(some[len(some) // 4 :])
                try:
                    promised(fault, f"memory of {after[pid][0]} ({pid})", slope, unit="%/h", at_most=1)
                except AssertionError as error:  # every process is told of
                    broken.append(str(error))
        assert not broken, broken


def rejected(guarded: Guarded) -> float:
    """Turns that were refused, as the cluster counts them."""
    with guarded.client("ops") as client:
        page = client.get("/metrics").raise_for_status().text
    counted = re.findall(r'^caesura_requests_total\{[^}]*outcome="rejected"[^}]*\} (\S+)$', page, re.M)
    return sum(map(float, counted))


def test_a_burst(guarded: Guarded, capacity: float, is_long: bool, promised: Any) -> None:
    ended: list[Ended] = []
    took_s, counted = 0.0, rejected(guarded)
    for _ in range(20 if is_long else 3):
        burst, burst_s = at_once(guarded, "acme", int(10 * capacity))
        ended, took_s = ended + burst, took_s + burst_s
    served = answered(ended)
    shed = [one for one in ended if one.outcome is Outcome.REFUSED]
    fault = f"a burst: 10 times what is answered in a second ({capacity:.0f}), at once"
    assert shed and served
    told = [one for one in shed if one.status in (429, 503) and one.retry_after is not None]
    promised(fault, f"lost or 5xx but 503, of {len(ended)}", len(ended) - len(served) - len(shed), exactly=0)
    promised(fault, f"shed without 429/503 and Retry-After, of {len(shed)}", len(shed) - len(told), exactly=0)
    promised(fault, "p99 of a refusal", percentile((one.latency_s for one in shed), 0.99) * 1e3, unit="ms", at_most=100)
    promised(fault, "goodput over its peak", len(served) / took_s / capacity, unit="x", at_least=0.9)
    until(lambda: rejected(guarded) >= counted + len(shed), "not every refusal is counted")


@contextmanager
def slow_clients(guarded: Guarded) -> Iterator[None]:
    """Streams that nobody reads, and headers that come a few bytes at a time and never end."""
    links = []
    key = bearer("acme")["Authorization"].encode()
    asked = b'{"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: " + key
    for number in range(2 * SLOW):
        link = socket.create_connection(("127.0.0.1", guarded.port), 10)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        whole = head + b"\r\nContent-Length: %d\r\n\r\n" % len(asked) + asked
        link.sendall(whole if number < SLOW // 4 else head[: 20 + number])
        links.append(link)
    try:
        yield
    finally:
        for link in links:
            link.close()


async def alternating(
    guarded: Guarded, capacity: float, seconds: float, *besides: Any, rounds: int = 3
) -> list[list[float]]:
    """A victim's latencies alone and beside things, in blocks by turns, so that the machine's moods are in all.

    Raises:
        AssertionError: one of its requests was not answered.
    """
    latencies: list[list[float]] = [[] for _ in (nullcontext, *besides)]
    async with client_of(guarded, "other") as victim:
        for number in range(rounds):
            for beside, heard in zip((nullcontext, *besides), latencies, strict=True):
                async with beside():
                    heard += latencies_of_all(await opened(victim, 0.2 * capacity, seconds / rounds, seed=number))
    return latencies


async def test_slow_readers_and_slow_headers(guarded: Guarded, capacity: float, is_long: bool, promised: Any) -> None:
    class Beside:
        async def __aenter__(self) -> None:
            self._slow = slow_clients(guarded)
            self._slow.__enter__()
            # The few streams are generated at once, into buffers; what is to do no harm is that nobody takes them.
            await asyncio.sleep(1.0)

        async def __aexit__(self, *_: object) -> None:
            self._slow.__exit__(None, None, None)

    seconds, rounds = (2 * LONG_BLOCK_S, 3) if is_long else (BLOCK_S, 1)
    alone, together = await alternating(guarded, capacity, seconds, Beside, rounds=rounds)
    over = percentile(together, 0.99) / percentile(alone, 0.99)
    promised("slow readers and slow headers", "others' p99 over that alone", over, unit="x", at_most=1.1)


async def test_a_noisy_tenant(guarded: Guarded, capacity: float, is_long: bool, promised: Any) -> None:
    """What it is allowed costs others something, too: so beside it shouting, and beside it keeping to its limits."""
    served, refused, for_s = Counter[bool](), Counter[bool](), dict.fromkeys((False, True), 0.0)

    @asynccontextmanager
    async def noise(clients: int, heed: bool) -> AsyncIterator[None]:
        noisy = shouting(guarded, "noisy", clients, heed=heed)
        told = await asyncio.to_thread(noisy.__enter__)
        before, began_s = tuple(told), time.monotonic()
        try:
            yield
        finally:
            served[heed] += told[0] - before[0]
            refused[heed] += told[1] - before[1]
            for_s[heed] += time.monotonic() - began_s
            await asyncio.to_thread(noisy.__exit__, None, None, None)

    seconds, rounds = (2 * LONG_BLOCK_S, 3) if is_long else (BLOCK_S, 1)
    besides = [partial(noise, 3 * CLIENTS, heed=False), partial(noise, OF_THE_NOISY, heed=True)]
    blocks = await alternating(guarded, capacity, seconds, *besides, rounds=rounds)
    alone, shouted, polite = [percentile(one, 0.99) for one in blocks]
    allowed = OF_THE_NOISY_PER_S * for_s[False] + rounds * (OF_THE_NOISY + 3 * CLIENTS)
    promised("a noisy tenant", "answered above its limits", max(0.0, served[False] - allowed), exactly=0)
    promised("a noisy tenant", "refused", refused[False], at_least=1)
    rate, quiet_rate = (served[heed] / for_s[heed] for heed in (False, True))
    fault = f"a noisy tenant, {refused[False]} times refused, {rate:.0f}/s served ({quiet_rate:.0f}/s if it heeds)"
    promised(fault, "of its rate, served if it heeds", quiet_rate / OF_THE_NOISY_PER_S, unit="x", at_least=0.7)
    promised(fault, "another's p99 over that beside it at its limit", shouted / polite, unit="x", at_most=1.5)
    promised(fault, "another's p99 over that alone", shouted / alone, unit="x", at_most=1.5)


async def test_a_retry_storm(guarded: Guarded, capacity: float, is_long: bool, promised: Any) -> None:
    """Three times the capacity, and who is refused comes again as told: the engine's work is no more for it."""
    rng, attempts, seconds = random.Random(5), 0, LONG_BLOCK_S if is_long else BLOCK_S

    async def stubborn(client: httpx.AsyncClient, path: str, asked: Any) -> Ended:
        nonlocal attempts
        for number in range(RETRIES + 1):
            attempts += 1
            ended = await ask(client, path, asked)
            if ended.retry_after is None or number == RETRIES:
                return ended
            await asyncio.sleep(float(ended.retry_after) * rng.uniform(1.0, 1.5))
        raise AssertionError

    async with client_of(guarded, "acme") as client:
        calm, _ = await work(guarded, closed(client, CLIENTS, 1.0))
        storm, ended = await work(guarded, opened(client, 3 * capacity, seconds, send=stubborn))
        assert (await ask(client, "/v1/completions", body(rng))).outcome is Outcome.DONE
    lost = len(ended) - len(answered(ended)) - sum(one.outcome is Outcome.REFUSED for one in ended)
    fault = f"a retry storm at 3 times the capacity, {attempts / len(ended):.1f} attempts each"
    promised(fault, f"lost or 5xx but 503, of {attempts} attempts", lost, exactly=0)
    promised(fault, "the engine's work for an answer over that in calm", storm / calm, unit="of calm", at_most=1.2)


async def work(guarded: Guarded, load: Awaitable[list[Ended]]) -> tuple[float, list[Ended]]:
    """Tokens that the engine computes for each request that is answered, and how all ended."""
    before = engine(guarded)["scheduled_tokens"]
    ended = await load
    return float(engine(guarded)["scheduled_tokens"] - before) / len(answered(ended)), ended
