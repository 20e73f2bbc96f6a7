"""An ingress's client of the predictor: it answers within a deadline, and never with an error.

The service is asked if there is one. If its answer is late or broken, the client's own statistics answer; who answered
and why is counted. Observations of turns go to the service in the background. What the service does not take is learnt
here, and reaches it through the store.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextvars import Context
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from cluster.config.schema import CaesuraConfig
from cluster.core.clock import Clock
from cluster.core.program import Prediction
from cluster.core.supervision import SupervisedTasks
from predictor_service.model import Observation, TurnContext
from predictor_service.shared import SharedPredictor, Trained, shared_predictor

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Requests that the service has not answered; with more it counts as overloaded, and is not asked."""
FAILURES = 5
"""After so many failures in a row the circuit to the service is open: it is not asked."""
REST_S = 1.0
"""The circuit stays open for so long; then one request probes the service, and nobody waits for it."""
FLUSH_S = 0.25
"""Between two deliveries of observations."""
DELIVERY_S = 2.0
"""The timeout of one delivery."""
MAX_QUEUED = 4096
"""Observations that wait for their delivery; beyond that the oldest are dropped."""
BATCH = 256
"""Observations of one delivery."""


class ServiceUnreachable(Exception):
    """Nobody answers."""


class ServiceOverloaded(Exception):
    """It has too much to do."""


class PredictionService(Protocol):
    """The predictor service, over any transport."""

    async def predict(self, turn: TurnContext) -> Prediction:
        """Ask it; to be cancelled at any time.

        Raises:
            ServiceUnreachable: nobody answers.
            ServiceOverloaded: it refuses.
        """
        ...

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Send it observations.

        Raises:
            ServiceUnreachable: nobody answers.
            ServiceOverloaded: it refuses.
        """
        ...


class Answered(StrEnum):
    """Who made a prediction, and why not the service. Label of a metric."""

    SERVICE = "service"
    STATISTICS = "statistics"
    """There is no service."""
    DEADLINE = "deadline"
    """The service did not answer in time."""
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    """The service rejected the request, or it has too many in flight."""
    BROKEN_ANSWER = "broken_answer"
    """The service's answer is no prediction, or it raised an unknown exception."""
    RESTING = "resting"
    """The service failed too often, and is not asked for a while."""
    NOBODY = "nobody"
    """The statistics failed, too: there is no prediction."""


