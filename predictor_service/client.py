"""How an ingress asks for a forecast: in time, always answered, never with an error.

The service is asked if there is one. If its answer is not there in time, or is none, the client's own statistics
answer; which of them it was, and why, is counted. What was seen of turns goes to the service in the background; what
it does not take is learnt here, and reaches it through the store.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from contextvars import Context
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from cluster.clock import Clock
from cluster.program import Forecasted
from predictor_service.context import TurnContext
from predictor_service.observation import Observation
from predictor_service.shared import SharedPredictor

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64
"""Questions that the service has not answered; with more it counts as overloaded, and is not asked."""
FAILURES = 5
"""In a row, after which the service is left in peace."""
REST_S = 1.0
"""For so long; then one question is asked again, for which nobody waits."""
FLUSH_S = 0.25
"""Between two deliveries of what was seen."""
DELIVERY_S = 2.0
"""For one delivery."""
MAX_QUEUED = 4096
"""Observations that wait for their delivery; beyond that the oldest are forgotten."""
BATCH = 256
"""Observations of one delivery."""


class ServiceUnreachable(Exception):
    """Nobody answers."""


class ServiceOverloaded(Exception):
    """It has too much to do."""


class ForecastService(Protocol):
    """The predictor service, over whatever."""

    async def forecast(self, turn: TurnContext) -> Forecasted:
        """Ask it; to be cancelled at any time.

        Raises:
            ServiceUnreachable: nobody answers.
            ServiceOverloaded: it refuses.
        """
        ...

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Tell it what was seen.

        Raises:
            ServiceUnreachable: nobody answers.
            ServiceOverloaded: it refuses.
        """
        ...


class Answered(StrEnum):
    """Who made a forecast, and why not the service. Label of a metric."""

    SERVICE = "service"
    STATISTICS = "statistics"
    """There is no service."""
    DEADLINE = "deadline"
    """The service did not answer in time."""
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    """The service says so, or it owes too many answers."""
    BROKEN_ANSWER = "broken_answer"
    """What it answered, or raised, is nothing that is known."""
    RESTING = "resting"
    """It failed too often, and is not asked for a while."""
    NOBODY = "nobody"
    """The statistics failed, too: there is no forecast."""


class ForecastClient:
    """Asks the service, or its own statistics.

    Args:
        local: its own statistics, shared with those of others.
        service: None: there is none.
        deadline_s: within which `forecast` answers.
        clock: for the service's rest, and to measure how long its own statistics take.
    """

    def __init__(
        self, local: SharedPredictor, service: ForecastService | None, *, deadline_s: float, clock: Clock
    ) -> None:
        self.counters: Counter[Answered] = Counter()
        self.forgotten = 0
        """Observations that waited too long for their delivery."""
        self._local = local
        self._service = service
        self._deadline_s = deadline_s
        self._clock = clock
        self._queue: deque[Observation] = deque()
        self._in_flight: set[asyncio.Task[Forecasted]] = set()
        self._failures = 0
        self._rests_until_s = 0.0
        self._local_s = 0.0
        """That its own statistics take, mostly of late."""
        self._regular: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> int:
        """Questions that the service has not answered."""
        return len(self._in_flight)

    async def forecast(self, turn: TurnContext) -> Forecasted | None:
        """The forecast of a turn, within the deadline; None: nobody has one."""
        answer = await self._ask(turn)
        if isinstance(answer, Forecasted):
            self.counters[Answered.SERVICE] += 1
            return answer
        began_s = self._clock.now_s()
        try:
            (forecast,) = self._local.forecast([turn])
        except Exception:  # whatever is wrong with a forecast, the turn is served
            logger.exception("no forecast")
            self.counters[Answered.NOBODY] += 1
            return None
        self._local_s += (self._clock.now_s() - began_s - self._local_s) / 8
        self.counters[answer] += 1
        return forecast

    def observe(self, observations: Sequence[Observation]) -> None:
        """Something was seen of turns."""
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
        """Begin to deliver and to share."""
        self._regular = [asyncio.create_task(self._local.exchange_for_ever())]
        if self._service is not None:
            self._regular.append(asyncio.create_task(self._deliver_for_ever(self._service)))

    async def aclose(self) -> None:
        """Stop; what was not delivered is learnt here, and written."""
        for task in (*self._regular, *self._in_flight):
            task.cancel()
        self._local.learn(list(self._queue))
        self._queue.clear()
        await self._local.aclose()

    # --- the service --------------------------------------------------------------------------------------------------

    async def _ask(self, turn: TurnContext) -> Forecasted | Answered:
        """Its answer, or why there is none."""
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
        # What is left is for its own answer. The loop may wake a millisecond late: epoll counts in those.
        wait_s = max(0.0, self._deadline_s - self._local_s)
        try:
            await asyncio.wait((question,), timeout=wait_s)
        finally:
            question.cancel()
        return self._judged(question) if question.done() else self._failed(Answered.DEADLINE)

    def _begin(self, service: ForecastService, turn: TurnContext) -> "asyncio.Task[Forecasted]":
        # In a context of its own: Ray Serve would take it for a part of the request, and mix up their ids.
        question = asyncio.get_running_loop().create_task(_coroutine(service, turn), context=Context())
        self._in_flight.add(question)
        question.add_done_callback(self._in_flight.discard)
        return question

    def _probe(self, question: "asyncio.Task[Forecasted]") -> None:
        """Ask without waiting; an answer ends the rest."""
        asyncio.get_running_loop().call_later(REST_S, question.cancel)
        question.add_done_callback(self._judged)

    def _judged(self, question: "asyncio.Task[Forecasted]") -> Forecasted | Answered:
        if question.cancelled():
            return self._failed(Answered.DEADLINE)
        match question.exception():
            case None:
                answer: object = question.result()
                if isinstance(answer, Forecasted):
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

    # --- what was seen ------------------------------------------------------------------------------------------------

    async def _deliver_for_ever(self, service: ForecastService) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.deliver(service)

    async def deliver(self, service: ForecastService) -> None:
        """Tell the service what was seen; what it does not take is learnt here."""
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
            except Exception as error:  # noqa: BLE001 - knowledge, not duty: it goes by way of the store
                logger.debug("observations were not taken: %r", error)
                self._local.learn(batch)


async def _coroutine(service: ForecastService, turn: TurnContext) -> Forecasted:
    return await service.forecast(turn)
