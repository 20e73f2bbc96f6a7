"""One door, or two with a real Redis between them: what is counted of the turns that clients bring."""

from collections.abc import AsyncIterator, Iterator

import pytest
from recorded import Recorded
from redis.asyncio import Redis

from cluster import metrics
from cluster.clock import ManualClock
from cluster.config import CaesuraConfig
from cluster.embedded_redis import EmbeddedRedis
from cluster.errors import BadRequest, HttpError, Overloaded, Quarantined, ReplicaLost
from cluster.goodput import Outcome, Tally
from cluster.http_errors import SSE_DONE
from cluster.ledger_store import LedgerStore, Part, Question, Whole
from cluster.observing.measured_answers import MeasuredAnswers, outcome_of
from cluster.observing.shared_ledger import GRACE_S, SharedLedger
from cluster.observing.turns import TurnBook
from cluster.program import ProgramIdentity
from cluster.ray_errors import as_http_error

CONFIG = CaesuraConfig.model_validate(
    {
        "slo": {"ttft_s": 1.0},
        "tenants": {"fast": {"slo": {"ttft_s": 0.1}}},
        "http": {"trust_request_start": True, "request_timeout_s": 60.0},
        "control": {"idle_program_s": 100.0},
    }
)
IDLE_S = CONFIG.control.idle_program_s


class Door:
    """A book, with the clock of all."""

    def __init__(self, clock: ManualClock, shared: SharedLedger | None = None) -> None:
        self.clock = clock
        self.book = TurnBook(CONFIG, clock, shared, wall=lambda: 5000.0)

    def turn(
        self,
        program: str | None,
        outcome: Outcome | None = Outcome.OK,
        *,
        ttft: float = 0.5,
        last: bool = False,
        tenant: str = "default",
    ) -> None:
        identity = ProgramIdentity(program, tenant=tenant, last_turn=last)
        turn = self.book.begin("tiny", identity, self.clock.now_s())
        self.clock.advance(ttft)
        turn.received(1)
        self.clock.advance(1.0)
        turn.received(11)
        turn.over(outcome)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def door(clock: ManualClock) -> Door:
    return Door(clock)


def test_a_turn_is_counted_with_its_latencies(door: Door, recorded: Recorded) -> None:
    door.turn(None)
    assert recorded.of(metrics.REQUESTS) == {("tiny", "ok", "default"): 1}
    assert recorded.of(metrics.GOOD_REQUESTS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.TTFT) == {("tiny", "default"): pytest.approx(0.5)}
    assert recorded.of(metrics.TPOT) == {("tiny", "default"): pytest.approx(0.1)}
    assert recorded.of(metrics.E2E) == {("tiny", "default"): pytest.approx(1.5)}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}


def test_a_tenant_has_its_own_bounds_and_one_without_a_name_no_label(door: Door, recorded: Recorded) -> None:
    door.turn(None, tenant="fast")
    door.turn(None, tenant="somebody")
    assert recorded.of(metrics.GOOD_REQUESTS) == {("tiny", "other"): 1}
    assert recorded.of(metrics.SLO_MISSES) == {("ttft", "tiny", "fast"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "fast", "late"): 1, ("tiny", "other", "good"): 1}


def test_what_waited_in_front_of_us_counts(door: Door, recorded: Recorded) -> None:
    arrived_s = door.book.arrival_s({"x-request-start": "t=4997.0"})
    door.book.begin("tiny", ProgramIdentity(), arrived_s).over(Outcome.OK)
    assert recorded.of(metrics.TTFT) == {("tiny", "default"): pytest.approx(3.0)}
    assert recorded.of(metrics.SLO_MISSES) == {("ttft", "tiny", "default"): 1}


