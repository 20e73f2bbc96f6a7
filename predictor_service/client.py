"""The client with which an ingress predicts turns. It returns within a deadline, and it never raises.

The client asks the predictor service if there is one. If the answer is late or invalid, the client's own statistics
make the prediction. Counters record the source of each prediction. Observations of turns are sent to the service in
the background. The client learns from those that the service does not accept, and shares them through the store.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextvars import Context
from dataclasses import replace
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
"""Unanswered requests with which the service counts as overloaded, so that it is not asked."""
FAILURES = 5
"""Failures in a row after which the circuit to the service opens, so that it is not asked."""
REST_S = 1.0
"""Seconds for which the circuit stays open. Then one request probes the service, and no turn waits for it."""
FLUSH_S = 0.25
"""Seconds between two deliveries of observations."""
DELIVERY_S = 2.0
"""Timeout of one delivery, in seconds."""
MAX_QUEUED = 4096
"""Observations that may wait for their delivery. The oldest ones are dropped first."""
BATCH = 256
"""Observations in one delivery, at most."""


class ServiceUnreachable(Exception):
    """The service cannot be reached."""


class ServiceOverloaded(Exception):
    """The service is overloaded and rejects the request."""


class PredictionService(Protocol):
    """The predictor service, over any transport."""

    async def predict(self, turn: TurnContext) -> Prediction:
        """Return the prediction of a turn. The call may be cancelled at any time.

        Raises:
            ServiceUnreachable: the service cannot be reached.
            ServiceOverloaded: the service rejects the request.
        """
        ...

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Send observations to the service.

        Raises:
            ServiceUnreachable: the service cannot be reached.
            ServiceOverloaded: the service rejects the request.
        """
        ...


class Answered(StrEnum):
    """The source of a prediction, or the reason why it is not the service. This is the label of a metric."""

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
    """The statistics failed as well, so that there is no prediction."""


class PredictionClient:
    """Requests predictions from the service, or makes them from its own statistics.

    Args:
        local: the statistics of this process, which are shared with those of other processes.
        service: the predictor service; None if there is none.
        deadline_s: seconds within which `predict` returns.
        clock: times the open circuit, and measures how long the statistics take.
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
        """Moving average of the seconds that a prediction by the statistics takes."""
        self._tasks = SupervisedTasks("predictor client", clock)

    @property
    def in_flight(self) -> int:
        """Number of requests that the service has not answered."""
        return len(self._in_flight)

    @property
    def healthy(self) -> bool:
        """Whether no background task keeps failing."""
        return self._tasks.healthy

    async def predict(self, turn: TurnContext) -> Prediction | None:
        """Return the prediction of a turn within the deadline, or None if there is none."""
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
        """Learn from observations in this process, or queue them for the service."""
        if self._service is None:
            self._local.learn(observations)
            return
        self._queue.extend(observations)
        while len(self._queue) > MAX_QUEUED:
            self._queue.popleft()
            self.forgotten += 1

    def view(self) -> dict[str, Any]:
        """Return the client's state for operators."""
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
        """Stop. Learn from the observations that were not delivered, and write the result to the store."""
        for question in self._in_flight:
            question.cancel()
        await self._tasks.aclose()
        self._local.learn(list(self._queue))
        self._queue.clear()
        await self._local.aclose()

    # --- the service --------------------------------------------------------------------------------------------------

    async def _ask(self, turn: TurnContext) -> Prediction | Answered:
        """Return the prediction of the service, or the reason why there is none."""
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
        # The rest of the deadline is left to the statistics. The event loop may wake up 1 ms late, the unit of epoll.
        wait_s = max(0.0, self._deadline_s - self._local_s)
        try:
            await asyncio.wait((question,), timeout=wait_s)
        finally:
            question.cancel()
        return self._judged(question) if question.done() else self._failed(Answered.DEADLINE)

    def _begin(self, service: PredictionService, turn: TurnContext) -> "asyncio.Task[Prediction]":
        # The task has its own context, because Ray Serve would treat it as a part of the request and mix up their ids.
        question = asyncio.get_running_loop().create_task(_coroutine(service, turn), context=Context())
        self._in_flight.add(question)
        question.add_done_callback(self._in_flight.discard)
        return question

    def _probe(self, question: "asyncio.Task[Prediction]") -> None:
        """Let a request probe the service without waiting for it. An answer closes the circuit."""
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
        """Send the queued observations to the service. Learn here from those that it does not accept."""
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
    """Make the client of an ingress. Return None if the configuration disables predictions.

    Raises:
        ConfigError: the store's URL or the bundle cannot be used.
    """
    if config.predictor.mode == "none":
        return None
    # A trained model would be too slow for the deadline in this process: only its statistics answer here.
    statistics = replace(Trained.of(config.predictor.bundle), model=None)
    local = shared_predictor(config, clock, writer, statistics)
    return PredictionClient(local, service, deadline_s=config.predictor.deadline_s, clock=clock)
