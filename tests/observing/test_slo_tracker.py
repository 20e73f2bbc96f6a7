"""One ingress, or two with a real Redis between them: what is recorded of the turns that clients send."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from cluster.api.openai import SSE_DONE
from cluster.api.ray_errors import as_http_error
from cluster.config.schema import CaesuraConfig
from cluster.core.clock import ManualClock
from cluster.core.errors import BadRequest, HttpError, Overloaded, Quarantined, ReplicaLost
from cluster.core.program import ProgramIdentity
from cluster.core.slo import Outcome, Tally
from cluster.core.supervision import UNHEALTHY_AFTER
from cluster.local.embedded_redis import EmbeddedRedis
from cluster.observing import catalogue as metrics
from cluster.observing.program_tracker import GRACE_S, Exchanged, SharedSloTracker
from cluster.observing.slo_tracker import MeasuredAnswers, SloTracker, outcome_of
from cluster.store.slo_sums import Part, Question, SloSumStore, Whole
from tests.observing.recorded import Recorded

CONFIG = CaesuraConfig.model_validate(
    {
        "slo": {"ttft_s": 1.0},
        "tenants": {"fast": {"slo": {"ttft_s": 0.1}}, "long": {"slo": {"ttft_s": 0.1, "slowdown": 4.0}}},
        "http": {"trust_request_start": True, "request_timeout_s": 60.0},
        "limits": {"program_ttl_s": 100.0},
    }
)
IDLE_S = CONFIG.limits.program_ttl_s


class Ingress:
    """A tracker, with the clock of all ingresses."""

    def __init__(self, clock: ManualClock, shared: SharedSloTracker | None = None) -> None:
        self.clock = clock
        self.tracker = SloTracker(CONFIG, clock, shared, wall=lambda: 5000.0)

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
        turn = self.tracker.begin("tiny", identity, self.clock.now_s())
        self.clock.advance(ttft)
        turn.received(1)
        self.clock.advance(1.0)
        turn.received(11)
        turn.over(outcome)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def ingress(clock: ManualClock) -> Ingress:
    return Ingress(clock)


def test_a_turn_is_counted_with_its_latencies(ingress: Ingress, recorded: Recorded) -> None:
    ingress.turn(None)
    assert recorded.of(metrics.REQUESTS) == {("tiny", "ok", "default"): 1}
    assert recorded.of(metrics.GOOD_REQUESTS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.TTFT) == {("tiny", "default"): pytest.approx(0.5)}
    assert recorded.of(metrics.TPOT) == {("tiny", "default"): pytest.approx(0.1)}
    assert recorded.of(metrics.E2E) == {("tiny", "default"): pytest.approx(1.5)}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}


def test_turns_and_misses_are_counted_for_the_autoscaler(ingress: Ingress) -> None:
    """Rejections and failures are misses. A client that leaves is not, and an invalid request is no turn."""
    ingress.turn("a")
    ingress.turn("a", ttft=2.0)
    for outcome in (Outcome.REJECTED, Outcome.FAILED, Outcome.TIMED_OUT, Outcome.UNFINISHED, None):
        ingress.turn("a", outcome)
    assert (ingress.tracker.counts("tiny"), ingress.tracker.counts("other")) == ((5, 4), (0, 0))


def test_a_turn_whose_first_token_is_late_counts_before_it_ends(ingress: Ingress) -> None:
    turn = ingress.tracker.begin("tiny", ProgramIdentity("a"), ingress.clock.now_s())
    ingress.clock.advance(0.9)
    assert ingress.tracker.counts("tiny") == (0, 0)
    ingress.clock.advance(0.2)
    assert ingress.tracker.counts("tiny") == (1, 1)
    turn.received(1)
    ingress.clock.advance(50.0)
    assert ingress.tracker.counts("tiny") == (1, 1), "and while its answer streams"
    turn.over(Outcome.OK)
    assert ingress.tracker.counts("tiny") == (1, 1), "it counts once"


def test_a_turn_whose_first_token_was_in_time_is_not_late_while_its_answer_streams(ingress: Ingress) -> None:
    turn = ingress.tracker.begin("tiny", ProgramIdentity("a"), ingress.clock.now_s())
    ingress.clock.advance(0.9)
    turn.received(1)
    ingress.clock.advance(50.0)
    assert ingress.tracker.counts("tiny") == (0, 0)


@pytest.mark.parametrize(("alone_s", "late"), [(0.2, 0), (0.1, 1), (0.01, 1)])
def test_a_long_prompt_in_flight_is_late_by_its_own_bound(ingress: Ingress, alone_s: float, late: int) -> None:
    """The bound is four times the seconds alone, and 0.1 s at least. They are known with the first token."""
    turn = ingress.tracker.begin("tiny", ProgramIdentity(tenant="long"), ingress.clock.now_s())
    ingress.clock.advance(0.5)
    assert ingress.tracker.counts("tiny") == (0, 0)
    turn.takes_alone(alone_s)
    turn.received(1)
    assert ingress.tracker.counts("tiny") == (late, late)
    turn.over(Outcome.OK)
    assert ingress.tracker.counts("tiny") == (1, late)


def test_a_tenant_has_its_own_bounds_and_one_without_a_name_no_label(ingress: Ingress, recorded: Recorded) -> None:
    ingress.turn(None, tenant="fast")
    ingress.turn(None, tenant="somebody")
    assert recorded.of(metrics.GOOD_REQUESTS) == {("tiny", "other"): 1}
    assert recorded.of(metrics.SLO_MISSES) == {("ttft", "tiny", "fast"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "fast", "late"): 1, ("tiny", "other", "good"): 1}


@pytest.mark.parametrize(("alone_s", "missed"), [(0.2, False), (0.1, True), (0.01, True), (None, True)])
async def test_a_prompt_that_takes_long_alone_has_a_longer_bound(
    ingress: Ingress, recorded: Recorded, alone_s: float | None, missed: bool
) -> None:
    """Its first token comes after 0.5 s. The bound is four times the seconds alone, and 0.1 s at least."""
    turn = ingress.tracker.begin("tiny", ProgramIdentity(tenant="long"), ingress.clock.now_s())
    answers = MeasuredAnswers(Answer(ingress.clock, EVENT, SSE_DONE, each_s=0.5, alone_s=alone_s), turn, as_http_error)
    assert len([piece async for piece in answers]) == 2
    assert recorded.of(metrics.SLO_MISSES) == ({("ttft", "tiny", "long"): 1} if missed else {})
    verdict = "late" if missed else "good"
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "long", verdict): 1}


def test_a_turn_that_may_wait_for_all_others_has_no_bound(ingress: Ingress, recorded: Recorded) -> None:
    sheddable = ProgramIdentity(tenant="fast").yielding()
    turn = ingress.tracker.begin("tiny", sheddable, ingress.clock.now_s())
    ingress.clock.advance(50.0)
    assert ingress.tracker.counts("tiny") == (0, 0)
    turn.received(1)
    turn.over(Outcome.OK)
    assert recorded.of(metrics.GOOD_REQUESTS) == {("tiny", "fast"): 1}
    assert ingress.tracker.counts("tiny") == (1, 0)


def test_a_rejection_of_a_turn_that_is_sent_again_is_not_its_end(ingress: Ingress, recorded: Recorded) -> None:
    for outcome in (Outcome.REJECTED, Outcome.OK):
        turn = ingress.tracker.begin("tiny", ProgramIdentity("p"), ingress.clock.now_s(), is_repeated=True)
        turn.received(1)
        turn.over(outcome)
    assert ingress.tracker.counts("tiny") == (1, 0)


def test_what_waited_in_front_of_us_counts(ingress: Ingress, recorded: Recorded) -> None:
    arrived_s = ingress.tracker.arrival_s({"x-request-start": "t=4997.0"})
    ingress.tracker.begin("tiny", ProgramIdentity(), arrived_s).over(Outcome.OK)
    assert recorded.of(metrics.TTFT) == {("tiny", "default"): pytest.approx(3.0)}
    assert recorded.of(metrics.SLO_MISSES) == {("ttft", "tiny", "default"): 1}


def test_a_turn_rejected_before_its_body_is_read_fails_its_program(ingress: Ingress, recorded: Recorded) -> None:
    ingress.tracker.record_rejection({"x-session-id": "p"}, reason="tenant_rate")
    assert recorded.of(metrics.REQUESTS_REJECTED) == {("", "tenant_rate"): 1}
    assert recorded.of(metrics.REQUESTS) == {("tiny", "rejected", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}
    ingress.turn("p", last=True)
    assert sum(recorded.of(metrics.PROGRAM_ENDS).values()) == sum(recorded.of(metrics.PROGRAMS).values()) == 1


def test_what_the_client_got_wrong_is_no_turn(ingress: Ingress, recorded: Recorded) -> None:
    ingress.turn("p", None)
    assert recorded.of(metrics.REQUESTS) == recorded.of(metrics.PROGRAMS) == {}


def test_a_program_that_fails_between_its_turns(ingress: Ingress, recorded: Recorded) -> None:
    ingress.turn("p")
    ingress.tracker.program_ended("default/p", Outcome.FAILED)
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
    """Pieces that come one after the other, each with one token."""

    def __init__(
        self,
        clock: ManualClock,
        *pieces: bytes | HttpError | Exception,
        each_s: float = 1.0,
        alone_s: float | None = None,
    ) -> None:
        self._clock, self._pieces, self._each_s = clock, list(pieces), each_s
        self.output_tokens = 0
        self.alone_s = alone_s

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> bytes | HttpError:
        if not self._pieces:
            raise StopAsyncIteration
        self._clock.advance(self._each_s)
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
async def test_an_answer_s_end_is_the_turn_s(ingress: Ingress, recorded: Recorded, case: str) -> None:
    pieces, outcome = ANSWERS[case]
    turn = ingress.tracker.begin("tiny", ProgramIdentity(), ingress.clock.now_s())
    answers = MeasuredAnswers(Answer(ingress.clock, *pieces), turn, as_http_error)
    try:
        async for _ in answers:
            pass
    except TimeoutError:
        pass
    answers.cancel()
    assert recorded.of(metrics.REQUESTS) == {("tiny", outcome, "default"): 1}


async def test_a_client_that_goes_away_leaves_an_unfinished_turn(ingress: Ingress, recorded: Recorded) -> None:
    turn = ingress.tracker.begin("tiny", ProgramIdentity("p", last_turn=True), ingress.clock.now_s())
    answers = MeasuredAnswers(Answer(ingress.clock, EVENT, EVENT), turn, as_http_error)
    await anext(answers)
    answers.cancel()
    assert recorded.of(metrics.REQUESTS) == {("tiny", "unfinished", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "abandoned"): 1}


async def test_a_turn_whose_time_is_up_is_not_its_client_s_doing(ingress: Ingress, recorded: Recorded) -> None:
    turn = ingress.tracker.begin("tiny", ProgramIdentity(), ingress.clock.now_s())
    ingress.clock.advance(61)
    turn.gone()
    assert recorded.of(metrics.REQUESTS) == {("tiny", "timed_out", "default"): 1}


# --- several ingresses ----------------------------------------------------------------------------------------------


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def ingresses(redis: EmbeddedRedis, clock: ManualClock) -> AsyncIterator[list[Ingress]]:
    made = []
    for _ in range(2):
        store = SloSumStore(redis.url, timeout_s=10.0, expiry_s=2 * IDLE_S, clock=clock)
        made.append(Ingress(clock, SharedSloTracker(store, clock, IDLE_S)))
    yield made
    for ingress in made:
        await ingress.tracker.aclose()


async def settle(ingresses: list[Ingress]) -> None:
    """Exchange until all programs have their verdict."""
    for _ in range(2):
        for ingress in ingresses:
            ingress.tracker.sweep()
            await ingress.tracker.exchange()
        ingresses[0].clock.advance(GRACE_S)


async def test_a_program_that_comes_through_two_ingresses_is_one(ingresses: list[Ingress], recorded: Recorded) -> None:
    a, b = ingresses
    a.turn("p")
    b.turn("p", ttft=3.0)
    await settle(ingresses)
    a.turn("p", last=True)
    await settle(ingresses)
    assert recorded.of(metrics.REQUESTS) == {("tiny", "ok", "default"): 3}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "late"): 1}
    assert recorded.of(metrics.PROGRAM_TURNS) == {("tiny", "default"): 3}
    a.clock.advance(IDLE_S)  # what the other ingress still knows of it is not judged again
    await settle(ingresses)
    assert sum(recorded.of(metrics.PROGRAM_ENDS).values()) == 1
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {}


@pytest.mark.parametrize("through", [(0, 0), (0, 1), (1, 0)])
async def test_a_program_lasts_from_its_first_turn_whoever_reports_first(
    ingresses: list[Ingress], redis: EmbeddedRedis, through: tuple[int, int]
) -> None:
    first, last = (ingresses[number] for number in through)
    began_s = first.clock.now_s()
    first.turn("p", ttft=20.0)
    last.turn("p")
    for ingress in ingresses:
        await ingress.tracker.exchange()
    spent_s = first.clock.now_s() - began_s
    store = SloSumStore(redis.url, timeout_s=10.0, expiry_s=IDLE_S, clock=first.clock)
    [judged] = (
        await store.judge([Question(ProgramIdentity("p", tenant="default").key, idle_s=0.0, remember_s=0.0)]) or []
    )
    await store.close()
    assert isinstance(judged, Whole) and judged.wall_s == pytest.approx(spent_s, abs=1.0)


async def test_no_program_is_shorter_than_nothing(redis: EmbeddedRedis, clock: ManualClock) -> None:
    """The server's clock is set back while the program runs."""
    store = SloSumStore(redis.url, timeout_s=10.0, expiry_s=IDLE_S, clock=clock)
    await store.add([Part("p", Tally(), age_s=0.0)])
    async with Redis.from_url(redis.url) as raw:
        [key] = await raw.keys("caesura:v1:ledger:*")
        await raw.hincrby(key, "arrived", 3_600_000)
    [judged] = await store.judge([Question("p", idle_s=0.0, remember_s=0.0)]) or []
    await store.close()
    assert isinstance(judged, Whole) and judged.wall_s == 0.0


