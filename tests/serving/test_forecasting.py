"""What an ingress learns of turns from the answers that pass by; no cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

import pytest

from cluster.api.openai import SSE_DONE
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import HttpError
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.stream import Begun, Progress, StreamChunk
from cluster.core.turn import pack_ids
from cluster.dispatch.failover import FailoverStream, ends_answer
from cluster.dispatch.placed_calls import prompt_tokens
from cluster.dispatch.predictions import Predictions, WatchedAnswers, predictions
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.observing.meter import Meter
from cluster.observing.recorders import PredictionMetrics
from cluster.store.predictor_state import PredictorStateStore
from predictor_service.client import PredictionClient
from predictor_service.model import Observation, ProgramSeen
from predictor_service.predictor import Predictor
from predictor_service.shared import SharedPredictor
from predictor_service.statistics_model import StatisticsModel

USER = {"role": "user", "content": "Look."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "nothing"}
FIRST, SECOND = {"messages": [USER]}, {"messages": [USER, CALL, RESULT]}


class Pieces:
    """A replica's answer, as it is written down."""

    def __init__(self, *pieces: object) -> None:
        self._pieces = iter(pieces)

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> object:
        try:
            return next(self._pieces)
        except StopIteration:
            raise StopAsyncIteration from None

    def over(self) -> None:
        """Nothing is kept."""

    def cancel(self) -> None:
        pass


def answer(tokens: int) -> Pieces:
    """With the ids of a long prompt after its usage."""
    usage = {"prompt_tokens": 9, "total_tokens": 9 + tokens, "completion_tokens": tokens}
    text = '"usage": {"completion_tokens": 77}'
    whole = {"choices": [{"message": {"content": text}}], "usage": usage, "prompt_token_ids": [500] * 5000}
    return Pieces(StreamChunk(Progress(output_tokens=tokens, prompt_tokens=9), json.dumps(whole).encode()))


def stream(tokens: int, obstacle: str | None = None) -> Pieces:
    """A stream without an obstacle has the ids with which another replica could continue it."""
    ids = pack_ids([7]) if obstacle is None else b""
    begun = StreamChunk(Progress(begun=Begun(b"", None, obstacle=obstacle)), b"")
    events = [StreamChunk(Progress(1, ids, output_tokens=1), b"data: {}\n\n") for _ in range(tokens)]
    return Pieces(begun, *events, StreamChunk(Progress(1), SSE_DONE))


def stream_that_cannot_be_resumed(tokens: int) -> Pieces:
    return stream(tokens, "presence_penalty")


class Door:
    def __init__(self, server: EmbeddedRedis) -> None:
        self.clock = ManualClock()
        self.predictor = Predictor(StatisticsModel())
        store = PredictorStateStore(server.url, space="s", writer="w", timeout_s=10.0, expiry_s=60.0, clock=self.clock)
        client = PredictionClient(
            SharedPredictor(self.predictor, store, 1.0, self.clock), None, deadline_s=60.0, clock=self.clock
        )
        self.client = client
        self.predictions = Predictions(client, self.clock, 100.0, "tiny", PredictionMetrics(Meter(), "statistics"))

    async def turn(
        self, identity: ProgramIdentity, body: dict[str, Any], pieces: Pieces, read: int | None = None
    ) -> Any:
        turn = self.predictions.turn(identity, body, prompt_tokens(body))
        told = await turn.identity()

        async def attempt(so_far: Progress | None) -> Pieces:
            return pieces

        async def blame() -> None:
            raise AssertionError("nobody is to blame")

        relay: FailoverStream[bytes] = FailoverStream(attempt, ends=ends_answer, error_map=_raise, blame=blame)
        answers = WatchedAnswers(relay, turn)
        taken = 0
        async for _ in answers:
            taken += 1
            if taken == read:
                break
        answers.cancel()
        return told

    @property
    def compared(self) -> dict[str, int]:
        compared: dict[str, int] = self.predictions.view()["compared"]
        return compared

    @property
    def error(self) -> float:
        return float(self.predictions.view()["mean_absolute_error"]["output_tokens"])