def test_a_turn_refused_at_the_door_fails_its_program(door: Door, recorded: Recorded) -> None:
    door.book.refused({"x-session-id": "p"})
    assert recorded.of(metrics.REQUESTS) == {("tiny", "rejected", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}
    door.turn("p", last=True)
    assert sum(recorded.of(metrics.PROGRAM_ENDS).values()) == sum(recorded.of(metrics.PROGRAMS).values()) == 1


def test_what_the_client_got_wrong_is_no_turn(door: Door, recorded: Recorded) -> None:
    door.turn("p", None)
    assert recorded.of(metrics.REQUESTS) == recorded.of(metrics.PROGRAMS) == {}


def test_a_program_that_fails_between_its_turns(door: Door, recorded: Recorded) -> None:
    door.turn("p")
    door.book.program_ended("default/p", Outcome.FAILED)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded("full"), Outcome.REJECTED),
        (Overloaded("full", status=429), Outcome.REJECTED),
        (BadRequest("wrong"), None),
        (BadRequest("late", status=408), Outcome.TIMED_OUT),
        (HttpError("late", status=504), Outcome.TIMED_OUT),
        (Quarantined("it kills"), Outcome.FAILED),
        (ReplicaLost("dead"), Outcome.FAILED),
        (HttpError("bug"), Outcome.FAILED),
    ],
)
def test_what_a_refusal_makes_of_a_turn(error: HttpError, outcome: Outcome | None) -> None:
    assert outcome_of(error) is outcome


class Answer:
    """Pieces that come one second after the other, each with one token."""

    def __init__(self, clock: ManualClock, *pieces: bytes | HttpError | Exception) -> None:
        self._clock, self._pieces = clock, list(pieces)
        self.output_tokens = 0

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> bytes | HttpError:
        if not self._pieces:
            raise StopAsyncIteration
        self._clock.advance(1.0)
        self.output_tokens += 1
        piece = self._pieces.pop(0)
        if isinstance(piece, Exception) and not isinstance(piece, HttpError):
            raise piece
        return piece

    def cancel(self) -> None:
        self._pieces.clear()


EVENT = b'data: {"choices": []}\n\n'
ANSWERS: dict[str, tuple[tuple[bytes | HttpError | Exception, ...], str]] = {
    "a whole stream": ((EVENT, EVENT, EVENT + SSE_DONE), "ok"),
    "a whole answer": ((b'{"usage": {"prompt_tokens": 3, "completion_tokens": 7}}',), "ok"),
    "a stream that breaks": ((EVENT, ReplicaLost("dead")), "failed"),
    "a stream that ends without its end": ((EVENT,), "failed"),
    "an error event": ((EVENT, b'data: {"error": {}}\n\n' + SSE_DONE), "failed"),
    "a refusal": ((Overloaded("full"),), "rejected"),
    "no replica in time": ((TimeoutError(),), "timed_out"),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_an_answer_s_end_is_the_turn_s(door: Door, recorded: Recorded, case: str) -> None:
    pieces, outcome = ANSWERS[case]
    turn = door.book.begin("tiny", ProgramIdentity(), door.clock.now_s())
    answers = MeasuredAnswers(Answer(door.clock, *pieces), turn, as_http_error)
    try:
        async for _ in answers:
            pass
    except TimeoutError:
        pass
    answers.cancel()
    assert recorded.of(metrics.REQUESTS) == {("tiny", outcome, "default"): 1}


async def test_a_client_that_goes_away_leaves_an_unfinished_turn(door: Door, recorded: Recorded) -> None:
    turn = door.book.begin("tiny", ProgramIdentity("p", last_turn=True), door.clock.now_s())
    answers = MeasuredAnswers(Answer(door.clock, EVENT, EVENT), turn, as_http_error)
    await anext(answers)
    answers.cancel()
    assert recorded.of(metrics.REQUESTS) == {("tiny", "unfinished", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "abandoned"): 1}


async def test_a_turn_whose_time_is_up_is_not_its_client_s_doing(door: Door, recorded: Recorded) -> None:
    turn = door.book.begin("tiny", ProgramIdentity(), door.clock.now_s())
    door.clock.advance(61)
    turn.gone()
    assert recorded.of(metrics.REQUESTS) == {("tiny", "timed_out", "default"): 1}


# --- several doors --------------------------------------------------------------------------------------------------


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def doors(redis: EmbeddedRedis, clock: ManualClock) -> AsyncIterator[list[Door]]:
    made = []
    for _ in range(2):
        store = LedgerStore(redis.url, timeout_s=10.0, expiry_s=2 * IDLE_S, clock=clock)
        made.append(Door(clock, SharedLedger(store, clock, IDLE_S)))
    yield made
    for door in made:
        await door.book.aclose()


async def settle(doors: list[Door]) -> None:
    """Until everything is told and judged."""
    for _ in range(2):
        for door in doors:
            door.book.sweep()
            await door.book.exchange()
        doors[0].clock.advance(GRACE_S)


async def test_a_program_that_comes_through_two_doors_is_one(doors: list[Door], recorded: Recorded) -> None:
    a, b = doors
    a.turn("p")
    b.turn("p", ttft=3.0)
    await settle(doors)
    a.turn("p", last=True)
    await settle(doors)
    assert recorded.of(metrics.REQUESTS) == {("tiny", "ok", "default"): 3}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "late"): 1}
    assert recorded.of(metrics.PROGRAM_TURNS) == {("tiny", "default"): 3}
    a.clock.advance(IDLE_S)  # what the other door still knows of it is not judged again
    await settle(doors)
    assert sum(recorded.of(metrics.PROGRAM_ENDS).values()) == 1
    assert recorded.of(metrics.LEDGER_FALLBACKS) == {}


