"""`caesura serve` from its first byte to its last: its start, its Redis and its ingress killed, and its stop."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.local.embedded_redis import EmbeddedRedis
from cluster.local.ports import free_ports
from cluster.store.runs.store import RunStore
from tests.faults.promises import Promised
from tests.faults.stand import INGRESS, MARK, marked, title_of, until
from tests.faults.under_load import Outcome, background, clients, completion, run, stream
from tests.serving.served import EXACT, Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HOST = "127.0.0.1"
MARKED = "stopped"
SHUTDOWN_S = 3.0
SHORT_TOKENS, LONG_TOKENS = 100, 4000
PROBE_S = 0.05
REDIS = "redis"
"""The folder in which the data of the embedded Redis stays after the stop."""


@dataclass
class Probes:
    """What a client sees that asks `/ready` all the time, each time on a connection of its own."""

    port: int
    statuses: list[int] = field(default_factory=list)
    without_retry_after: int = 0
    slowest_s: float = 0.0
    refused_s: list[float] = field(default_factory=list)
    """When nobody listened."""

    @contextmanager
    def sent(self) -> Iterator["Probes"]:
        """Inside, they are sent."""
        stop = threading.Event()
        thread = threading.Thread(target=self._send, args=(stop,))
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    def _send(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_S):
            began_s = time.monotonic()
            try:
                answer = httpx.get(f"http://{HOST}:{self.port}/ready", timeout=20.0)
            except httpx.TransportError:
                self.refused_s.append(began_s)
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.statuses.append(answer.status_code)
            self.without_retry_after += answer.status_code == 503 and "retry-after" not in answer.headers


@pytest.fixture
def port() -> int:
    return free_ports(1, HOST)[0]


@pytest.fixture
def config(tmp_path: Path, port: int) -> Path:
    file = tmp_path / "caesura.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "http": {"port": port, "shutdown_s": SHUTDOWN_S},
                "redis": {"path": str(tmp_path / REDIS)},
                "replicas": {"count": 1, "kv_cache_bytes": 32 << 20},
                "engine": EXACT,
            }
        )
    )
    return file


async def test_from_the_first_byte_to_the_last(config: Path, port: int, is_long: bool, promised: Promised) -> None:
    if not is_long:
        pytest.skip("it starts a cluster of its own: with --long")
    probes = Probes(port)
    with probes.sent(), serving(config, **{MARK: MARKED}) as cluster:
        seen = list(probes.statuses)
        promised("a start", "answers that are neither 503 nor 200", len(set(seen) - {200, 503}), exactly=0)
        promised("a start", "answers of 503", seen.count(503), at_least=20)
        promised("a start", "503 without Retry-After", probes.without_retry_after, exactly=0)
        first_s = min(probes.refused_s, default=0.0)
        unheard = [at_s for at_s in probes.refused_s if at_s > first_s + 60]
        promised("a start", "connections refused after the first answer", len(unheard), exactly=0)
        await _redis_killed(cluster, promised)
        await _ingress_killed(probes, promised)
        await _stopped(cluster, promised, config.parent / REDIS)


async def _redis_killed(cluster: Served, promised: Promised) -> None:
    fault = "the embedded Redis is killed"
    (redis,) = [one for one in psutil.Process(cluster.pid).children(recursive=True) if one.name() == "redis-server"]
    async with clients(cluster.url) as client:
        accepted = asyncio.create_task(background(client, {**run(), "max_output_tokens": 1000}))
        await asyncio.sleep(0.3)
        redis.kill()
        killed_s = time.monotonic()
        while (begun := await background(client, {**run(), "max_output_tokens": 8})).outcome is not Outcome.DONE:
            assert time.monotonic() - killed_s < 60.0, begun
            await asyncio.sleep(0.1)
        took_s = time.monotonic() - killed_s
        ended = await accepted
    promised(fault, "accepted programs that failed", int(ended.outcome is not Outcome.DONE), exactly=0)
    promised(fault, "until a new program has ended", took_s, unit="s", at_most=5)


async def _ingress_killed(probes: Probes, promised: Promised) -> None:
    fault = "the only ingress is killed"
    probes.refused_s.clear()
    probes.slowest_s = 0.0
    (victim,) = [one for one in marked(MARKED) if INGRESS in title_of(one)]
    killed_s, before = time.monotonic(), len(probes.statuses)
    victim.kill()
    await asyncio.to_thread(until, lambda: 503 in probes.statuses[before:], "no 503")
    async with clients(f"http://{HOST}:{probes.port}") as client:
        told = int((await client.get("/v1/models")).headers["retry-after"])
    await asyncio.to_thread(until, lambda: probes.statuses[-1] == 200, "no ingress again")
    took_s = time.monotonic() - killed_s
    silent_s = max((at_s - killed_s for at_s in probes.refused_s if at_s > killed_s), default=0.0)
    promised(fault, "seconds in which nobody listens", silent_s, unit="s", at_most=2)
    promised(fault, "slowest probe", probes.slowest_s, unit="s", at_most=1)
    promised(fault, "503 without Retry-After", probes.without_retry_after, exactly=0)
    promised(fault, "Retry-After beside the real time", told / took_s, unit="x", at_least=0.5)
    print(f"the ingress was back after {took_s:.1f} s; Retry-After was {told}")


async def _stopped(cluster: Served, promised: Promised, redis: Path) -> None:
    fault = "caesura serve gets SIGTERM"
    async with clients(cluster.url) as client:
        short = [asyncio.create_task(stream(client, completion("Once", SHORT_TOKENS))) for _ in range(3)]
        long = [asyncio.create_task(stream(client, completion("Once", LONG_TOKENS))) for _ in range(2)]
        body = {**run(), "max_output_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
        answers = asyncio.create_task(_response(client, body))
        await asyncio.sleep(0.5)
        os.kill(cluster.pid, signal.SIGTERM)
        await asyncio.sleep(1.0)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((HOST, int(cluster.url.rpartition(":")[2])), 5.0).close()
        ended_short, ended_long = await asyncio.gather(asyncio.gather(*short), asyncio.gather(*long))
        response_id, last = await answers
    told = [json.loads(one.text)["code"] for one in ended_long if one.outcome is Outcome.ERROR]
    promised(fault, "short streams that ended", sum(one.outcome is Outcome.DONE for one in ended_short), exactly=3)
    promised(fault, "long streams that ended with an error event", told.count("shutting_down"), exactly=2)
    promised(fault, "responses without a last event", last not in ("error", "response.completed"), exactly=0)
    await asyncio.to_thread(until, lambda: not psutil.pid_exists(cluster.pid) or _ended(cluster.pid), "it runs", 60.0)
    continues = last == "response.completed" or await _is_open(redis, response_id)
    promised(fault, "responses in the foreground that do not continue", int(not continues), exactly=0)


def _ended(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def _response(client: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, str]:
    """The id of a response, and its last event."""
    response_id = last = ""
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                response_id, last = response_id or event.get("response", {}).get("id", ""), event["type"]
    return response_id, last


async def _is_open(redis: Path, run_id: str) -> bool:
    """Whether the next start would continue a run."""
    with EmbeddedRedis(redis) as server:
        store = RunStore(server.url, owner="reader", timeout_s=10.0, lease_s=5.0, retention_s=3600.0)
        log = await store.read(run_id, limit=0)
        await store.close()
    return log is not None and log.head.open and not log.head.cancel_asked