def _raise(error: BaseException) -> HttpError:
    raise error


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as embedded:
        yield embedded


@pytest.fixture
async def door(server: EmbeddedRedis) -> AsyncIterator[Door]:
    made = Door(server)
    yield made
    await made.predictions.aclose()


PROGRAM, LAST = ProgramIdentity("p"), ProgramIdentity("p", last_turn=True)


@pytest.mark.parametrize("made", [answer, stream, stream_that_cannot_be_resumed])
async def test_what_a_turn_generated_is_known_however_it_is_answered(door: Door, made: Any) -> None:
    told = await door.turn(PROGRAM, FIRST, made(40))
    assert told.forecast is not None
    assert door.compared == {"output_tokens": 1, "pause_s": 0}
    assert door.error == pytest.approx(abs(told.forecast.output_tokens - 40))
    door.clock.advance(2.5)
    await door.turn(LAST, SECOND, made(10))
    assert door.compared == {"output_tokens": 2, "pause_s": 1}
    assert len(door.predictions.history) == 0


async def test_programs_are_learnt_from(door: Door) -> None:
    for number in range(30):
        await door.turn(ProgramIdentity(f"p{number}"), FIRST, stream(200))
        door.clock.advance(5.0)
        await door.turn(ProgramIdentity(f"p{number}", last_turn=True), SECOND, stream(10))
    forecast = (await door.turn(ProgramIdentity("new"), FIRST, stream(1))).forecast
    assert forecast.output_tokens == pytest.approx(200, rel=0.2)
    assert forecast.tool("look").pause_s == pytest.approx(5.0, rel=0.2)
    assert forecast.later_turns == pytest.approx(1.0, abs=0.4)


async def test_a_client_s_hints_are_passed_on_beside_the_forecast(door: Door) -> None:
    told = await door.turn(ProgramIdentity("p", hints=Hints(expected_output_tokens=3)), FIRST, stream(1))
    assert told.hints.expected_output_tokens == 3
    assert told.forecast is not None


@pytest.mark.parametrize("pieces", [Pieces(HttpError("no", status=400)), Pieces(b'{"choices": []}')])
async def test_of_a_turn_that_failed_nothing_is_learnt(door: Door, pieces: Pieces) -> None:
    before = door.predictor.to_bytes()
    await door.turn(PROGRAM, FIRST, pieces)
    await door.turn(LAST, SECOND, Pieces(HttpError("no", status=500)))
    assert door.compared == {"output_tokens": 0, "pause_s": 0}
    assert door.predictor.to_bytes() == before


@pytest.mark.parametrize(("status", "learnt"), [(400, True), (422, False), (500, False), (503, False)])
async def test_a_program_ends_with_a_turn_that_is_refused_and_not_with_one_that_fails(
    door: Door, status: int, learnt: bool
) -> None:
    """A prompt that is too long ends its program. A failure hides the work that was left."""
    await door.turn(PROGRAM, FIRST, stream(40))
    await door.turn(PROGRAM, SECOND, Pieces(HttpError("no", status=status)))
    seen: list[Observation] = [*chain(*door.predictions.history.sweep(1000.0))]
    assert [type(one) for one in seen] == [ProgramSeen] * learnt


async def test_of_a_stream_that_ends_with_an_error_nothing_is_learnt(door: Door) -> None:
    before = door.predictor.to_bytes()
    token = StreamChunk(Progress(1, pack_ids([7])), b"data: {}\n\n")
    error = b'data: {"error": {"message": "broken", "code": 500}}\n\n'
    await door.turn(LAST, FIRST, Pieces(token, StreamChunk(Progress(1), error + SSE_DONE)))
    assert door.compared["output_tokens"] == 0
    assert door.predictor.to_bytes() == before


