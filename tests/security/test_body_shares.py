"""Whose body is read next, and when: timelines of requests of two tenants, in seconds."""

import asyncio
from itertools import pairwise

import pytest

from cluster.core.clock import ManualClock
from cluster.core.errors import BadRequest, TooManyRequests
from cluster.http import fair_thread
from cluster.http.body_shares import ACTIVE_S, ADDED_S, AFTERWARDS, MAX_WAIT_S, USUAL_S, BodyShares
from cluster.http.fair_thread import SHORT_BYTES, FairThread

CPU_S = 0.004
TIMEOUT_S = 20.0


def shares(*seen: tuple[str, float]) -> BodyShares[str]:
    made = BodyShares[str]()
    for tenant, at_s in seen:
        made.seen(tenant, at_s)
    return made


def test_tenants_take_turns_and_each_in_its_order() -> None:
    made = shares(("a", 0.0), ("b", 0.0))
    for job in ("a1", "a2", "a3"):
        made.add("a", job)
    made.add("b", "b1")
    taken = [made.take(0.0) for _ in range(5)]
    assert taken == [("a", "a1"), ("b", "b1"), ("a", "a2"), ("a", "a3"), None]


def test_the_mean_delay_that_the_bodies_of_a_tenant_add_has_a_bound() -> None:
    made = shares(("other", 0.0), ("flood", 0.0))
    now_s, starts = 0.0, []
    for number in range(5):
        made.add("flood", f"{number}")
        while made.take(now_s) is None:
            step_s = made.next_s(now_s)
            assert step_s is not None
            now_s += step_s
        starts.append(now_s)
        made.charge("flood", now_s, CPU_S, 0, is_accepted=True)
    work_s = CPU_S * (1 + AFTERWARDS)
    for before_s, after_s in pairwise(starts):
        assert work_s**2 / (2 * (after_s - before_s)) == pytest.approx(ADDED_S)


def test_a_rejected_body_costs_only_its_reading() -> None:
    made = shares(("other", 0.0), ("flood", 0.0))
    for is_accepted in (True, False):
        made.charge("flood", 0.0, CPU_S, 0, is_accepted=is_accepted)
        made.add("flood", "next")
        wait_s = made.next_s(0.0)
        assert wait_s == pytest.approx((CPU_S * (1 + AFTERWARDS * is_accepted)) ** 2 / (2 * ADDED_S))
        assert made.take(MAX_WAIT_S) is not None


def test_a_tenant_does_not_wait_for_long_bodies_that_cost_what_is_usual_for_their_size() -> None:
    made = shares(("other", 0.0), ("agents", 0.0))
    size = 1 << 20
    made.charge("agents", 0.0, size * USUAL_S, size, is_accepted=True)
    made.add("agents", "next")
    assert made.take(0.0) == ("agents", "next")
    made.charge("agents", 0.0, size * USUAL_S + CPU_S, size, is_accepted=True)
    made.add("agents", "later")
    assert made.next_s(0.0) == pytest.approx((CPU_S * (1 + AFTERWARDS)) ** 2 / (2 * ADDED_S))


def test_a_tenant_waits_only_while_another_is_active() -> None:
    made = shares(("other", 0.0), ("flood", 1.0), ("flood", 2.0))
    made.charge("flood", 2.0, 1.0, 0, is_accepted=True)
    made.add("flood", "next")
    assert made.next_s(2.0) == ACTIVE_S - 2.0
    assert made.take(ACTIVE_S - 0.1) is None
    assert made.take(ACTIVE_S) == ("flood", "next")
    alone = shares(("flood", 0.0))
    alone.charge("flood", 0.0, 1.0, 0, is_accepted=True)
    alone.add("flood", "next")
    assert alone.take(0.0) == ("flood", "next")


def test_the_others_do_not_wait_for_a_tenant_that_may_not_go_on() -> None:
    made = shares(("flood", 0.0), ("other", 0.0))
    made.charge("flood", 0.0, 1.0, 0, is_accepted=True)
    made.add("flood", "flood")
    assert made.take(0.0) is None
    made.add("other", "other")
    assert made.next_s(0.0) == 0.0
    assert made.take(0.0) == ("other", "other")


def test_the_expected_wait_grows_with_the_bodies_that_wait_and_tenants_are_forgotten() -> None:
    made = shares(("other", 0.0), ("flood", 0.0))
    assert made.wait_s("flood", 0.0) == 0.0
    made.charge("flood", 0.0, CPU_S, 0, is_accepted=True)
    once_s = made.wait_s("flood", 0.0)
    made.add("flood", "one")
    assert made.wait_s("flood", 0.0) == pytest.approx(2 * once_s)
    assert made.wait_s("flood", ACTIVE_S + 1) == 0.0
    assert made.take(once_s) == ("flood", "one")
    assert made.take(once_s) is None
    assert not made._tenants


async def test_a_body_that_would_wait_for_too_long_is_rejected_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    bodies = FairThread(clock)
    assert await bodies.run("other", 1, lambda: 1) == 1
    monkeypatch.setattr(fair_thread, "thread_time", iter((0.0, 0.2)).__next__)  # a reading of 0.2 s
    with pytest.raises(BadRequest):
        await bodies.run("flood", SHORT_BYTES + 1, _reject)
    clock.advance(1.0)
    with pytest.raises(TooManyRequests) as caught:
        await asyncio.wait_for(bodies.run("flood", SHORT_BYTES + 1, _reject), TIMEOUT_S)
    assert caught.value.code == "too_many_costly_bodies"
    assert caught.value.retry_after_s == pytest.approx(
        (0.2 - USUAL_S * SHORT_BYTES) ** 2 / (2 * ADDED_S) - 1.0 - MAX_WAIT_S, abs=1
    )
    assert await bodies.run("flood", SHORT_BYTES, lambda: 2) == 2


async def test_the_thread_goes_on_when_the_tenant_may(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = FairThread()
    await bodies.run("other", 1, lambda: None)
    times = iter((0.0, 0.01, 0.0, 0.0))
    monkeypatch.setattr(fair_thread, "thread_time", times.__next__)
    with pytest.raises(BadRequest):
        await bodies.run("flood", SHORT_BYTES + 1, _reject)
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(BadRequest):
        await bodies.run("flood", SHORT_BYTES + 1, _reject)
    assert asyncio.get_running_loop().time() - began_s >= (0.01 - USUAL_S * SHORT_BYTES) ** 2 / (2 * ADDED_S) * 0.9


def _reject() -> None:
    raise BadRequest("no")
