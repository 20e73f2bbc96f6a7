"""Programs whose turns came through several doors, in Redis: the sum of their parts, and that one door judges it.

One small hash a program. Nothing here raises: without Redis the answer is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote

import msgspec

from cluster.clock import Clock
from cluster.goodput import Tally
from cluster.patience import answered_within
from cluster.store import CALL_ERRORS, StoreHealth, connect

MAX_PIPELINED = 256
"""Scripts that are sent together."""

_US = 1e6

# KEYS: the hash. ARGV: expiry in ms, ms since the program arrived at this door, turns, late, failed, unfinished, output
# tokens, time of turns in us. Answers whether this is all that is known of the program.
_ADD = """
local key = KEYS[1]
local kind = redis.call('TYPE', key).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', key) end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local first = redis.call('HSETNX', key, 'arrived', string.format('%.0f', now_ms - tonumber(ARGV[2])))
for i, field in ipairs({'turns', 'late', 'failed', 'unfinished', 'tokens', 'us'}) do
  redis.call('HINCRBY', key, field, ARGV[i + 2])
end
redis.call('HSET', key, 'seen', string.format('%.0f', now_ms))
redis.call('PEXPIRE', key, ARGV[1])
return first
"""

# KEYS: the hash. ARGV: ms for which the program must have been idle (0: it has ended), ms to remember that it is judged
# (0: forget it). Answers 0 nothing to judge, 1 judge it, 2 nothing is known of it; and the sums in the order of _ADD.
_JUDGE = """
local key = KEYS[1]
if redis.call('TYPE', key).ok ~= 'hash' then return {2, {}} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = redis.call('HMGET', key, 'judged', 'seen', 'arrived', 'turns', 'late', 'failed', 'unfinished', 'tokens',
  'us')
local seen = tonumber(fields[2] or 0)
if tonumber(ARGV[1]) > 0 and now_ms - seen < tonumber(ARGV[1]) then return {0, {}} end
if ARGV[2] == '0' then
  redis.call('DEL', key)
else
  redis.call('HSET', key, 'judged', '1')
  redis.call('PEXPIRE', key, ARGV[2])
end
if fields[1] then return {0, {}} end
local sums = {math.max(0, seen - tonumber(fields[3] or seen))}
for i = 4, 9 do sums[#sums + 1] = tonumber(fields[i] or 0) end
return {1, sums}
"""


@dataclass(frozen=True, slots=True)
class Part:
    """What one door saw of a program since it last told."""

    key: str
    tally: Tally
    age_s: float
    """Since it arrived here."""


@dataclass(frozen=True, slots=True)
class Question:
    """May this door judge the program?"""

    key: str
    idle_s: float
    """Only if it has been idle for so long everywhere; 0: it has ended."""
    remember_s: float
    """It may have more turns, which are not to be judged again, for so long; 0: it is over."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The parts of all doors."""

    tally: Tally
    wall_s: float
    """From its arrival until its last turn was told."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store has nothing of the program: it has lost it."""


_Answer = TypeVar("_Answer")


class LedgerStore:
    """One door's way to the sums.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: bounds every call.
        expiry_s: a program of which nobody tells for so long is forgotten.
        clock: tells how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        self._health = StoreHealth("programs are judged by the turns of one door", "the store of verdicts", clock)
        self.failures = self._health.failures
        """Calls that failed, since the start."""
        self._timeout_s = timeout_s
        self._expiry_ms = _ms(expiry_s)
        self._redis = connect(url)

    @property
    def healthy(self) -> bool:
        """Whether the last call went through."""
        return self._health.healthy

    async def add(self, parts: Sequence[Part]) -> list[bool] | None:
        """Add parts; for each whether its program was not known before. None: some may not have been added."""
        calls = [(part.key, [self._expiry_ms, _ms(part.age_s), *_numbers(part.tally)]) for part in parts]
        answers = await self._call(_ADD, calls, int)
        return None if answers is None else [bool(answer) for answer in answers]

    async def judge(self, questions: Sequence[Question]) -> "list[Whole | Unknown | None] | None":
        """For each program its sum, if this door is the one to judge it; None: the store did not answer."""
        calls = [(one.key, [_ms(one.idle_s), _ms(one.remember_s)]) for one in questions]
        answers = await self._call(_JUDGE, calls, cast("type[tuple[int, list[int]]]", tuple[int, list[int]]))
        return None if answers is None else [_whole(*answer) for answer in answers]

    async def close(self) -> None:
        """Close the connections. Sums stay until they expire."""
        await self._redis.aclose()

    async def _call(
        self, script: str, calls: Sequence[tuple[str, list[int]]], kind: type[_Answer]
    ) -> list[_Answer] | None:
        found: list[_Answer] = []
        try:
            for start in range(0, len(calls), MAX_PIPELINED):
                async with answered_within(self._timeout_s):
                    pipeline = self._redis.pipeline(transaction=False)
                    for key, arguments in calls[start : start + MAX_PIPELINED]:
                        cast(Any, pipeline).eval(script, 1, _key(key), *arguments)
                    found += msgspec.convert(await pipeline.execute(), list[kind])  # type: ignore[valid-type]
        except CALL_ERRORS as error:
            self._health.fail(error)
            return None
        self._health.recover()
        return found


def _whole(says: int, sums: list[int]) -> Whole | Unknown | None:
    match says:
        case 1:
            wall_ms, turns, late, failed, unfinished, tokens, us = sums
            return Whole(Tally(turns, late, failed, unfinished, tokens, us / _US), wall_ms / 1000)
        case 2:
            return Unknown()
    return None


def _numbers(tally: Tally) -> list[int]:
    return [
        tally.turns,
        tally.late,
        tally.failed,
        tally.unfinished,
        tally.output_tokens,
        round(tally.e2e_s * _US),
    ]


def _key(key: str) -> str:
    return f"caesura:v1:ledger:{quote(key, safe='', errors='surrogatepass')}"


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
