"""The usage of programs by day, as a replica's scheduler gives it out to be written."""

from collections.abc import Callable

import msgspec
import pytest

from cluster.core.program import ProgramIdentity
from cluster.core.usage import OTHER_PROGRAMS, DayUsage, ProgramUsage
from replicas import bills
from replicas.bills import Bills
from replicas.control import dispatch
from replicas.gpu_time import GpuTime
from replicas.peers.peer import RequestFields
from replicas.scheduler import AgentScheduler
from replicas.virtual_engine import VirtualEngine
from replicas.vllm_patches import RESUMED_KEY

MORNING = 1_790_000_000.0
"""2026-09-21, 14:13:20 UTC."""
DAY_S = 86400.0


class Wall:
    """A clock that is set."""

    now_s = MORNING

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


def rows(found: list[DayUsage]) -> list[tuple[int, str, str, float]]:
    return [(row.number, row.day, row.usage.program, row.usage.prefill_s) for row in found]


def test_a_bill_is_sent_whole_until_it_is_written(wall: Wall) -> None:
    billed = Bills(wall)
    billed.of("acme", "a").add(GpuTime(prefill_s=1.0))
    reached, first = billed.since(0)
    assert rows(first) == [(1, "2026-09-21", "a", 1.0)]
    assert billed.since(0) == (reached, first), "the answer was lost"
    billed.of("acme", "a").add(GpuTime(prefill_s=0.5))
    billed.of("acme", "b").turn_ended(100, 60, 5)
    reached, second = billed.since(reached)
    assert rows(second) == [(1, "2026-09-21", "a", 1.5), (2, "2026-09-21", "b", 0.0)]
    assert second[1].usage == ProgramUsage("acme", "b", 1, 100, 60, 5)
    assert billed.since(reached) == (reached, [])


def test_growth_between_a_call_and_its_acknowledgement_is_sent_again(wall: Wall) -> None:
    billed = Bills(wall)
    billed.of("acme", "a").add(GpuTime(decode_s=1.0))
    reached, _ = billed.since(0)
    billed.of("acme", "a").add(GpuTime(decode_s=1.0))
    reached, [row] = billed.since(reached)
    assert row.usage.decode_s == 2.0


def test_one_exchange_has_a_bounded_number_the_oldest_first(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bills, "MAX_SENT", 2)
    billed = Bills(wall)
    for program in "abcde":
        billed.of("acme", program).add(GpuTime(decode_s=1.0))
    reached, seen = 0, []
    for _ in range(3):
        reached, sent = billed.since(reached)
        seen += [row.usage.program for row in sent]
    assert seen == list("abcde")


def test_a_day_ends_at_midnight_in_utc_and_late_steps_stay_in_the_day_of_their_turn(wall: Wall) -> None:
    billed = Bills(wall)
    before = billed.of("acme", "a")
    before.add(GpuTime(decode_s=1.0))
    wall.now_s = MORNING - MORNING % DAY_S + DAY_S
    billed.of("acme", "a").add(GpuTime(decode_s=3.0))
    before.add(GpuTime(decode_s=0.25))
    _, sent = billed.since(0)
    assert {(row.number, row.day, row.usage.decode_s) for row in sent} == {
        (1, "2026-09-21", 1.25),
        (2, "2026-09-22", 3.0),
    }


def test_a_day_with_too_many_programs_counts_the_others_together(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bills, "MAX_BILLS", 2)
    billed = Bills(wall)
    for program in "abcda":
        billed.of("acme", program).add(GpuTime(decode_s=1.0))
    _, sent = billed.since(0)
    assert {row.usage.program: row.usage.decode_s for row in sent} == {"a": 2.0, "b": 1.0, OTHER_PROGRAMS: 2.0}


def test_what_nobody_takes_is_bounded_and_counted(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bills, "MAX_UNWRITTEN", 3)
    billed = Bills(wall)
    for program in "abcde":
        billed.of("acme", program).add(GpuTime(decode_s=1.0))
    _, sent = billed.since(0)
    assert ([row.usage.program for row in sent], billed.lost) == (["c", "d", "e"], 2)


def test_the_bills_of_a_scheduler_add_up_to_its_busy_time(replica: Callable[..., VirtualEngine]) -> None:
    """Programs with holds, an eviction, recomputation, requests without a program, and a turn that is aborted."""
    engine = replica("continuum", default_ttl_s=1000.0, max_ttl_s=1000.0)
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)

    def turn(program: str | None, tokens: list[int], output: int, *, last: bool = False, tenant: str = "acme") -> None:
        identity = ProgramIdentity(program_id=program, tenant=tenant, last_turn=last)
        engine.submit(f"{program}-{len(tokens)}-{tenant}", tokens, output, identity)
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            scheduler.clock.advance(0.5)  # type: ignore[attr-defined]
            engine.complete(step)

    turn("b", [7] * 480, 1)
    turn("c", [8] * 500, 40, last=True)
    turn("b", [7] * 520, 1, last=True)
    turn(None, [9] * 64, 4)
    turn("b", [5] * 32, 2, last=True, tenant="other")
    answer = dispatch(scheduler, "exchange", {"billed": 0})
    sent = msgspec.msgpack.decode(answer["bills"]["packed"], type=list[DayUsage])
    usage = {(row.usage.tenant, row.usage.program): row.usage for row in sent}
    assert set(usage) == {("acme", "b"), ("acme", "c"), ("acme", ""), ("other", "b")}
    total_s = sum(one.prefill_s + one.decode_s for one in usage.values())
    assert total_s == pytest.approx(scheduler.gpu_times.busy_s, abs=1e-5)
    b, c = usage["acme", "b"], usage["acme", "c"]
    assert (b.turns, b.prompt_tokens, b.output_tokens) == (2, 1000, 2)
    assert 0 < b.recomputed_s == pytest.approx(c.caused_s, abs=1e-5)
    assert b.held_s > 0
    assert usage["acme", ""].output_tokens == 4
    assert dispatch(scheduler, "exchange", {"billed": answer["bills"]["revision"]})["bills"]["packed"] == b"\x90"


def test_a_turn_that_began_on_another_replica_is_billed_as_its_client_sees_it(
    replica: Callable[..., VirtualEngine],
) -> None:
    engine = replica("caesura")
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    identity = ProgramIdentity(program_id="p", tenant="acme", last_turn=True)
    resumed = RequestFields(extra_args={RESUMED_KEY: 60})
    engine.submit("one", [7] * 160, 40, identity, fields=resumed)
    while scheduler.has_unfinished_requests():
        engine.complete(scheduler.schedule())
    answer = dispatch(scheduler, "exchange", {"billed": 0})
    [sent] = msgspec.msgpack.decode(answer["bills"]["packed"], type=list[DayUsage])
    assert (sent.usage.prompt_tokens, sent.usage.output_tokens) == (100, 100)
    [turn] = dispatch(scheduler, "program", {"key": identity.key})["turns"]
    assert (turn["prompt_tokens"], turn["output_tokens"]) == (100, 100)


def test_a_replica_that_wants_no_bills_gets_none(replica: Callable[..., VirtualEngine]) -> None:
    answer = dispatch(replica().scheduler, "exchange", {})
    assert answer["bills"] == {"revision": 0, "packed": b"\x90"}
