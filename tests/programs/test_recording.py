"""The record of a turn: begun before it is sent, complete before its client has it, and never silently missing."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import BadRequest, HttpError, Overloaded
from cluster.core.identity import identify
from cluster.core.program import ProgramIdentity
from cluster.core.turn import pack_ids
from cluster.core.turn_tokens import AnswerTokens, TurnTokens, pack_logprobs
from cluster.dispatch import recording
from cluster.dispatch.recording import RecordedAnswers, Recordings, RecordOutcome
from cluster.store.client import StoreFailure, StoreUnavailable
from cluster.store.token_records import FullMemory
from tests.waiting import until

PROGRAM = ProgramIdentity("p", record="tokens")
TOKENS = TurnTokens(pack_ids([1]), (AnswerTokens(0, pack_ids([2]), pack_logprobs([-1.0]), "stop", None, ()),))
DONE = b"data: [DONE]\n\n"
BROKEN = b'data: {"error": {"message": "broken", "code": 500}}\n\n' + DONE
"""The end of a stream whose engine failed."""


class Store:
    """A store that notes what is done to it, and fails as often as a test says."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.full: FullMemory | None = None
        self.failures = 0
        self.forgotten = False

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable(StoreFailure.TIMEOUT)

    async def begin(self, tenant: str, program: str, head: Any, key: bytes) -> int | FullMemory:
        self._fail()
        self.did.append(("begin", tenant, program, head.method))
        return self.full or 7

    async def finish(self, tenant: str, program: str, number: int, ended_s: float, tokens: TurnTokens) -> bool:
        self._fail()
        self.did.append(("finish", tenant, program, number, tokens))
        return not self.forgotten

    async def drop(self, tenant: str, program: str, number: int, key: bytes) -> None:
        self._fail()
        self.did.append(("drop", tenant, program, number))

    async def sweep(self) -> int:
        self._fail()
        self.did.append(("sweep",))
        return 0

    async def close(self) -> None:
        self.did.append(("close",))


class Pieces:
    """An answer that notes in a store when its pieces are taken."""

    def __init__(
        self, store: Store, pieces: Sequence[bytes | HttpError | Exception], record: TurnTokens | None
    ) -> None:
        self._store, self._pieces, self.record = store, iter(pieces), record
        self.output_tokens, self.alone_s = 1, None

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> bytes | HttpError:
        for piece in self._pieces:
            self._store.did.append(("piece",))
            if isinstance(piece, Exception) and not isinstance(piece, HttpError):
                raise piece
            return piece  # type: ignore[return-value]
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._store.did.append(("cancel",))


def turn(
    store: Store, *pieces: bytes | HttpError | Exception, record: TurnTokens | None = TOKENS, **body: Any
) -> tuple[RecordedAnswers, Recordings]:
    recordings = Recordings(store, ManualClock())  # type: ignore[arg-type]
    answers = Pieces(store, pieces, record)
    return RecordedAnswers(answers, recordings, "chat", body, {"x-request-id": "r"}, PROGRAM), recordings


async def taken(answers: RecordedAnswers) -> list[Any]:
    return [piece async for piece in answers]


@pytest.mark.parametrize("last", [DONE, b'{"id": 1}'])
async def test_a_record_begins_before_the_turn_and_is_complete_before_its_end(last: bytes) -> None:
    store = Store()
    answers, recordings = turn(store, b"data: {}\n\n", last)
    await taken(answers)
    begin, *pieces, finish = store.did[:4]
    assert begin == ("begin", "default", "p", "chat")
    assert pieces == [("piece",)] * 2
    assert finish == ("finish", "default", "p", 7, TOKENS)
    assert recordings.counters[RecordOutcome.STORED] == 1
    answers.cancel()
    await asyncio.sleep(0)
    assert ("drop", "default", "p", 7) not in store.did


