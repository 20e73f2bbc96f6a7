"""One turn over HTTP: token ids in, token ids out, by OpenAI's streamed completions as vLLM extends them."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from time import time
from typing import Any

import aiohttp

from cluster.auth.keys import client_headers
from cluster.core.clock import Clock
from cluster.core.slo import Outcome, TurnRecord

IDLE_CONNECTION_S = 2.0
"""Seconds after which idle connections are closed. The server (uvicorn: 5 s) closes later, so that no POST is lost."""
OVERLOADED = (429, 503)
ERROR_LENGTH = 300
"""Characters that are kept of an error."""


class TurnError(Exception):
    """The server's answer to a turn is an error or is invalid."""

    def __init__(self, message: str, outcome: Outcome = Outcome.FAILED) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(slots=True)
class Turn:
    """A turn that is due, and the part of its answer that has arrived."""

    program_id: str
    index: int
    intended_start_s: float
    prompt: list[int]
    output_tokens: int
    previous_context_tokens: int
    tool: str | None
    last_tool: str | None
    parent_id: str | None = None
    """The program that started this one."""
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    generated: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    def record(self, outcome: Outcome, error: str | None = None) -> TurnRecord:
        """Make the record of the turn now."""
        return TurnRecord(
            program_id=self.program_id,
            index=self.index,
            intended_start_s=self.intended_start_s,
            outcome=outcome,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.generated),
            previous_context_tokens=self.previous_context_tokens,
            cached_tokens=self.cached_tokens,
            sent_s=self.sent_s,
            error=None if error is None else error[:ERROR_LENGTH],
        )


def open_session() -> aiohttp.ClientSession:
    """Open a session without a connection limit and without a timeout, because an open loop must not wait."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=client_headers())


class TurnClient:
    """Sends turns, and never retries. ``turn_timeout_s`` counts from a turn's intended start."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, clock: Clock, turn_timeout_s: float
    ) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self._clock = clock
        self._turn_timeout_s = turn_timeout_s

    async def run(self, turn: Turn) -> TurnRecord:
        """Send ``turn`` and read its whole answer. Times are on this client's clock. An error becomes the outcome."""
        left_s = turn.intended_start_s + self._turn_timeout_s - self._clock.now_s()
        try:
            async with asyncio.timeout(left_s):
                await self._exchange(turn)
            _check(turn)
        except TimeoutError:
            return turn.record(Outcome.TIMED_OUT, f"no end within {self._turn_timeout_s:g} s")
        except TurnError as error:
            record = turn.record(error.outcome, str(error))
            if error.outcome is not Outcome.REJECTED:
                return record
            return replace(record, rejected_s=self._clock.now_s() - turn.intended_start_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return turn.record(Outcome.FAILED, f"{type(error).__name__}: {error}")
        return turn.record(Outcome.OK)

    async def _exchange(self, turn: Turn) -> None:
        body = json.dumps(_body(turn, self._model), separators=(",", ":")).encode()
        turn.sent_s = self._clock.now_s()
        headers = {
            "content-type": "application/json",
            "x-session-id": turn.program_id,
            # A server that trusts this header measures from the time at which the turn was due, as this client does.
            "x-request-start": f"t={time() - (turn.sent_s - turn.intended_start_s):.6f}",
        }
        if turn.parent_id is not None:
            headers["x-parent-session-id"] = turn.parent_id
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(4 * ERROR_LENGTH)).decode(errors="replace")
                outcome = Outcome.REJECTED if response.status in OVERLOADED else Outcome.FAILED
                raise TurnError(f"HTTP {response.status}: {text}", outcome)
            async for data in _events(response.content):
                if data == b"[DONE]":
                    return
                try:
                    self._take(turn, json.loads(data))
                except (AttributeError, TypeError) as error:
                    raise TurnError(f"not an event of a completion: {data[:ERROR_LENGTH]!r}") from error
        raise TurnError("the stream ended without [DONE]")

    def _take(self, turn: Turn, event: Any) -> None:
        if (error := event.get("error")) is not None:
            raise TurnError(f"error event: {error.get('message') if isinstance(error, dict) else error}")
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if ids:
                turn.last_token_s = self._clock.now_s()
                if turn.first_token_s is None:
                    turn.first_token_s = turn.last_token_s
                turn.generated += ids
            elif choice.get("text"):
                raise TurnError("the server does not send token ids: it must support return_token_ids")
        if usage := event.get("usage"):
            turn.prompt_tokens = usage.get("prompt_tokens")
            turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Lines may be longer than a buffer, as the first repeats the prompt."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _check(turn: Turn) -> None:
    if len(turn.generated) != turn.output_tokens:
        raise TurnError(f"asked for {turn.output_tokens} tokens, got {len(turn.generated)}")
    if turn.prompt_tokens is not None and turn.prompt_tokens != len(turn.prompt):
        raise TurnError(f"sent {len(turn.prompt)} prompt tokens, the server counts {turn.prompt_tokens}")


def _body(turn: Turn, model: str) -> dict[str, Any]:
    """Make the request of a turn.

    It names the tool that the turn calls, because the tokens that the server generates contain no call from which the
    name could be read. It does not say whether the turn is the last, which an agent learns only from the answer.
    """
    identity: dict[str, str | int] = {"job_id": turn.program_id}
    if turn.tool is not None:
        identity["this_func_call"] = turn.tool
    if turn.last_tool is not None:
        identity["last_func_call"] = turn.last_tool
    return {
        "model": model,
        "prompt": turn.prompt,
        "max_tokens": turn.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "vllm_xargs": identity,
    }
