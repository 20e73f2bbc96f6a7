"""The recorded tokens of programs in Redis: of each turn, what began it, and its exact tokens once it has ended.

A prompt is stored without what it has in common with the context after the turn that ended before it, so that a
program of many turns takes memory in proportion to its last context. Only Redis's clock decides what has expired.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import msgspec

from cluster.core.clock import Clock
from cluster.core.turn_tokens import AnswerTokens, TurnTokens
from cluster.store.client import RedisStore, lua, milliseconds, quoted

MAX_CONNECTIONS = 8
"""Maximum number of connections. Further calls wait for one."""

SPACE = "caesura:v1:{records}:"
"""Prefix of the keys, as in token_records.lua. Its braces put all of them on one node of a Redis cluster."""

_SCRIPT = lua("cluster.store", "token_records.lua")


class TurnHead(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a recorded turn when it begins."""

    request: str
    """The request's id."""
    method: str
    """`chat`, `completions`, `generate`, or `turn` for a turn of a program that the cluster runs."""
    model: str
    parent: str | None
    """The id of the program that started this one."""
    began_s: float
    """Unix time in seconds."""


class _Tail(msgspec.Struct, frozen=True, array_like=True):
    ended_s: float
    answers: tuple[AnswerTokens, ...]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn as it is stored."""

    number: int
    """From 1, in the order in which the program's turns began."""
    head: TurnHead
    ended_s: float | None = None
    """Unix time in seconds. None: it has not ended, or its end could not be stored."""
    tokens: TurnTokens | None = None


@dataclass(frozen=True, slots=True)
class RecordedPage:
    """Recorded turns of a program, in the order of their numbers."""

    turns: tuple[RecordedTurn, ...]
    more: bool
    """Whether there are turns after these."""


class FullMemory(StrEnum):
    """Whose memory for records is full."""

    PROGRAM = "program"
    TENANT = "tenant"
    ALL = "all"


class Deletion(StrEnum):
    """What became of a deletion."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Nothing of the program is recorded."""
    NEWER = "newer"
    """A turn has begun that the caller does not know."""


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """Bounds of the records in bytes. A turn that has begun is stored whole, although it exceeds a bound."""

    program: int
    tenant: int
    all: int


