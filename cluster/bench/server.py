"""The routes of a server that a benchmark needs beside the turns: models, policy switch, reset, program stories."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp

from cluster.bench.story import Story
from cluster.errors import ConfigError
from cluster.goodput import ProgramRecord

ADMIN_TIMEOUT_S = 60.0
"""A policy switch or a reset reaches every replica within this time."""
STORY_TIMEOUT_S = 10.0
STORIES_AT_ONCE = 16


class Server:
    """The server at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            ConfigError: the server is not there, or lists none.
        """
        listed = await self._call("GET", "/v1/models", "--url")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--url: {self._url}/v1/models lists no model; name one with --model") from error

    async def switch_policy(self, name: str) -> None:
        """Schedule by policy ``name`` from now on.

        Raises:
            ConfigError: the server cannot.
        """
        await self._call("PUT", "/admin/policy", "--policies", {"name": name})

    async def reset(self) -> None:
        """Forget every program and every cached prefix.

        Raises:
            ConfigError: the server cannot.
        """
        await self._call("POST", "/admin/reset", "--policies")

    async def stories(self, programs: Sequence[ProgramRecord]) -> dict[str, Story]:
        """What the server knows of each program, by its id; programs of which it knows nothing are left out."""
        gate = asyncio.Semaphore(STORIES_AT_ONCE)

        async def told(program: ProgramRecord) -> Any:
            async with gate:
                return await self._story(program.program_id)

        answers = await asyncio.gather(*(told(program) for program in programs))
        pairs = zip(programs, answers, strict=True)
        return {program.program_id: Story.of(answer) for program, answer in pairs if answer is not None}

    async def statistics(self) -> list[Mapping[str, Any]]:
        """The numbers of each replica, now; empty where the server does not tell them."""
        told = await self._told("/admin/statistics", {})
        replicas = told.get("replicas") if isinstance(told, dict) else None
        return replicas if isinstance(replicas, list) else []

    async def versions(self) -> dict[str, str]:
        """Of what serves; empty where it does not say so."""
        told = await self._told("/version", {})
        return {str(name): str(value) for name, value in told.items()} if isinstance(told, dict) else {}

    async def _story(self, program_id: str) -> Any:
        return await self._told(f"/v1/programs/{quote(program_id, safe='')}", {"x-session-id": program_id})

    async def _told(self, path: str, headers: Mapping[str, str]) -> Any:
        """The decoded answer; None where there is none."""
        timeout = aiohttp.ClientTimeout(total=STORY_TIMEOUT_S)
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
                    raise ConfigError(f"{flag}: {method} {self._url}{path} answered {response.status}: {text}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConfigError(f"{flag}: {method} {self._url}{path}: {error or type(error).__name__}") from error


def with_waits(program: ProgramRecord, story: Story | None) -> ProgramRecord:
    """The record, with what the server knows of each turn's waiting; unchanged where it knows nothing."""
    if story is None:
        return program
    waits_s = story.waits_s + (None,) * len(program.turns)
    turns = (
        t if wait_s is None else replace(t, queue_s=wait_s) for t, wait_s in zip(program.turns, waits_s, strict=False)
    )
    return replace(program, turns=tuple(turns))
