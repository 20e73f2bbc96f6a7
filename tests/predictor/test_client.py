"""The client: every question is answered in time and without an error, whatever the service does.

The service is a fake here; tests/serving/test_predictions_and_traces.py has a real one. Its statistics are real ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from cluster.core.clock import ManualClock
from cluster.core.program import Prediction
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.predictor_state import PredictorStateStore
from predictor_service.client import (
    FAILURES,
    MAX_IN_FLIGHT,
    MAX_QUEUED,
    REST_S,
    Answered,
    PredictionClient,
    ServiceOverloaded,
    ServiceUnreachable,
)
from predictor_service.model import Observation, TurnContext, TurnOutcome, TurnSeen
from predictor_service.predictor import Predictor
from predictor_service.shared import SharedPredictor
from predictor_service.statistics_model import StatisticsModel

TURN = TurnContext(source="t")
ANSWER = Prediction(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
SEEN = TurnSeen(TURN, TurnOutcome(400, "look"))


class Service:
    """Does as it is told."""

    def __init__(self) -> None:
        self.does: Callable[[], object] = lambda: ANSWER
        self.hangs = False
        self.asked = 0
        self.cancelled = 0
        self.told: list[Observation] = []
        self.takes: Exception | None = None

    async def predict(self, turn: TurnContext) -> Prediction:
        self.asked += 1
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.does()  # type: ignore[return-value]

    async def observe(self, observations: Sequence[Observation]) -> None:
        if self.takes is not None:
            raise self.takes
        self.told += observations


def failing(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


class Bench:
    def __init__(self, server: EmbeddedRedis, service: Service | None, deadline_s: float = 60.0) -> None:
        self.clock = ManualClock()
        self.service = service
        self.predictor = Predictor(StatisticsModel())
        store = PredictorStateStore(server.url, space="s", writer="w", timeout_s=10.0, expiry_s=60.0, clock=self.clock)
        self.shared = SharedPredictor(self.predictor, store, 1.0, self.clock)
        self.client = PredictionClient(self.shared, service, deadline_s=deadline_s, clock=self.clock)

    async def ask(self, times: int = 1) -> Prediction | None:
        for _ in range(times):
            answer = await self.client.predict(TURN)
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as embedded:
        yield embedded


@pytest.fixture
async def bench(server: EmbeddedRedis) -> AsyncIterator[Bench]:
    made = Bench(server, Service())
    yield made
    await made.client.aclose()


@pytest.fixture
async def hanging(server: EmbeddedRedis) -> AsyncIterator[Bench]:
    service = Service()
    service.hangs = True
    made = Bench(server, service, deadline_s=0.005)
    yield made
    await made.client.aclose()


async def test_the_service_s_answer_is_the_answer(bench: Bench) -> None:
    assert await bench.ask() is ANSWER
    assert bench.client.counters == {Answered.SERVICE: 1}


async def test_without_a_service_the_statistics_answer_and_learn_at_once(server: EmbeddedRedis) -> None:
    bench = Bench(server, None)
    before = await bench.ask()
    for _ in range(50):
        bench.client.observe([SEEN])
    after = await bench.ask()
    assert before is not None and after is not None
    assert before.output_tokens < 300 < after.output_tokens
    assert bench.client.counters == {Answered.STATISTICS: 2}
    await bench.client.aclose()


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (failing(ServiceUnreachable("gone")), Answered.UNREACHABLE),
        (failing(ServiceOverloaded("full")), Answered.OVERLOADED),
        (failing(ZeroDivisionError("a bug")), Answered.BROKEN_ANSWER),
        (lambda: None, Answered.BROKEN_ANSWER),
        (lambda: "soon", Answered.BROKEN_ANSWER),
    ],
)
async def test_whatever_goes_wrong_has_a_name_and_the_statistics_answer(
    bench: Bench, does: Callable[[], object], why: Answered
) -> None:
    bench.service.does = does
    assert await bench.ask() == bench.predictor.predict([TURN])[0]
    assert bench.client.counters == {why: 1}


async def test_nobody_waits_for_a_service_that_hangs_and_its_question_is_withdrawn(hanging: Bench) -> None:
    assert await hanging.ask() == hanging.predictor.predict([TURN])[0]
    assert hanging.client.counters == {Answered.DEADLINE: 1}
    await asyncio.sleep(0.001)
    assert (hanging.service.cancelled, hanging.client.in_flight) == (1, 0)


async def test_a_turn_whose_client_went_away_withdraws_its_question(bench: Bench) -> None:
    bench.service.hangs = True
    asking = asyncio.create_task(bench.ask())
    await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait((asking,))
    await asyncio.sleep(0.001)
    assert asking.cancelled()
    assert bench.client.in_flight == 0


async def test_a_service_that_owes_too_many_answers_is_not_asked(hanging: Bench) -> None:
    answers = [asyncio.create_task(hanging.ask()) for _ in range(MAX_IN_FLIGHT + 5)]
    await asyncio.wait(answers)
    assert hanging.service.asked <= MAX_IN_FLIGHT
    assert hanging.client.counters[Answered.OVERLOADED] + hanging.client.counters[Answered.RESTING] >= 5
    assert sum(hanging.client.counters.values()) == MAX_IN_FLIGHT + 5


async def test_a_service_that_fails_again_and_again_is_left_in_peace_and_tried_now_and_then(bench: Bench) -> None:
    bench.service.does = failing(ServiceUnreachable("gone"))
    await bench.ask(FAILURES + 10)
    assert bench.service.asked == FAILURES
    assert bench.client.counters == {Answered.UNREACHABLE: FAILURES, Answered.RESTING: 10}
    bench.clock.advance(REST_S)
    await bench.ask()
    await asyncio.sleep(0.001)
    assert bench.service.asked == FAILURES + 1  # a question for which nobody waited
    await bench.ask(3)
    assert bench.service.asked == FAILURES + 1
    bench.service.does = lambda: ANSWER
    bench.clock.advance(REST_S)
    await bench.ask()
    await asyncio.sleep(0.001)
    assert await bench.ask() is ANSWER


async def test_if_even_the_statistics_fail_there_is_no_forecast_and_no_error(bench: Bench) -> None:
    bench.service.does = failing(ServiceUnreachable("gone"))
    bench.predictor.statistics = None  # type: ignore[assignment]
    assert await bench.ask() is None
    assert bench.client.counters == {Answered.NOBODY: 1}


async def test_what_was_seen_goes_to_the_service_and_is_learnt_here_if_it_does_not_take_it(bench: Bench) -> None:
    service = bench.service
    bench.client.observe([SEEN] * 600)
    await bench.client.deliver(service)
    assert len(service.told) == 600
    assert bench.shared.view()["learnt"] == 0
    service.takes = ServiceUnreachable("gone")
    bench.client.observe([SEEN] * 30)
    await bench.client.deliver(service)
    assert bench.shared.view()["learnt"] == 30


async def test_what_waits_for_its_delivery_is_bounded(bench: Bench) -> None:
    bench.client.observe([SEEN] * (MAX_QUEUED + 7))
    assert bench.client.forgotten == 7
    assert bench.client.view()["queued"] == MAX_QUEUED


async def test_what_was_not_delivered_is_written_at_the_end(server: EmbeddedRedis) -> None:
    bench = Bench(server, Service())
    bench.client.observe([SEEN] * 40)
    await bench.client.aclose()
    other = Predictor(StatisticsModel())
    store = PredictorStateStore(server.url, space="s", writer="x", timeout_s=10.0, expiry_s=60.0, clock=ManualClock())
    await SharedPredictor(other, store, 1.0, ManualClock()).exchange()
    await store.close()
    assert other.predict([TURN])[0].output_tokens > 300
