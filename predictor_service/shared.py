"""A predictor that shares its statistics with the predictors of other processes through the store."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.program import Prediction
from cluster.store.predictor_state import PredictorStateStore
from predictor_service.bundle import bundle_id, load_model
from predictor_service.model import Observation, TurnContext
from predictor_service.predictor import Predictor, readable
from predictor_service.statistics_model import StatisticsModel

logger = logging.getLogger(__name__)

LEAST_REST = 50
"""After an exchange, the next one begins no earlier than this many times its duration later."""
SPACE = "//predictor"
"""Name under which all statistics are shared. It contains no model id, because a program's source names its model."""


class SharedPredictor:
    """The predictor of one writer.

    Args:
        predictor: predicts and learns.
        store: shares the statistics of all writers.
        period_s: seconds between two exchanges; the pause is longer after a slow exchange.
        clock: measures the exchanges.
    """

    def __init__(self, predictor: Predictor, store: PredictorStateStore, period_s: float, clock: Clock) -> None:
        self.predictor = predictor
        self.unreadable = 0
        """Number of other writers' parts that could not be read."""
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
        """Write the own statistics and read those of the others. Return False if the store did not answer."""
        parts = await self._store.exchange(await self._own())
        if parts is None:
            return False
        if parts != self._seen:
            # A thread reads the others' statistics, which takes up to 0.5 s. The loop, which predicts and learns with
            # them, replaces them at once.
            taken, use = await asyncio.to_thread(self._read, parts)
            use()
            self._taken, self._seen = taken, dict(parts)
        return True

    def _read(self, parts: Mapping[str, bytes]) -> tuple[dict[str, bytes], Callable[[], None]]:
        taken = {writer: part for writer, part in parts.items() if self._readable(writer, part)}
        return taken, self.predictor.read_others(taken.values())

    async def exchange_for_ever(self) -> None:
        """Exchange periodically until cancelled. A failed exchange is repeated at the time of the next one."""
        while True:
            began_s = self._clock.now_s()
            await self.exchange()
            took_s = self._clock.now_s() - began_s
            await asyncio.sleep(max(self._period_s, LEAST_REST * took_s))

    def view(self) -> dict[str, Any]:
        """Return the state for operators."""
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
        """Write the latest statistics, and close the connection."""
        await self.exchange()
        await self._store.close()

    async def _own(self) -> bytes | None:
        learnt = self._learnt
        if not learnt:
            return None
        if self._written is None or self._written[0] != learnt:
            self._written = (learnt, await self._encoded())
        return self._written[1]

    async def _encoded(self) -> bytes:
        """Encode the own statistics, which takes up to 0.5 s, in steps between which the event loop does other work."""
        steps = self.predictor.encoding()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return bytes(end.value)
            await asyncio.sleep(0)

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
    """A trained model and the statistics of its bundle. By default there are none."""

    model: Any = None
    """A LengthModel, which is also a DurationModel if it has `durations`. None: only statistics predict."""
    statistics: bytes | None = None
    """`StatisticsModel.to_bytes`."""
    bundle: str = ""
    """See `bundle_id`. It says whose drift is shared. Empty: there is no bundle."""

    @classmethod
    def of(cls, bundle: str | None) -> "Trained":
        """Read a bundle. None gives neither a model nor statistics.

        Raises:
            ConfigError: the bundle cannot be used; the message names the file.
        """
        if bundle is None:
            return cls()
        name = bundle_id(Path(bundle))
        model = load_model(Path(bundle)).model
        if isinstance(model, StatisticsModel):
            return cls(None, model.to_bytes(), name)
        own = getattr(model, "statistics", None)
        return cls(model, own.to_bytes() if isinstance(own, StatisticsModel) else None, name)

    def predictor(self) -> Predictor:
        """Make a predictor that begins with the model and the statistics, and continues to learn."""
        statistics = StatisticsModel()
        model = self.model
        if hasattr(model, "with_prior"):  # the model corrects the statistics that learn while they serve
            model = model.with_prior(statistics)
        durations = model if hasattr(model, "durations") else None
        return Predictor(statistics, model, durations, self.statistics, self.bundle)


def shared_predictor(config: CaesuraConfig, clock: Clock, writer: str, trained: Trained) -> SharedPredictor:
    """Make a predictor that is shared under the name of ``writer``.

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
