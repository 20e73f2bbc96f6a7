"""Predictors that share what they learn, through a real Redis."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from cluster.core.clock import ManualClock
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.store.predictor_state import PredictorStateStore
from predictor_service import level_counts
from predictor_service.model import TurnContext, TurnOutcome, TurnSeen
from predictor_service.predictor import Predictor, readable
from predictor_service.shared import SharedPredictor
from predictor_service.statistics_model import StatisticsModel

TURN = TurnContext(source="t")
LONG, SHORT = TurnSeen(TURN, TurnOutcome(1000, "look")), TurnSeen(TURN, TurnOutcome(10, "look"))
Make = Callable[[str], SharedPredictor]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as embedded:
        yield embedded


@pytest.fixture
async def make(server: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made = []

    def writer(name: str) -> SharedPredictor:
        clock = ManualClock()
        space = request.node.name
        store = PredictorStateStore(server.url, space=space, writer=name, timeout_s=10.0, expiry_s=60.0, clock=clock)
        made.append(SharedPredictor(Predictor(StatisticsModel()), store, 1.0, clock))
        return made[-1]

    yield writer
    for one in made:
        await one.aclose()


def expected(shared: SharedPredictor) -> float:
    return shared.predict([TURN])[0].output_tokens


async def test_a_restart_loses_nothing_that_was_written(make: Make) -> None:
    first = make("first")
    first.learn([LONG] * 50)
    assert await first.exchange()
    successor = make("second")
    assert expected(successor) < 500
    assert await successor.exchange()
    assert expected(successor) == expected(first)


async def test_what_two_have_learnt_both_know_and_neither_counts_twice(make: Make) -> None:
    one, other = make("one"), make("other")
    one.learn([LONG] * 40)
    other.learn([SHORT] * 40)
    for _ in range(3):
        await one.exchange()
        await other.exchange()
    assert expected(one) == expected(other)
    assert 300 < expected(one) < 700


async def test_what_others_have_learnt_is_read_in_a_thread_and_used_on_the_loop(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, reader = make("one"), make("reader")
    one.learn([LONG] * 40)
    await one.exchange()
    threads: list[bool] = []

    def fill(drift: object, rows: object) -> None:
        if drift is reader.predictor.length_drift:
            threads.append(threading.current_thread() is threading.main_thread())

    with monkeypatch.context() as patched:
        patched.setattr(reader.predictor.length_drift.__class__, "fill", fill)
        table = reader.predictor.statistics._lengths
        before = table._others
        steps: list[bool] = []
        whole = reader.predictor.read_others

        def read(others: object) -> object:
            take = whole(others)  # type: ignore[arg-type]
            steps.append(table._others is before)
            return take

        patched.setattr(reader.predictor, "read_others", read)
        await reader.exchange()
    assert threads == [True]
    assert steps == [True]
    assert expected(reader) == expected(one)


async def test_what_a_writer_cannot_be_read_of_is_left_out_and_the_rest_is_taken(make: Make) -> None:
    good, bad, reader = make("good"), make("bad"), make("reader")
    good.learn([LONG] * 50)
    await good.exchange()
    await bad._store.exchange(b"nonsense")
    for _ in range(3):
        assert await reader.exchange()
    assert reader.unreadable == 1
    assert expected(reader) == expected(good)


async def test_large_statistics_are_encoded_in_steps_between_which_more_is_learnt(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop serves requests meanwhile."""
    monkeypatch.setattr(level_counts, "ROWS", 2)
    monkeypatch.setattr(level_counts, "OLDEST", 1)
    writer, reader = make("writer"), make("reader")
    writer.learn([LONG] * 50)
    writer.learn([TurnSeen(TurnContext(source=f"t{number}"), TurnOutcome(10, "look")) for number in range(30)])
    for table in (*writer.predictor.statistics._histograms.values(), writer.predictor.statistics._tools):
        table._most = len(table._own)
    steps = 0

    async def learn_meanwhile() -> None:
        nonlocal steps
        while True:
            steps += 1
            writer.learn([TurnSeen(TurnContext(source=f"new{steps}"), TurnOutcome(10, "look")), LONG])
            await asyncio.sleep(0)

    encoding = asyncio.create_task(writer._own())
    learning = asyncio.create_task(learn_meanwhile())
    part = await encoding
    learning.cancel()
    assert steps > 30
    assert part is not None and readable(part)
    assert await writer.exchange()
    assert await reader.exchange()
    assert expected(reader) == expected(writer), "what was learnt meanwhile is written with the next exchange"


async def test_who_has_learnt_nothing_writes_nothing(make: Make) -> None:
    silent, reader = make("silent"), make("reader")
    await silent.exchange()
    await reader.exchange()
    assert reader.view()["writers"] == 0