class TokenRecordStore(RedisStore):
    """Access to the recorded tokens of all tenants.

    Every call ends within about ``timeout_s``, and raises `StoreUnavailable` if it failed. It can then be repeated.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: timeout of each call in seconds.
        retention_s: seconds after its last write, after which the record of a program is deleted.
        bounds: the bounds.
        clock: measures how long the store was unavailable.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(self, url: str, *, timeout_s: float, retention_s: float, bounds: RecordBounds, clock: Clock) -> None:
        super().__init__(
            url,
            name="the store of recorded tokens",
            degraded="recorded tokens are out of reach",
            timeout_s=timeout_s,
            clock=clock,
            connections=MAX_CONNECTIONS,
        )
        self._retention_ms = milliseconds(retention_s)
        self._bounds = bounds

    async def begin(self, tenant: str, program: str, head: TurnHead, key: bytes) -> int | FullMemory:
        """Record that a turn begins. Return its number, or whose memory is full.

        ``key``: unique to the turn. A call that is repeated with it returns the same number.
        """
        bounds = (self._bounds.program, self._bounds.tenant, self._bounds.all)
        answer: list[bytes | int] = await self._call(
            "begin", [_name(tenant, program), msgspec.msgpack.encode(head), *bounds, key], list[bytes | int]
        )
        match answer:
            case [b"ok", int() as number]:
                return number
            case [bytes() as whose]:
                return FullMemory(whose.decode())
        raise AssertionError("the script has no other answer")

    async def finish(self, tenant: str, program: str, number: int, ended_s: float, tokens: TurnTokens) -> bool:
        """Store the tokens of a turn. Return False if its record was deleted or has expired."""
        tail = msgspec.msgpack.encode(_Tail(ended_s, tokens.answers))
        output = tokens.answers[0].token_ids
        arguments = [_name(tenant, program), number, tail, tokens.prompt, output]
        return bool(await self._call("finish", arguments, int))

    async def drop(self, tenant: str, program: str, number: int, key: bytes) -> None:
        """Remove a turn that has failed, and forget its program if it has no other turn.

        ``key``: the key with which the turn began. If the number is another turn's by now, nothing is removed.
        """
        await self._call("drop", [_name(tenant, program), number, key], int)

    async def page(self, tenant: str, program: str, after: int, limit: int) -> RecordedPage | None:
        """Return recorded turns of a program; None: there are none at all.

        Args:
            tenant: the program's tenant.
            program: the program.
            after: number of the last turn of the page before; 0: the first page.
            limit: the largest number of turns.
        """
        answer: list[Any] = await self._call("load", [_name(tenant, program)], list[Any])
        return await asyncio.to_thread(_page, answer[1:], after, limit)

    async def list(self, tenant: str, limit: int, after: str = "") -> list[tuple[str, int]]:
        """Return programs with recorded turns, each with its bytes, in a fixed order.

        Args:
            tenant: the tenant's name.
            limit: the largest number of programs.
            after: the last program of the page before; empty: the list begins.
        """
        begin = _name(tenant, after) if after else ""
        found: list[Any] = await self._call("list", [quoted(tenant), limit, begin], list[Any])
        names = (unquote(name.decode().partition("/")[2], errors="surrogatepass") for name in found[::2])
        return list(zip(names, found[1::2], strict=True))

    async def delete(self, tenant: str, program: str, last_turn: int = 0) -> Deletion:
        """Delete the record of a program.

        Args:
            tenant: the program's tenant.
            program: the program.
            last_turn: the number of its last turn. If another one has begun, nothing is deleted. 0: it is deleted
                whatever it has.
        """
        answer: bytes = await self._call("delete", [_name(tenant, program), last_turn], bytes)
        return Deletion(answer.decode())

    async def sweep(self) -> int:
        """Delete records that have expired, some at a time. Return the bytes of those that are left."""
        left: int = await self._call("sweep", [], int)
        return left

    async def _call(self, operation: str, arguments: Sequence[Any], kind: Any) -> Any:
        return await self.run(_SCRIPT, [SPACE + "written"], [operation, self._retention_ms, *arguments], kind)


def _name(tenant: str, program: str) -> str:
    return f"{quoted(tenant)}/{quoted(program)}"


class _Part:
    """The parts of a turn that has ended, as the script returns them."""

    def __init__(self, tail: bytes, base: bytes, shared: bytes, rest: bytes) -> None:
        self.tail, self.base, self.shared, self.rest = tail, int(base), int(shared), rest
        self.prompt_bytes = self.shared + len(rest)

    @cached_property
    def end(self) -> _Tail:
        return msgspec.msgpack.decode(self.tail, type=_Tail)


def _page(answer: Sequence[Any], after: int, limit: int) -> RecordedPage | None:
    """Return the page of an answer, which has the parts of each turn, or None as the head of a turn that has failed."""
    found = {number: part for number, part in enumerate(answer, 1) if part[0] is not None}
    if not found:
        return None
    parts = {number: _Part(*part[1:]) for number, part in found.items() if part[1] is not None}
    rest = [number for number in found if number > after]
    turns = []
    for number in rest[:limit]:
        head = msgspec.msgpack.decode(found[number][0], type=TurnHead)
        if (part := parts.get(number)) is None:
            turns.append(RecordedTurn(number, head))
        else:
            tokens = TurnTokens(_prompt(number, parts), part.end.answers)
            turns.append(RecordedTurn(number, head, part.end.ended_s, tokens))
    return RecordedPage(tuple(turns), more=len(rest) > limit)


def _prompt(number: int, parts: Mapping[int, _Part]) -> bytes:
    """Return the whole prompt of a turn.

    It is collected from its end: of each turn of the chain of bases, what the turn after it shares with its context.
    """
    part = parts[number]
    pieces, left = [part.rest], part.shared
    while left:
        part = parts[part.base]
        if left > part.prompt_bytes:
            pieces.append(part.end.answers[0].token_ids[: left - part.prompt_bytes])
            left = part.prompt_bytes
        if left > part.shared:
            pieces.append(part.rest[: left - part.shared])
            left = part.shared
    return b"".join(reversed(pieces))