@pytest.mark.parametrize("full", list(FullMemory))
async def test_a_full_record_rejects_the_turn_before_it_is_sent(full: FullMemory) -> None:
    store = Store()
    store.full = full
    answers, recordings = turn(store, DONE)
    with pytest.raises(Overloaded, match="records") as caught:
        await taken(answers)
    assert (caught.value.status, caught.value.code) == (503, "store_full")
    assert ("piece",) not in store.did
    assert recordings.counters[RecordOutcome.REJECTED] == 1


async def test_without_the_store_no_turn_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LATE_WAIT_S", 0.0)
    store = Store()
    store.failures = recording.BEGIN_ATTEMPTS + 1
    answers, recordings = turn(store, DONE)
    with pytest.raises(Overloaded) as caught:
        await taken(answers)
    assert caught.value.code == "store_unavailable"
    assert recordings.counters[RecordOutcome.REJECTED] == 1
    while len(store.did) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # It may have begun in the store, so that it is removed once the store answers.
    assert [done[0] for done in store.did] == ["begin", "drop"]


async def test_a_record_that_begins_late_is_a_record() -> None:
    store = Store()
    store.failures = recording.BEGIN_ATTEMPTS - 1
    await taken(turn(store, DONE)[0])
    assert [done[0] for done in store.did] == ["begin", "piece", "finish"]


async def test_a_store_that_fails_at_the_end_gets_the_tokens_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LATE_WAIT_S", 0.0)
    store = Store()
    answers, recordings = turn(store, b"data: {}\n\n", DONE)
    await anext(answers)
    store.failures = 3
    assert await anext(answers) == DONE
    while not recordings.counters[RecordOutcome.STORED]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert store.did[-1] == ("finish", "default", "p", 7, TOKENS)


async def test_what_cannot_be_stored_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LATE_WAIT_S", 0.0)
    monkeypatch.setattr(recording, "LATE_ATTEMPTS", 2)
    store = Store()
    answers, recordings = turn(store, b"data: {}\n\n", DONE)
    await anext(answers)
    store.failures = 100
    await anext(answers)
    while not recordings.counters[RecordOutcome.LOST]:  # noqa: ASYNC110
        await asyncio.sleep(0)

    forgetful = Store()
    forgetful.forgotten = True
    answers, recordings = turn(forgetful, DONE)
    await taken(answers)
    assert recordings.counters[RecordOutcome.LOST] == 1

    answers, recordings = turn(Store(), DONE, record=None)
    await taken(answers)
    assert recordings.counters[RecordOutcome.LOST] == 1


