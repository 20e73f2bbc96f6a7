"""The routes of a server that a benchmark needs beside the turns: policy, reset, histories of programs, memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp

from cluster.core.clock import Clock
from cluster.core.errors import ConfigError
from cluster.core.slo import ProgramRecord
from cluster.offline.bench.history import MemorySample, MemoryUse, ProgramHistory

ADMIN_TIMEOUT_S = 60.0
"""Seconds within which a policy switch or a reset reaches every replica."""
RESET_WITHIN_S = 30.0
"""Seconds within which the last turns end, so that the caches can be emptied."""
RESET_AGAIN_S = 0.2
"""Seconds between two tries."""
HISTORY_TIMEOUT_S = 10.0
HISTORIES_AT_ONCE = 16


class ServerBusy(ConfigError):
    """The server cannot do it while turns run."""


class Server:
    """A client for the server at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def first_model(self) -> str:
        """Return the id of the first model that the server lists.

        Raises:
            ConfigError: the server cannot be reached, or lists no model.
        """
        listed = await self._call("GET", "/v1/models", "--url")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--url: {self._url}/v1/models lists no model; name one with --model") from error

    async def policy(self) -> Mapping[str, Any]:
        """Return the server's policy, for `switch_policy`.

        Raises:
            ConfigError: the server does not answer, or has no replica.
        """
        answer = await self._call("GET", "/admin/policy", "--policies")
        try:
            return {key: value for key, value in answer["replicas"][0].items() if key != "replica"}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"--policies: GET {self._url}/admin/policy names no replica's policy") from error

    async def switch_policy(self, policy: Mapping[str, Any]) -> None:
        """Switch the server to a policy: its ``name``, and more of the keys of the configuration's ``policy``.

        Raises:
            ConfigError: the server does not do it.
        """
        await self._call("PUT", "/admin/policy", "--policies", policy)

    async def reset(self) -> None:
        """Let the server end all holds and empty its prefix caches, once its last turns have ended.

        Raises:
            ConfigError: the server does not do it within `RESET_WITHIN_S`.
        """
        for _ in range(round(RESET_WITHIN_S / RESET_AGAIN_S)):
            with suppress(ServerBusy):
                await self._call("POST", "/admin/reset", "--policies")
                return
            await asyncio.sleep(RESET_AGAIN_S)
        await self._call("POST", "/admin/reset", "--policies")

    async def histories(self, programs: Sequence[ProgramRecord]) -> dict[str, ProgramHistory]:
        """Return the history of each program by its id. Programs that the server does not know are omitted."""
        gate = asyncio.Semaphore(HISTORIES_AT_ONCE)

        async def history(program: ProgramRecord) -> Any:
            async with gate:
                return await self._history(program.program_id)

        answers = await asyncio.gather(*(history(program) for program in programs))
        pairs = zip(programs, answers, strict=True)
        return {program.program_id: ProgramHistory.of(answer) for program, answer in pairs if answer is not None}

    async def statistics(self) -> list[Mapping[str, Any]]:
        """Return the current statistics of each replica; empty if the server does not report them."""
        answer = await self._get("/admin/statistics", {})
        replicas = answer.get("replicas") if isinstance(answer, dict) else None
        return replicas if isinstance(replicas, list) else []

    async def versions(self) -> dict[str, str]:
        """Return the versions of the server's software; empty if it does not report them."""
        answer = await self._get("/version", {})
        return {str(name): str(value) for name, value in answer.items()} if isinstance(answer, dict) else {}

    async def _history(self, program_id: str) -> Any:
        return await self._get(f"/v1/programs/{quote(program_id, safe='')}", {"x-session-id": program_id})

    async def _get(self, path: str, headers: Mapping[str, str]) -> Any:
        """Return the decoded answer; None if there is none."""
        timeout = aiohttp.ClientTimeout(total=HISTORY_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, headers=headers, timeout=timeout) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _call(self, method: str, path: str, flag: str, body: object = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=ADMIN_TIMEOUT_S)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=timeout) as response:
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:500]
                    kind = ServerBusy if response.status == HTTPStatus.CONFLICT else ConfigError
                    raise kind(f"{flag}: {method} {self._url}{path} answered {response.status}: {text}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConfigError(f"{flag}: {method} {self._url}{path}: {error or type(error).__name__}") from error


def with_waits(program: ProgramRecord, history: ProgramHistory | None) -> ProgramRecord:
    """Return the record with each turn's queueing time from the server; unchanged if the server does not know it."""
    if history is None:
        return program
    waits_s = history.waits_s + (None,) * len(program.turns)
    turns = (
        t if wait_s is None else replace(t, queue_s=wait_s) for t, wait_s in zip(program.turns, waits_s, strict=False)
    )
    return replace(program, turns=tuple(turns))


PERIOD_S = 0.25
"""Seconds between two memory samples. Each sample takes every replica's scheduler about 1 ms between two steps."""


@asynccontextmanager
async def watched(server: Server, clock: Clock, *, on: bool) -> AsyncIterator[list[MemorySample]]:
    """Collect memory samples until the block ends. ``on``: False collects none."""
    seen: list[MemorySample] = []
    if not on:
        yield seen
        return
    task = asyncio.create_task(_look_for_ever(server, clock, seen))
    try:
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _look_for_ever(server: Server, clock: Clock, seen: list[MemorySample]) -> None:
    while True:
        at_s = clock.now_s()
        replicas = await server.statistics()
        if replicas:
            seen.append((at_s, sum(map(MemoryUse.of, replicas), MemoryUse(0, 0, 0, 0))))
        await asyncio.sleep(PERIOD_S)
