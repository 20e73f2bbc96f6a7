"""A predictor, and what it learns shared with the others' through the store."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.clock import Clock
from cluster.learnt_store import LearntStore
from cluster.program import Forecasted
from predictor_service.context import TurnContext
from predictor_service.observation import Observation
from predictor_service.predictor import Predictor, readable

logger = logging.getLogger(__name__)


MOST_SHARE = 50
"""An exchange is followed by so many times as long without one."""


class SharedPredictor:
    """One writer's predictor.

    Args:
        predictor: forecasts and learns.
        store: where what is learnt is shared.
        period_s: between two exchanges; longer where they take long.
        clock: measures them.
    """

    def __init__(self, predictor: Predictor, store: LearntStore, period_s: float, clock: Clock) -> None:
        self.predictor = predictor
        self.unreadable = 0
        """Parts of others that could not be read."""
        self._store = store
        self._period_s = period_s
        self._clock = clock
        self._learnt = 0
        self._written: tuple[int, bytes] | None = None
        self._seen: dict[str, bytes] = {}
        self._taken: dict[str, bytes] = {}
        self._refused: dict[str, bytes] = {}

    def forecast(self, turns: Sequence[TurnContext]) -> list[Forecasted]:
        """See `Predictor.forecast`."""
        return self.predictor.forecast(turns)

    def learn(self, observations: Sequence[Observation]) -> None:
        """See `Predictor.learn`."""
        self._learnt += len(observations)
        self.predictor.learn(observations)

    async def exchange(self) -> bool:
        """Write what was learnt here and take what the others learnt; False: it came to nothing."""
        parts = await self._store.exchange(self._own())
        if parts is None:
            return False
        if parts != self._seen:
            # Beside the event loop: others' statistics take up to half a second to read. They are swapped in at once.
            self._taken = await asyncio.to_thread(self._take, parts)
            self._seen = dict(parts)
        return True

    def _take(self, parts: Mapping[str, bytes]) -> dict[str, bytes]:
        taken = {writer: part for writer, part in parts.items() if self._readable(writer, part)}
        self.predictor.replace_others(taken.values())
        return taken

    async def exchange_for_ever(self) -> None:
        """Until it is cancelled; an exchange that fails is only late."""
        while True:
            began_s = self._clock.now_s()
            await self.exchange()
            took_s = self._clock.now_s() - began_s
            await asyncio.sleep(max(self._period_s, MOST_SHARE * took_s))

    def view(self) -> dict[str, Any]:
        """For operators."""
        return {
            "learnt": self._learnt,
            "writers": len(self._taken),
            "unreadable": self.unreadable,
            "nonsense": self.predictor.nonsense,
            "broken_answers": self.predictor.broken,
            "length_drift": self.predictor.length_drift.ratios(),
            "duration_drift": self.predictor.duration_drift.ratios(),
        }

    async def aclose(self) -> None:
        """Write what was learnt last, and let go of the store."""
        await self.exchange()
        await self._store.close()

    def _own(self) -> bytes | None:
        if not self._learnt:
            return None
        if self._written is None or self._written[0] != self._learnt:
            self._written = (self._learnt, self.predictor.to_bytes())
        return self._written[1]

    def _readable(self, writer: str, part: bytes) -> bool:
        if self._taken.get(writer) == part:
            return True
        if self._refused.get(writer) == part:
            return False
        if readable(part):
            return True
        self.unreadable += 1
        self._refused = {writer: part}
        logger.warning("what predictor %r has learnt cannot be read", writer)
        return False