class PredictionClient:
    """Asks the service, or its own statistics.

    Args:
        local: its own statistics, shared with those of others.
        service: None: there is none.
        deadline_s: within which `predict` answers.
        clock: for the open circuit, and to measure how long its own statistics take.
    """

    def __init__(
        self, local: SharedPredictor, service: PredictionService | None, *, deadline_s: float, clock: Clock
    ) -> None:
        self.counters: Counter[Answered] = Counter()
        self.forgotten = 0
        """Observations that were dropped because the queue was full."""
        self._local = local
        self._service = service
        self._deadline_s = deadline_s
        self._clock = clock
        self._queue: deque[Observation] = deque()
        self._in_flight: set[asyncio.Task[Prediction]] = set()
        self._failures = 0
        self._rests_until_s = 0.0
        self._local_s = 0.0
        """A moving average of the time that its own statistics take."""
        self._tasks = SupervisedTasks("predictor client", clock)

    @property
    def in_flight(self) -> int:
        """Questions that the service has not answered."""
        return len(self._in_flight)

    @property
    def healthy(self) -> bool:
        """Whether no background task keeps failing."""
        return self._tasks.healthy

    async def predict(self, turn: TurnContext) -> Prediction | None:
        """The prediction of a turn, within the deadline; None: there is none."""
        answer = await self._ask(turn)
        if isinstance(answer, Prediction):
            self.counters[Answered.SERVICE] += 1
            return answer
        began_s = self._clock.now_s()
        try:
            (prediction,) = self._local.predict([turn])
        except Exception:  # whatever is wrong with a prediction, the turn is served
            logger.exception("no prediction")
            self.counters[Answered.NOBODY] += 1
            return None
        self._local_s += (self._clock.now_s() - began_s - self._local_s) / 8
        self.counters[answer] += 1
        return prediction

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from observations, here or in the service."""
        if self._service is None:
            self._local.learn(observations)
            return
        self._queue.extend(observations)
        while len(self._queue) > MAX_QUEUED:
            self._queue.popleft()
            self.forgotten += 1

    def view(self) -> dict[str, Any]:
        """For operators."""
        return {
            "service": self._service is not None,
            "in_flight": self.in_flight,
            "queued": len(self._queue),
            "forgotten": self.forgotten,
            "statistics_s": self._local_s,
            "local": self._local.view(),
        }

    def open(self) -> None:
        """Start to deliver observations and to share what is learnt."""
        self._tasks.start("exchange", self._local.exchange_for_ever)
        if (service := self._service) is not None:
            self._tasks.start("delivery", lambda: self._deliver_for_ever(service))

    async def aclose(self) -> None:
        """Stop; observations that were not delivered are learnt here, and written to the store."""
        for question in self._in_flight:
            question.cancel()
        await self._tasks.aclose()
        self._local.learn(list(self._queue))
        self._queue.clear()
        await self._local.aclose()

    # --- the service --------------------------------------------------------------------------------------------------

    async def _ask(self, turn: TurnContext) -> Prediction | Answered:
        """The service's answer, or why there is none."""
        if self._service is None:
            return Answered.STATISTICS
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return self._failed(Answered.OVERLOADED)
        if self._failures >= FAILURES:
            if self._clock.now_s() >= self._rests_until_s and not self._in_flight:
                self._rests_until_s = self._clock.now_s() + REST_S
                self._probe(self._begin(self._service, turn))
            return Answered.RESTING
        question = self._begin(self._service, turn)
        # The rest of the deadline is for its own answer. The loop may wake a millisecond late, which is epoll's unit.
        wait_s = max(0.0, self._deadline_s - self._local_s)
        try:
            await asyncio.wait((question,), timeout=wait_s)
        finally:
            question.cancel()
        return self._judged(question) if question.done() else self._failed(Answered.DEADLINE)

    def _begin(self, service: PredictionService, turn: TurnContext) -> "asyncio.Task[Prediction]":
        # In a context of its own, because Ray Serve would take it for a part of the request and mix up their ids.
        question = asyncio.get_running_loop().create_task(_coroutine(service, turn), context=Context())
        self._in_flight.add(question)
        question.add_done_callback(self._in_flight.discard)
        return question

    def _probe(self, question: "asyncio.Task[Prediction]") -> None:
        """Ask without waiting; an answer closes the circuit."""
        asyncio.get_running_loop().call_later(REST_S, question.cancel)
        question.add_done_callback(self._judged)

    def _judged(self, question: "asyncio.Task[Prediction]") -> Prediction | Answered:
        if question.cancelled():
            return self._failed(Answered.DEADLINE)
        match question.exception():
            case None:
                answer: object = question.result()
                if isinstance(answer, Prediction):
                    self._failures = 0
                    return answer
                return self._failed(Answered.BROKEN_ANSWER)
            case ServiceUnreachable():
                return self._failed(Answered.UNREACHABLE)
            case ServiceOverloaded():
                return self._failed(Answered.OVERLOADED)
            case error:
                logger.warning("the predictor service failed: %r", error)
                return self._failed(Answered.BROKEN_ANSWER)

    def _failed(self, why: Answered) -> Answered:
        self._failures += 1
        if self._failures == FAILURES:
            self._rests_until_s = self._clock.now_s() + REST_S
        return why

    # --- observations -------------------------------------------------------------------------------------------------

    async def _deliver_for_ever(self, service: PredictionService) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.deliver(service)

    async def deliver(self, service: PredictionService) -> None:
        """Send observations to the service; those that it does not take are learnt here."""
        while self._queue:
            batch = list(islice(self._queue, BATCH))
            for _ in batch:
                self._queue.popleft()
            try:
                async with asyncio.timeout(DELIVERY_S):
                    await service.observe(batch)
            except asyncio.CancelledError:
                self._queue.extendleft(reversed(batch))
                raise
            except Exception as error:  # noqa: BLE001 - they reach the service through the store instead
                logger.debug("observations were not taken: %r", error)
                self._local.learn(batch)


async def _coroutine(service: PredictionService, turn: TurnContext) -> Prediction:
    return await service.predict(turn)


def prediction_client(
    config: CaesuraConfig, clock: Clock, writer: str, service: PredictionService | None
) -> PredictionClient | None:
    """An ingress's client; None: the configuration wants no predictions.

    Raises:
        ConfigError: the store's URL or the bundle cannot be used.
    """
    if config.predictor.mode == "none":
        return None
    # A trained model would be too slow for the deadline in this process: only its statistics answer here.
    statistics = Trained(None, Trained.of(config.predictor.bundle).statistics)
    local = shared_predictor(config, clock, writer, statistics)
    return PredictionClient(local, service, deadline_s=config.predictor.deadline_s, clock=clock)
