"""A predictor, and what it learns shared with the others' through the store."""

import asyncio
import logging
from collections.abc import Sequence

from cluster.learnt_store import LearntStore
from predictor_service.context import TurnContext
from predictor_service.observation import Observation
from predictor_service.predictor import Forecasted, Predictor, readable

logger = logging.getLogger(__name__)


class SharedPredictor:
    """One writer's predictor.

    Args:
        predictor: forecasts and learns.
        store: where what is learnt is shared.
        period_s: between two exchanges.
    """

    def __init__(self, predictor: Predictor, store: LearntStore, period_s: float) -> None:
        self.predictor = predictor
        self.unreadable = 0
        """Parts of others that could not be read."""
        self._store = store
        self._period_s = period_s
        self._learnt = 0
        self._written: tuple[int, bytes] | None = None
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
        readable_parts = {writer: part for writer, part in parts.items() if self._readable(writer, part)}
        if readable_parts != self._taken:
            self.predictor.replace_others(readable_parts.values())
            self._taken = readable_parts
        return True

    async def exchange_for_ever(self) -> None:
        """Until it is cancelled; an exchange that fails is only late."""
        while True:
            await self.exchange()
            await asyncio.sleep(self._period_s)

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