async def test_no_program_is_shorter_than_nothing(redis: EmbeddedRedis, clock: ManualClock) -> None:
    """The server's clock is set back while the program runs."""
    store = LedgerStore(redis.url, timeout_s=10.0, expiry_s=IDLE_S, clock=clock)
    await store.add([Part("p", Tally(), age_s=0.0)])
    async with Redis.from_url(redis.url) as raw:
        [key] = await raw.keys("caesura:v1:ledger:*")
        await raw.hincrby(key, "arrived", 3_600_000)
    [judged] = await store.judge([Question("p", idle_s=0.0, remember_s=0.0)]) or []
    await store.close()
    assert isinstance(judged, Whole) and judged.wall_s == 0.0


async def test_a_turn_that_is_told_late_still_counts(doors: list[Door], recorded: Recorded) -> None:
    a, b = doors
    b.turn("p", ttft=3.0)  # told after the other door has seen the end
    a.turn("p", last=True)
    await a.book.exchange()
    await b.book.exchange()
    await settle(doors)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "late"): 1}


async def test_a_program_fails_once_through_two_doors(doors: list[Door], recorded: Recorded) -> None:
    a, b = doors
    a.turn("p", Outcome.FAILED)
    await settle(doors)
    b.turn("p", Outcome.REJECTED)
    b.turn("p", last=True)
    await settle(doors)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}


async def test_a_failure_between_turns_reaches_the_verdict(doors: list[Door], recorded: Recorded) -> None:
    a, b = doors
    b.turn("p")
    a.turn("p")
    a.book.program_ended("default/p", Outcome.FAILED)
    await settle(doors)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}


async def test_without_the_store_each_door_judges_what_it_saw(
    doors: list[Door], redis: EmbeddedRedis, recorded: Recorded
) -> None:
    redis.stop()
    doors[0].turn("p", last=True)
    await settle(doors)
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}
    assert recorded.of(metrics.LEDGER_FALLBACKS) == {("store_gone",): 2}
    redis.start()
    doors[1].turn("q", last=True)
    await settle(doors)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 2}
    assert recorded.of(metrics.LEDGER_FALLBACKS) == {("store_gone",): 2}


async def test_a_store_that_has_lost_the_program(doors: list[Door], redis: EmbeddedRedis, recorded: Recorded) -> None:
    doors[0].turn("p")
    await doors[0].book.exchange()
    async with Redis.from_url(redis.url) as client:
        await client.flushall()
    doors[0].turn("p", last=True)
    await settle(doors)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}
    assert recorded.of(metrics.LEDGER_FALLBACKS) == {("store_lost",): 1}