@pytest.mark.parametrize("end", [Overloaded("full"), RuntimeError("broken"), BROKEN, None])
async def test_a_turn_without_a_whole_answer_is_removed(end: HttpError | RuntimeError | bytes | None) -> None:
    store = Store()
    answers, recordings = turn(store, b"data: {}\n\n", *([end] if end else []))
    await anext(answers)
    if end is None:
        answers.cancel()  # its client has left
    elif isinstance(end, HttpError | bytes):
        assert await anext(answers) is end
    else:
        with pytest.raises(RuntimeError):
            await anext(answers)
    for _ in range(3):
        await asyncio.sleep(0)
    assert store.did[-1] == ("drop", "default", "p", 7)
    assert recordings.counters == {
        RecordOutcome.STORED: 0, RecordOutcome.REJECTED: 0, RecordOutcome.DROPPED: 1, RecordOutcome.LOST: 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("identity", "body"),
    [
        (ProgramIdentity(record="tokens"), {}),
        (PROGRAM, {"prompt": ["a", "b"]}),
        (PROGRAM, {"prompt": "a", "use_beam_search": True}),
    ],
)
def test_what_cannot_be_recorded_is_refused(identity: ProgramIdentity, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        recording.check_recordable(body, identity)
    assert caught.value.param == "x-record"


def test_a_header_or_a_field_asks_for_a_record() -> None:
    assert identify({"x-record": "tokens"}, {}, "default").identity.record == "tokens"
    found = identify({}, {"agentic_context": {"record": "tokens", "program_id": "p"}}, "default").identity
    assert found == PROGRAM
    assert ProgramIdentity.decode(found.encode()) == PROGRAM
    assert identify({}, {}, "default").identity.record is None
    with pytest.raises(BadRequest) as caught:
        identify({"x-record": "text"}, {}, "default")
    assert caught.value.param == "x-record"


@pytest.mark.parametrize(("failures", "outcome"), [(1, RecordOutcome.STORED), (9, RecordOutcome.LOST)])
async def test_tokens_that_wait_for_the_store_are_not_dropped_at_the_end(failures: int, outcome: RecordOutcome) -> None:
    store = Store()
    _, recordings = turn(store, DONE)
    begun = await recordings.begin("chat", {}, PROGRAM, "r")
    store.failures = failures
    await begun.finish(TOKENS)
    await asyncio.sleep(0)
    await recordings.aclose()
    assert recordings.counters[outcome] == 1


async def test_expired_records_are_deleted_although_nobody_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SWEEP_S", 0.01)
    store = Store()
    _, recordings = turn(store, DONE)
    store.failures = 1
    recordings.open()
    await until(lambda: store.did.count(("sweep",)) > 3)
    assert not recordings.failed
    await recordings.aclose()


async def test_a_removal_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LATE_WAIT_S", 0.0)
    store = Store()
    _, recordings = turn(store, DONE)
    begun = await recordings.begin("chat", {}, PROGRAM, "r")
    store.failures = 3
    begun.drop()
    await until(lambda: store.did[-1] == ("drop", "default", "p", 7))


@pytest.mark.parametrize("steps", range(4))
async def test_a_dropped_turn_is_removed_though_its_ingress_ends(steps: int) -> None:
    """The ingress ends after some steps of the event loop: before the removal begins, or while it fails."""
    store = Store()
    _, recordings = turn(store, DONE)
    begun = await recordings.begin("chat", {}, PROGRAM, "r")
    store.failures = 1 if steps > 1 else 0
    begun.drop()
    for _ in range(steps):
        await asyncio.sleep(0)
    await recordings.aclose()
    assert [done[0] for done in store.did] == ["begin", "drop", "close"]


class SlowStore(Store):
    """It has begun a turn, and its answer does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = True

    async def begin(self, tenant: str, program: str, head: Any, key: bytes) -> int | FullMemory:
        number = await super().begin(tenant, program, head, key)
        if self.slow:
            await asyncio.Event().wait()
        return number


@pytest.mark.parametrize("ends", [False, True])
async def test_a_turn_whose_client_leaves_while_its_record_begins_is_removed(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "LATE_WAIT_S", 0.0)
    store = SlowStore()
    answers, recordings = turn(store, DONE)
    client = asyncio.create_task(taken(answers))
    await until(lambda: store.did)
    store.slow = False
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    if ends:
        await recordings.aclose()
    await until(lambda: ("drop", "default", "p", 7) in store.did)
    assert [done[0] for done in store.did[:3]] == ["begin", "begin", "drop"]
    assert recordings.counters[RecordOutcome.DROPPED] == 1


class HangingStore(Store):
    """Its first removal gets no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def drop(self, tenant: str, program: str, number: int, key: bytes) -> None:
        if not self.asked.is_set():
            self.asked.set()
            await asyncio.Event().wait()
        await super().drop(tenant, program, number, key)


async def test_a_removal_that_is_under_way_when_the_ingress_ends_is_repeated() -> None:
    store = HangingStore()
    _, recordings = turn(store, DONE)
    (await recordings.begin("chat", {}, PROGRAM, "r")).drop()
    await store.asked.wait()
    await recordings.aclose()
    assert [done[0] for done in store.did] == ["begin", "drop", "close"]


@pytest.mark.parametrize(("failures", "did"), [(0, ["begin", "drop", "close"]), (9, ["close"])])
async def test_a_turn_that_may_have_begun_is_removed_when_the_ingress_ends(failures: int, did: list[str]) -> None:
    store = Store()
    _, recordings = turn(store, DONE)
    store.failures = recording.BEGIN_ATTEMPTS
    with pytest.raises(Overloaded):
        await recordings.begin("chat", {}, PROGRAM, "r")
    store.failures = failures
    await recordings.aclose()
    assert [done[0] for done in store.did] == did
