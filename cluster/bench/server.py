"""The routes of a server that a benchmark needs beside the turns: models, policy switch, reset, program stories."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp

from cluster.errors import ConfigError
from cluster.goodput import ProgramRecord, TurnRecord

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

    async def with_stories(self, programs: Sequence[ProgramRecord]) -> list[ProgramRecord]:
        """The records, with what the server knows of each resumed turn's waiting; unchanged where it knows nothing."""
        gate = asyncio.Semaphore(STORIES_AT_ONCE)

        async def told(program: ProgramRecord) -> ProgramRecord:
            async with gate:
                return _merged(program, await self._story(program.program_id))

        return list(await asyncio.gather(*(told(program) for program in programs)))

    async def _story(self, program_id: str) -> Any:
        url = f"{self._url}/v1/programs/{quote(program_id, safe='')}"
        timeout = aiohttp.ClientTimeout(total=STORY_TIMEOUT_S)
        try:
            async with self._session.get(url, headers={"x-session-id": program_id}, timeout=timeout) as response:
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


def _merged(program: ProgramRecord, story: Any) -> ProgramRecord:
    turns = story.get("turns") if isinstance(story, dict) else None
    if not isinstance(turns, list):
        return program
    waits = [turn.get("queue_s") if isinstance(turn, dict) else None for turn in turns]
    merged = tuple(_waited(turn, waits[i] if i < len(waits) else None) for i, turn in enumerate(program.turns))
    return replace(program, turns=merged)


def _waited(turn: TurnRecord, queue_s: Any) -> TurnRecord:
    return replace(turn, queue_s=float(queue_s)) if isinstance(queue_s, int | float) else turn
