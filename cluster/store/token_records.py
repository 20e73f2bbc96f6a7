"""The recorded tokens of programs in Redis: of each turn, what began it, and its exact tokens once it has ended.

A prompt is stored without what it has in common with the context after the turn that ended before it, so that a
program of many turns takes memory in proportion to its last context. Only Redis's clock decides what has expired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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

    async def load(self, tenant: str, program: str) -> list[RecordedTurn]:
        """Return the recorded turns of a program. The list is empty if there are none."""
        answer: list[Any] = await self._call("load", [_name(tenant, program)], list[Any])
        parts = {number: part for number, part in enumerate(answer[1:], 1) if part[0] is not None}
        prompts = _prompts({number: _Part(*part[1:]) for number, part in parts.items() if part[1] is not None})
        turns = []
        for number, (packed, tail, *_) in parts.items():
            head = msgspec.msgpack.decode(packed, type=TurnHead)
            if tail is None:
                turns.append(RecordedTurn(number, head))
            else:
                end = msgspec.msgpack.decode(tail, type=_Tail)
                turns.append(RecordedTurn(number, head, end.ended_s, TurnTokens(prompts[number], end.answers)))
        return turns

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


def _prompts(parts: Mapping[int, _Part]) -> dict[int, bytes]:
    """Return the whole prompts. A turn's base ended before it, but may have begun after it."""
    prompts: dict[int, bytes] = {}
    for number in parts:
        chain = [number]
        while (base := parts[chain[-1]].base) and base not in prompts:
            chain.append(base)
        for turn in reversed(chain):
            part = parts[turn]
            context = b""
            if part.base:
                output = msgspec.msgpack.decode(parts[part.base].tail, type=_Tail).answers[0].token_ids
                context = prompts[part.base] + output
            prompts[turn] = context[: part.shared] + part.rest
    return prompts