async def test_of_a_stream_that_its_client_left_nothing_is_learnt(door: Door) -> None:
    await door.turn(LAST, FIRST, stream(100), read=5)
    assert door.compared["output_tokens"] == 0


async def test_several_answers_to_one_turn_are_no_length(door: Door) -> None:
    await door.turn(LAST, {**FIRST, "n": 4}, answer(40))
    assert door.compared["output_tokens"] == 0


async def test_a_turn_of_no_program_is_forecast(door: Door) -> None:
    told = await door.turn(ProgramIdentity(), FIRST, answer(40))
    assert told.forecast is not None
    assert len(door.predictions.history) == 0


@pytest.mark.parametrize(("ingresses", "learnt"), [(1, 2), (2, 0)])
async def test_that_an_idle_program_has_ended_is_known_to_a_single_ingress_only(ingresses: int, learnt: int) -> None:
    config = CaesuraConfig.model_validate(
        {"http": {"ingress_replicas": ingresses}, "redis": {"url": "redis://127.0.0.1:1"}}
    )
    made = predictions(config, ManualClock(), "ingress", None)
    assert isinstance(made, Predictions)
    made.turn(PROGRAM, FIRST, 9).over(output_tokens=40)
    assert len([*chain(*made.history.sweep(config.limits.program_ttl_s + 1.0))]) == learnt
    await made.aclose()


async def test_models_are_told_apart(door: Door) -> None:
    for number in range(30):
        await door.turn(ProgramIdentity(f"a{number}", last_turn=True), {**FIRST, "model": "tiny"}, answer(400))
        await door.turn(ProgramIdentity(f"b{number}", last_turn=True), {**FIRST, "model": "coder"}, answer(10))
    tiny = (await door.turn(ProgramIdentity("c", last_turn=True), {**FIRST, "model": "tiny"}, answer(1))).forecast
    coder = (await door.turn(ProgramIdentity("d", last_turn=True), {**FIRST, "model": "coder"}, answer(1))).forecast
    assert coder.output_tokens < 100 < 300 < tiny.output_tokens


async def test_a_bug_of_ours_costs_a_forecast_and_no_turn(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(door.predictions.history, "ended", broken)
    assert (await door.turn(PROGRAM, FIRST, answer(40))).forecast is not None
    monkeypatch.setattr(door.predictions.history, "arrived", broken)
    assert (await door.turn(PROGRAM, FIRST, answer(40))).forecast is None
    assert door.predictions.unread == 2


async def test_between_programs_that_ended_together_other_work_is_done(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.dispatch.predictions.SWEEP_S", 0.0)
    order: list[str] = []
    for number in range(5):
        await door.turn(ProgramIdentity(f"p{number}"), FIRST, stream(1))
    door.clock.advance(1000.0)
    monkeypatch.setattr(door.client, "observe", lambda news: order.append("learnt"))
    door.predictions.open()
    async with asyncio.timeout(20):
        while order.count("learnt") < 5:
            await asyncio.sleep(0)
            order.append("other")
    assert ["learnt", "learnt"] not in [order[n : n + 2] for n in range(len(order))]
    await door.predictions.aclose()


async def test_a_sweep_that_fails_once_goes_on(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that end without a word, and the metrics, depend on the sweep for as long as the process lives."""
    sweeps, went_on = 0, asyncio.Event()

    def sweep(now_s: float) -> list[Any]:
        nonlocal sweeps
        sweeps += 1
        if sweeps == 1:
            raise ZeroDivisionError("a bug")
        went_on.set()
        return []

    monkeypatch.setattr(door.predictions.history, "sweep", sweep)
    monkeypatch.setattr("cluster.dispatch.predictions.SWEEP_S", 0.0)
    monkeypatch.setattr("cluster.core.supervision.FIRST_BACKOFF_S", 0.0)
    door.predictions.open()
    async with asyncio.timeout(20):
        await went_on.wait()