async def test_a_turn_that_is_reported_late_still_counts(ingresses: list[Ingress], recorded: Recorded) -> None:
    a, b = ingresses
    b.turn("p", ttft=3.0)  # reported after the other ingress has seen the end
    a.turn("p", last=True)
    await a.tracker.exchange()
    await b.tracker.exchange()
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "late"): 1}


async def test_a_program_fails_once_through_two_ingresses(ingresses: list[Ingress], recorded: Recorded) -> None:
    a, b = ingresses
    a.turn("p", Outcome.FAILED)
    await settle(ingresses)
    b.turn("p", Outcome.REJECTED)
    b.turn("p", last=True)
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}


async def test_a_failure_between_turns_reaches_the_verdict(ingresses: list[Ingress], recorded: Recorded) -> None:
    a, b = ingresses
    b.turn("p")
    a.turn("p")
    a.tracker.program_ended("default/p", Outcome.FAILED)
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "failed"): 1}


async def test_without_the_store_each_ingress_judges_what_it_saw(
    ingresses: list[Ingress], redis: EmbeddedRedis, recorded: Recorded
) -> None:
    redis.stop()
    ingresses[0].turn("p", last=True)
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAMS) == {("tiny", "default"): 1}
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {("slo_tracker", "tiny", "store_gone"): 2}
    redis.start()
    ingresses[1].turn("q", last=True)
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 2}
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {("slo_tracker", "tiny", "store_gone"): 2}


