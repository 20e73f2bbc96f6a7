"""SLO verdicts of programs whose turns came through several ingresses. Redis has the sums, and one ingress judges them.

There is one small hash for each program. The methods do not raise: without Redis they return None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from cluster.core.clock import Clock
from cluster.core.slo import Tally
from cluster.store.client import RedisStore, StoreUnavailable, lua, quoted

MAX_PIPELINED = 256
"""Maximum number of scripts that are sent together."""

_US = 1e6

_SCRIPT = lua("cluster.store", "slo_sums.lua")


@dataclass(frozen=True, slots=True)
class Part:
    """The turns of a program that one ingress has seen since its last report."""

    key: str
    tally: Tally
    age_s: float
    """Seconds since the program arrived at this ingress."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request of this ingress to judge a program."""

    key: str
    idle_s: float
    """The program is judged only if it has been idle at all ingresses for this long (seconds); 0: it has ended."""
    remember_s: float
    """Seconds for which the program may have further turns, which are not judged again; 0: it has no further turns."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The sum of the parts of all ingresses."""

    tally: Tally
    wall_s: float
    """Seconds from the program's arrival until its last turn was reported."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store has no part of the program, since it has lost its data."""


_Answer = TypeVar("_Answer")


class SloSumStore(RedisStore):
    """One ingress's access to the sums.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        timeout_s: timeout of each call in seconds.
        expiry_s: seconds without a report after which a program's sums are deleted.
        clock: measures how long the store was unavailable.

    Raises:
        ConfigError: the URL is invalid.
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
        """Add parts. Return for each whether its program is new to the store; None: some parts may not have been
        added.
        """
        calls = [(part.key, [self._expiry_ms, _ms(part.age_s), *_numbers(part.tally)]) for part in parts]
        answers = await self._call("add", calls, int)
        return None if answers is None else [bool(answer) for answer in answers]

    async def judge(self, questions: Sequence[Question]) -> "list[Whole | Unknown | None] | None":
        """Return for each program its sum if this ingress is to judge it; None as the result: the store did not answer.

        The entry of a program is None if it is not to be judged now, or not by this ingress.
        """
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
