"""A predictor that shares what it learns with the other processes' predictors through the store."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.program import Prediction
from cluster.store.predictor_state import PredictorStateStore
from predictor_service.bundle import load_model
from predictor_service.model import Observation, TurnContext
from predictor_service.predictor import Predictor, readable
from predictor_service.statistics_model import StatisticsModel

logger = logging.getLogger(__name__)

LEAST_REST = 50
"""An exchange is followed by so many times its own duration without one."""
SPACE = "//predictor"
"""The name under which everything is shared. It has no model's id: a program's source names its model."""


class SharedPredictor:
    """One writer's predictor.

    Args:
        predictor: predicts and learns.
        store: where the writers' statistics are shared.
        period_s: between two exchanges; longer where they take long.
        clock: measures the exchanges.
    """

    def __init__(self, predictor: Predictor, store: PredictorStateStore, period_s: float, clock: Clock) -> None:
        self.predictor = predictor
        self.unreadable = 0
        """Other writers' parts that could not be read."""
        self._store = store
        self._period_s = period_s
        self._clock = clock
        self._learnt = 0
        self._written: tuple[int, bytes] | None = None
        self._seen: dict[str, bytes] = {}
        self._taken: dict[str, bytes] = {}
        self._refused: dict[str, bytes] = {}

    def predict(self, turns: Sequence[TurnContext]) -> list[Prediction]:
        """See `Predictor.predict`."""
        return self.predictor.predict(turns)

    def learn(self, observations: Sequence[Observation]) -> None:
        """See `Predictor.learn`."""
        self._learnt += len(observations)
        self.predictor.learn(observations)

    async def exchange(self) -> bool:
        """Write what was learnt here and read what the others learnt; False: the store did not answer."""
        parts = await self._store.exchange(self._own())
        if parts is None:
            return False
        if parts != self._seen:
            # In a thread, because others' statistics take up to half a second to read. They are swapped in at once.
            self._taken = await asyncio.to_thread(self._take, parts)
            self._seen = dict(parts)
        return True

    def _take(self, parts: Mapping[str, bytes]) -> dict[str, bytes]:
        taken = {writer: part for writer, part in parts.items() if self._readable(writer, part)}
        self.predictor.replace_others(taken.values())
        return taken

    async def exchange_for_ever(self) -> None:
        """Exchange until it is cancelled. A failed exchange is tried again at the next one's time."""
        while True:
            began_s = self._clock.now_s()
            await self.exchange()
            took_s = self._clock.now_s() - began_s
            await asyncio.sleep(max(self._period_s, LEAST_REST * took_s))

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
        """Write what was learnt last, and close the connection."""
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
        logger.warning("the statistics of predictor %r cannot be read", writer)
        return False


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model, and the statistics of its bundle; by default neither."""

    model: Any = None
    """A LengthModel, and a DurationModel if it has `durations`; None: only statistics predict."""
    statistics: bytes | None = None
    """`StatisticsModel.to_bytes`."""

    @classmethod
    def of(cls, bundle: str | None) -> "Trained":
        """Read a bundle; None: neither.

        Raises:
            ConfigError: it cannot be used; names the file.
        """
        if bundle is None:
            return cls()
        model = load_model(Path(bundle)).model
        if isinstance(model, StatisticsModel):
            return cls(None, model.to_bytes())
        own = getattr(model, "statistics", None)
        return cls(model, own.to_bytes() if isinstance(own, StatisticsModel) else None)

    def predictor(self) -> Predictor:
        """A predictor that goes on learning from there."""
        statistics = StatisticsModel()
        model = self.model
        if hasattr(model, "with_prior"):  # it corrects the statistics that learn while they serve
            model = model.with_prior(statistics)
        durations = model if hasattr(model, "durations") else None
        return Predictor(statistics, model, durations, self.statistics)


def shared_predictor(config: CaesuraConfig, clock: Clock, writer: str, trained: Trained) -> SharedPredictor:
    """A predictor that is shared under ``writer``'s name.

    Raises:
        ConfigError: the store's URL cannot be used.
    """
    store = PredictorStateStore(
        config.redis.url,
        space=SPACE,
        writer=writer,
        timeout_s=config.redis.timeout_s,
        expiry_s=config.redis.expiry_s,
        clock=clock,
    )
    return SharedPredictor(trained.predictor(), store, config.predictor.sync_interval_s, clock)
