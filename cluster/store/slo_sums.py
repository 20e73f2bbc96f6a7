"""SLO verdicts of programs whose turns came through several ingresses: Redis has the sums, and one ingress judges them.

There is one small hash a program. Nothing here raises: without Redis the answer is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from cluster.core.clock import Clock
from cluster.core.slo import Tally
from cluster.store.client import RedisStore, StoreUnavailable, lua, quoted

MAX_PIPELINED = 256
"""Scripts that are sent together."""

_US = 1e6

_SCRIPT = lua("cluster.store", "slo_sums.lua")


@dataclass(frozen=True, slots=True)
class Part:
    """What one ingress saw of a program since its last report."""

    key: str
    tally: Tally
    age_s: float
    """How long ago it arrived at this ingress."""


@dataclass(frozen=True, slots=True)
class Question:
    """Whether this ingress may judge the program."""

    key: str
    idle_s: float
    """Only if it has been idle for so long everywhere; 0: it has ended."""
    remember_s: float
    """It may have more turns, which are not to be judged again, for so long; 0: it is over."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The sum of all ingresses' parts."""

    tally: Tally
    wall_s: float
    """From its arrival until its last turn was reported."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store has nothing of the program: it has lost it."""


_Answer = TypeVar("_Answer")


class SloSumStore(RedisStore):
    """One ingress's access to the sums.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: bounds every call.
        expiry_s: a program without a report for so long is forgotten.
        clock: measures how long the store was gone.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, *, timeout_s: float, expiry_s: float, clock: Clock) -> None:
        super().__init__(
            url,
            name="the store of verdicts",
            degraded="programs are judged by the turns of one ingress",
            timeout_s=timeout_s,
            clock=clock,
        )
        self._expiry_ms = _ms(expiry_s)

    async def add(self, parts: Sequence[Part]) -> list[bool] | None:
        """Add parts; for each whether its program was not known before. None: some may not have been added."""
        calls = [(part.key, [self._expiry_ms, _ms(part.age_s), *_numbers(part.tally)]) for part in parts]
        answers = await self._call("add", calls, int)
        return None if answers is None else [bool(answer) for answer in answers]

    async def judge(self, questions: Sequence[Question]) -> "list[Whole | Unknown | None] | None":
        """For each program its sum, if this ingress is the one to judge it; None: the store did not answer."""
        calls = [(one.key, [_ms(one.idle_s), _ms(one.remember_s)]) for one in questions]
        answers = await self._call("judge", calls, cast("type[tuple[int, list[int]]]", tuple[int, list[int]]))
        return None if answers is None else [_whole(*answer) for answer in answers]

    async def _call(
        self, operation: str, calls: Sequence[tuple[str, list[int]]], kind: type[_Answer]
    ) -> list[_Answer] | None:
        found: list[_Answer] = []
        try:
            for start in range(0, len(calls), MAX_PIPELINED):
                async with self.request():
                    pipeline = self.redis.pipeline(transaction=False)
                    for key, arguments in calls[start : start + MAX_PIPELINED]:
                        cast(Any, pipeline).eval(_SCRIPT, 1, f"caesura:v1:ledger:{quoted(key)}", operation, *arguments)
                    found += msgspec.convert(await pipeline.execute(), list[kind])  # type: ignore[valid-type]
        except StoreUnavailable:
            return None
        return found


def _whole(verdict: int, sums: list[int]) -> Whole | Unknown | None:
    match verdict:
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


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
