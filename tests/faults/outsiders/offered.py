"""Load on a cluster: open (so many requests a second) and closed (so many clients, each one thing after the other)."""

import asyncio
import http.client
import json
import os
import random
import selectors
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import get_context
from threading import Thread
from typing import Any

import httpx

from tests.faults.outsiders.guarded import Guarded, bearer
from tests.faults.stand import until
from tests.faults.under_load import ANSWERED_WITHIN_S, CONNECTIONS, Ended, Outcome, ask

PATH = "/v1/completions"
TOKENS = 8
PROMPT_WORDS = 30


def body(rng: random.Random) -> dict[str, object]:
    words = " ".join(str(rng.randrange(1000)) for _ in range(PROMPT_WORDS))
    return {"model": "tiny", "prompt": words, "max_tokens": TOKENS, "ignore_eos": True}


@asynccontextmanager
async def client_of(cluster: Guarded, key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=cluster.url, headers=bearer(key), timeout=ANSWERED_WITHIN_S, limits=CONNECTIONS
    ) as client:
        yield client


async def closed(client: httpx.AsyncClient, clients: int, seconds: float, seed: int = 0) -> list[Ended]:
    """So many clients ask one thing after the other."""
    until_s = time.monotonic() + seconds

    async def one(number: int) -> list[Ended]:
        rng, ended = random.Random(seed * 1000 + number), []
        while time.monotonic() < until_s:
            ended.append(await ask(client, PATH, body(rng)))
        return ended

    return [one for all_of in await asyncio.gather(*map(one, range(clients))) for one in all_of]


async def opened(
    client: httpx.AsyncClient,
    rate: float,
    seconds: float,
    seed: int = 0,
    send: Callable[[httpx.AsyncClient, str, dict[str, object]], Awaitable[Ended]] = ask,
) -> list[Ended]:
    """So many a second, Poisson, whatever becomes of them."""
    rng, tasks, ended = random.Random(seed), set[asyncio.Task[Ended]](), list[Ended]()

    def note(task: asyncio.Task[Ended]) -> None:
        tasks.discard(task)
        ended.append(task.result())

    until_s = next_s = time.monotonic()
    until_s += seconds
    while (next_s := next_s + rng.expovariate(rate)) < until_s:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        task = asyncio.create_task(send(client, PATH, body(rng)))
        tasks.add(task)
        task.add_done_callback(note)
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    return ended


def answered(ended: list[Ended]) -> list[Ended]:
    """Those that were answered."""
    return [one for one in ended if one.outcome is Outcome.DONE]


def latencies_of_all(ended: list[Ended]) -> list[float]:
    """Seconds until each was answered.

    Raises:
        AssertionError: one was not, or there are none.
    """
    others = [one for one in ended if one.outcome is not Outcome.DONE]
    assert ended and not others, f"{len(others)} of {len(ended)} were not answered: {others[:3]}"
    return [one.latency_s for one in ended]


def at_once(cluster: Guarded, key: str, count: int) -> tuple[list[Ended], float]:
    """So many requests in the same instant; how each ended, and seconds from the first one sent to the last answer.

    By a client that is no burden, as httpx would be on few cores, and in a process of its own: in this one garbage of
    the load before would be collected meanwhile.
    """
    with get_context("spawn").Pool(1) as clients:
        return clients.apply(burst, (cluster.port, bearer(key)["Authorization"], count))


def burst(port: int, authorization: str, count: int, within_s: float = ANSWERED_WITHIN_S) -> tuple[list[Ended], float]:
    """`at_once`, in this process. Who gets no answer is lost: the connection ends without one, or nobody is answered
    any more for ``within_s``.
    """
    asked = json.dumps(body(random.Random(count))).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}\r\n"
    whole = f"{head}Authorization: {authorization}\r\n\r\n".encode() + asked
    ended: list[Ended] = []
    with selectors.DefaultSelector() as waiting:
        for _ in range(count):
            waiting.register(socket.create_connection(("127.0.0.1", port), 30), selectors.EVENT_READ)
        sent_s = {}
        began_s = time.monotonic()
        for link in [one.fileobj for one in waiting.get_map().values()]:
            assert isinstance(link, socket.socket)
            link.sendall(whole)
            sent_s[link] = time.monotonic()
        while sent_s and (ready := waiting.select(within_s)):
            for one, _ in ready:
                link = one.fileobj
                assert isinstance(link, socket.socket)
                ended.append(_ended(_received(link), time.monotonic() - sent_s.pop(link)))
                waiting.unregister(link)
                link.close()
    return [*ended, *(_ended(b"", within_s) for _ in sent_s)], time.monotonic() - began_s


def _received(link: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return link.recv(65536)
    return b""


def _ended(got: bytes, took_s: float) -> Ended:
    if not got:
        return Ended(Outcome.LOST, None, "", took_s, took_s)
    head = got.partition(b"\r\n\r\n")[0].decode()
    status = int(head.split()[1])
    again = [line.partition(":")[2].strip() for line in head.split("\r\n") if line.lower().startswith("retry-after:")]
    outcome = Outcome.DONE if status == 200 else Outcome.REFUSED if status in (429, 503) else Outcome.ERROR
    return Ended(outcome, status, "", took_s, took_s, again[0] if again else None)


@contextmanager
def shouting(cluster: Guarded, key: str, clients: int, *, heed: bool = False) -> Iterator[Any]:
    """So many clients who ask again at once, whatever they are told; yields how many were answered, and refused.

    With ``heed`` they come again when they are told to. Somebody has been answered by then. They are in a process of
    their own with the lowest priority: they stand for machines of their own.
    """
    processes = get_context("spawn")
    told, heard, enough = processes.Array("i", 2), processes.Event(), processes.Event()
    said = (cluster.port, bearer(key)["Authorization"], clients, heed, told, heard, enough)
    process = processes.Process(target=_shout, args=said, daemon=True)
    process.start()
    try:
        until(heard.is_set, "nobody shouts, or nobody is answered")
        yield told
    finally:
        enough.set()
        process.join(ANSWERED_WITHIN_S)


def _shout(port: int, authorization: str, clients: int, heed: bool, told: Any, heard: Any, enough: Any) -> None:
    os.nice(19)
    asked = json.dumps(body(random.Random(7)))
    headers = {"Authorization": authorization, "Content-Type": "application/json"}

    def one() -> None:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWERED_WITHIN_S)
        while not enough.is_set():
            link.request("POST", PATH, asked, headers)
            answer = link.getresponse()
            answer.read()
            heard.set()
            refused = answer.status == 429
            with told.get_lock():
                told[refused] += 1
            if heed and refused:
                wait_ms = answer.headers.get("retry-after-ms") or 1e3 * int(answer.headers["retry-after"])
                enough.wait(float(wait_ms) / 1e3)
        link.close()

    threads = [Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