async def test_a_store_that_has_lost_the_program(
    ingresses: list[Ingress], redis: EmbeddedRedis, recorded: Recorded
) -> None:
    ingresses[0].turn("p")
    await ingresses[0].tracker.exchange()
    async with Redis.from_url(redis.url) as client:
        await client.flushall()
    ingresses[0].turn("p", last=True)
    await settle(ingresses)
    assert recorded.of(metrics.PROGRAM_ENDS) == {("tiny", "default", "good"): 1}
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {("slo_tracker", "tiny", "store_lost"): 1}


class FailingSharedTracker(SharedSloTracker):
    """Its exchanges raise until `works`; ``exchanged`` is set by the first that does not."""

    def __init__(self, store: SloSumStore, clock: ManualClock, failures: int) -> None:
        super().__init__(store, clock, IDLE_S)
        self.failures = failures
        self.exchanged = asyncio.Event()

    async def exchange(self) -> Exchanged:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a bug")
        self.exchanged.set()
        return Exchanged()


async def at_once(_: float) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(("failures", "healthy"), [(1, True), (UNHEALTHY_AFTER, False)])
async def test_the_background_loop_goes_on_after_a_bug_and_its_failures_are_seen(
    clock: ManualClock, failures: int, healthy: bool
) -> None:
    store = SloSumStore("redis://127.0.0.1:9", timeout_s=1.0, expiry_s=IDLE_S, clock=clock)
    shared = FailingSharedTracker(store, clock, failures)
    tracker = SloTracker(CONFIG, clock, shared, sleep=at_once)
    tracker.open()
    async with asyncio.timeout(30):
        await shared.exchanged.wait()
    assert (not tracker.failed) is healthy
    await tracker.aclose()
