"""Clients of a cluster under load: each request has one outcome, as its client saw it, and a stream is read whole."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx

MODEL = "tiny"
ANSWERED_WITHIN_S = 240.0
"""Whoever is not answered by then counts as lost."""
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class Outcome(Enum):
    """How a request ended for its client."""

    DONE = auto()
    ERROR = auto()
    """It was accepted, and an error event, or an error body, said how it ended."""
    REFUSED = auto()
    """With a 4xx or 503 before anything was accepted."""
    LOST = auto()
    """It was accepted, or nobody knows, and no end could be read."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request."""

    outcome: Outcome
    status: int | None
    """Of HTTP; None without an answer."""
    text: str
    """Of the answer, of all its events; of an error, what it said."""
    latency_s: float
    stall_s: float
    """The longest time without an event, from the request on."""
    retry_after: str | None = None


def completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A body whose answer is the same each time, and has ``tokens`` tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return {**body, "stream": True, **more}


def run(*plan: str, **more: Any) -> dict[str, Any]:
    """A body of /v1/responses whose first turns call these tools, and whose last turn speaks."""
    body = {
        "model": MODEL,
        "input": "Go.",
        "tools": [{"type": "function", "name": name, "server_side": True} for name in dict.fromkeys(plan)],
        "tool_choices": [{"type": "function", "name": name} for name in plan],
        "max_turns": len(plan) + 1,
        "max_output_tokens": 400,
        "temperature": 0.0,
    }
    return {**body, **more}


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a limit of connections."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWERED_WITHIN_S, limits=CONNECTIONS) as client:
        yield client


async def stream(client: httpx.AsyncClient, body: Mapping[str, Any], path: str = "/v1/completions") -> Ended:
    """Read a stream of completions to its end."""
    began_s = last_s = time.monotonic()
    texts: list[str] = []
    stall_s, status, error, done, retry_after = 0.0, None, None, False, None

    def ended(outcome: Outcome, text: str) -> Ended:
        now_s = time.monotonic()
        return Ended(outcome, status, text, now_s - began_s, max(stall_s, now_s - last_s), retry_after)

    try:
        async with asyncio.timeout(ANSWERED_WITHIN_S), client.stream("POST", path, json=body) as answer:
            status, retry_after = answer.status_code, answer.headers.get("retry-after")
            if status != 200:
                said = (await answer.aread()).decode(errors="replace")
                return ended(Outcome.REFUSED if status < 500 or status == 503 else Outcome.ERROR, said)
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now_s = time.monotonic()
                stall_s, last_s = max(stall_s, now_s - last_s), now_s
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error") or error
                texts += [choice.get("text") or "" for choice in event.get("choices", ())]
    except (httpx.TransportError, TimeoutError) as broken:
        return ended(Outcome.LOST, repr(broken))
    if error is not None:
        return ended(Outcome.ERROR, json.dumps(error))
    return ended(Outcome.DONE if done else Outcome.LOST, "".join(texts))


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], **headers: str) -> Ended:
    """Ask for an answer in one piece."""
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(ANSWERED_WITHIN_S):
            answer = await client.post(path, json=body, headers=headers)
    except (httpx.TransportError, TimeoutError) as broken:
        took_s = time.monotonic() - began_s
        return Ended(Outcome.LOST, None, repr(broken), took_s, took_s)
    took_s = time.monotonic() - began_s
    status = answer.status_code
    refused = 400 <= status < 500 or status == 503
    outcome = Outcome.REFUSED if refused else Outcome.ERROR if status >= 500 else Outcome.DONE
    return Ended(outcome, status, answer.text, took_s, took_s, answer.headers.get("retry-after"))


async def background(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Ended:
    """Ask for a response in the background and look after it until it has ended."""
    accepted = await ask(client, "/v1/responses", {**body, "background": True})
    return await end_of(client, accepted) if accepted.outcome is Outcome.DONE else accepted


async def in_the_background(client: httpx.AsyncClient, body: dict[str, Any]) -> Ended:
    """Its end; refused by a store that is slow for a moment, it is asked for again."""
    ended = await background(client, body)
    while ended.outcome is Outcome.REFUSED and ended.retry_after is not None:
        await asyncio.sleep(float(ended.retry_after))
        ended = await background(client, body)
    return ended


async def end_of(client: httpx.AsyncClient, accepted: Ended) -> Ended:
    """Look after a response that was accepted until it has ended; looks that fail are repeated."""
    began_s = time.monotonic()
    response = json.loads(accepted.text)
    while (took_s := time.monotonic() - began_s) < ANSWERED_WITHIN_S:
        look = await look_at(client, f"/v1/responses/{response['id']}")
        if look is not None and look["status"] not in ("queued", "in_progress"):
            outcome = Outcome.ERROR if look["status"] == "failed" else Outcome.DONE
            return Ended(outcome, 200, json.dumps(look), accepted.latency_s + took_s, accepted.latency_s + took_s)
        await asyncio.sleep(0.1)
    return Ended(Outcome.LOST, accepted.status, accepted.text, accepted.latency_s + took_s, took_s)


async def look_at(client: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """What is there; None if it cannot be read now."""
    try:
        answer = await client.get(path)
    except httpx.TransportError:
        return None
    return dict(answer.json()) if answer.status_code == 200 else None


def lost(ended: Iterable[Ended]) -> int:
    """How many were accepted and have no end."""
    return sum(one.outcome is Outcome.LOST for one in ended)
