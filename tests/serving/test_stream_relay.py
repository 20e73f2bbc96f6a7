"""Where a replica dies, another goes on; what the client gets has no gap and no repeat."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.core.errors import HttpError, Overloaded, Quarantined, ReplicaLost
from cluster.core.stream import Begun, Progress, StreamChunk, joined
from cluster.dispatch.failover import DEAD_ON_ARRIVAL_ATTEMPTS, ROOM_ATTEMPTS, FailoverStream, ends_answer

EVENTS = [b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", b"data: [DONE]\n\n"]
BEGUN = Begun(b"prompt", 0)


class Replicas:
    """Each attempt is served by the next of ``lives``: how many pieces it gives, and what then ends it.

    Real in what matters here: it begins behind the events that it is told were sent.
    """

    def __init__(self, *lives: tuple[int, Any], begun: Begun = BEGUN) -> None:
        self._lives = list(lives)
        self._begun = begun
        self.asked: list[Progress | None] = []
        self.calls: list[Call] = []

    async def __call__(self, so_far: Progress | None) -> "Call":
        self.asked.append(so_far)
        count, end = self._lives.pop(0)
        sent = 0 if so_far is None else so_far.events
        pieces: list[Any] = [
            StreamChunk(Progress(1, bytes([number]), b"1", self._begun if number == 0 else None), EVENTS[number])
            for number in range(sent, min(sent + count, len(EVENTS)))
        ]
        self.calls.append(Call([*pieces, *([] if end is None else [end])]))
        return self.calls[-1]


class Call:
    def __init__(self, pieces: list[Any]) -> None:
        self._pieces = pieces
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._pieces:
            raise StopAsyncIteration
        piece = self._pieces.pop(0)
        if isinstance(piece, HttpError) or not isinstance(piece, Exception):
            return piece
        raise piece

    def cancel(self) -> None:
        self.cancelled = True

    def over(self) -> None:
        """Nothing is kept."""


class Death(Exception):
    """As Ray raises it."""


def as_error(exception: BaseException) -> HttpError:
    return ReplicaLost("it died") if isinstance(exception, Death) else HttpError("internal error")


class Blamed:
    count = 0

    async def __call__(self) -> None:
        self.count += 1


def relay(replicas: Replicas, blamed: Blamed | None = None) -> FailoverStream[bytes]:
    return FailoverStream(replicas, ends=ends_answer, error_map=as_error, blame=blamed or Blamed())


async def told(relay: FailoverStream[bytes]) -> list[bytes | HttpError]:
    return [piece async for piece in relay]


async def test_a_stream_of_one_replica_passes_as_it_is() -> None:
    replicas = Replicas((9, None))
    assert await told(relay(replicas)) == EVENTS
    assert replicas.asked == [None]


@pytest.mark.parametrize("end", [Death(), ReplicaLost("its engine died"), None], ids=["died", "told", "broke off"])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_another_replica_goes_on(count: int, end: Exception | None) -> None:
    replicas, blamed = Replicas((count, end), (9, None)), Blamed()
    assert await told(relay(replicas, blamed)) == EVENTS
    assert replicas.asked == [None, Progress(count, bytes(range(count)), b"1" * count, BEGUN)]
    assert blamed.count == 0


@pytest.mark.parametrize("alone_s", [None, 0.5], ids=["never known", "known from the first piece on"])
async def test_of_each_piece_the_time_that_its_turn_takes_alone_is_read_once(alone_s: float | None) -> None:
    class Step(Progress, frozen=True):
        def __getattribute__(self, name: str) -> Any:
            nonlocal read
            read += name == "alone_s"
            return super().__getattribute__(name)

    async def attempt(_: Progress | None) -> Call:
        steps = [Step(1, alone_s=alone_s), *(Step(1) for _ in range(100))]
        return Call([StreamChunk(step, EVENTS[0]) for step in steps] + [StreamChunk(Step(1), EVENTS[-1])])

    read = 0
    whole: FailoverStream[bytes] = FailoverStream(attempt, ends=ends_answer, error_map=as_error, blame=Blamed())
    assert whole.alone_s is None
    assert [whole.alone_s async for _ in whole] == [alone_s] * 102
    assert read == 102


async def test_of_what_has_told_nothing_all_is_asked_again() -> None:
    replicas = Replicas((0, Death()), (9, None))
    assert await told(relay(replicas)) == EVENTS
    assert replicas.asked == [None, None]


async def test_an_answer_that_is_no_stream_is_asked_for_again_and_comes_once() -> None:
    async def attempt(_: Progress | None) -> Call:
        return calls.pop(0)

    calls = [Call([Death()]), Call([b"{}"])]
    whole: FailoverStream[bytes] = FailoverStream(attempt, ends=ends_answer, error_map=as_error, blame=Blamed())
    assert [piece async for piece in whole] == [b"{}"]


async def test_the_second_death_is_blamed_on_the_request() -> None:
    replicas, blamed = Replicas((1, Death()), (1, Death())), Blamed()
    *events, end = await told(relay(replicas, blamed))
    assert events == EVENTS[:2]
    assert isinstance(end, Quarantined)
    assert (end.status, end.code, blamed.count) == (422, "quarantined", 1)


async def test_the_first_death_is_blamed_on_the_request_where_the_replica_says_so() -> None:
    death = ReplicaLost("the engine died")
    death.culprit = True
    replicas, blamed = Replicas((1, death)), Blamed()
    *events, end = await told(relay(replicas, blamed))
    assert (events, len(replicas.asked)) == (EVENTS[:1], 1)
    assert isinstance(end, Quarantined)
    assert (end.status, end.code, blamed.count) == (422, "quarantined", 1)


async def test_a_death_after_the_end_is_no_loss() -> None:
    replicas = Replicas((4, Death()))
    whole = relay(replicas)
    assert await told(whole) == EVENTS
    whole.cancel()
    assert not replicas.calls[0].cancelled


async def test_a_stream_that_no_other_can_go_on_with_says_why() -> None:
    replicas, blamed = Replicas((2, Death()), begun=replace(BEGUN, obstacle="logprobs")), Blamed()
    *events, end = await told(relay(replicas, blamed))
    assert events == EVENTS[:2]
    assert isinstance(end, ReplicaLost)
    assert "logprobs" in end.message
    assert blamed.count == 0


async def test_it_may_be_asked_again_all_the_same_while_nothing_was_told() -> None:
    replicas = Replicas((0, Death()), (9, None), begun=replace(BEGUN, obstacle="logprobs"))
    assert await told(relay(replicas)) == EVENTS


async def test_replicas_that_were_dead_before_are_not_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.dispatch.failover.DEAD_ON_ARRIVAL_WAIT_S", 0.0)
    dead = [(0, ReplicaLost("dead", at_work=False))]
    assert await told(relay(Replicas(*dead * 5, (9, None)))) == EVENTS
    blamed = Blamed()
    [end] = await told(relay(Replicas(*dead * DEAD_ON_ARRIVAL_ATTEMPTS), blamed))
    assert isinstance(end, ReplicaLost)
    assert blamed.count == 0


async def test_what_was_begun_waits_for_a_replica_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.dispatch.failover.ROOM_WAIT_S", 0.0)
    full = [(0, Overloaded("full"))]
    replicas, blamed = Replicas((2, Death()), *full * 3, (9, None)), Blamed()
    assert await told(relay(replicas, blamed)) == EVENTS
    *events, end = await told(relay(Replicas((2, Death()), *full * ROOM_ATTEMPTS), blamed))
    assert events == EVENTS[:2]
    assert isinstance(end, ReplicaLost)
    assert blamed.count == 0


async def test_a_refusal_is_told_and_nobody_else_is_asked() -> None:
    replicas = Replicas((0, Overloaded("full")))
    [end] = await told(relay(replicas))
    assert isinstance(end, Overloaded)
    with pytest.raises(RuntimeError):
        await told(relay(Replicas((1, RuntimeError("a bug")))))


async def test_cancelling_stops_the_replica_that_is_at_work() -> None:
    replicas = Replicas((1, Death()), (9, None))
    whole = relay(replicas)
    await anext(whole)
    await anext(whole)
    whole.cancel()
    assert replicas.calls[1].cancelled


def test_what_steps_add_up_to() -> None:
    steps = [Progress(1, b"a", b"1", BEGUN, created="5", output_tokens=1), Progress(2, b"bc", b"2", output_tokens=2)]
    steps += [Progress(), Progress(prompt_tokens=7)]
    assert joined(steps) == Progress(3, b"abc", b"12", BEGUN, None, "5", output_tokens=3, prompt_tokens=7)
