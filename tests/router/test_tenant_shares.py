"""What a tenant gets of the admissions and of the queue, beside the others."""

from collections import Counter
from typing import Any

import pytest

from router.admission_queue import LOOKAHEAD, TENANTS, TRIES
from router.decisions import Go, Refuse, Refused, Wait
from router.placement_policy import PlacementPolicy
from tests.router.test_engine_admission import HALF, Site

Tried = list[tuple[str, str]]
"""The tenant and the key of each program for which a replica was looked for."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    seen: Tried = []
    best = PlacementPolicy.best

    def note(policy: PlacementPolicy, turn: Any, *arguments: Any, **more: Any) -> Any:
        seen.append((turn.tenant, turn.key))
        return best(policy, turn, *arguments, **more)

    monkeypatch.setattr(PlacementPolicy, "best", note)
    return seen


def full_site(tenants: int, waiting: int, **settings: Any) -> Site:
    """Two programs of HALF fill the replica, and so many of each tenant wait: t0.0, t1.0, ..., t0.1, t1.1, ..."""
    site = Site(stale_s=1e6, max_wait_s=1e9, **{"aged_share": 1e-9, **settings})
    site.come("x", tenant="runs"), site.come("y", tenant="runs")
    for number in range(waiting):
        for tenant in range(tenants):
            assert site.come(f"t{tenant}.{number}", tenant=f"t{tenant}") == Wait()
    return site


def admissions(site: Site, number: int) -> Counter[str]:
    """End programs one by one, with looks without room in between. How many programs of each tenant are admitted."""
    for _ in range(number):
        for _ in range(3):
            assert site.admit() == []
        site.now_s += 1.0
        site.end(next(iter(site.living)))
        assert len(site.admit()) == 1
    return Counter(key.split(".")[0] for key in site.order)


def test_a_tenant_that_is_admitted_out_of_turn_does_not_hold_up_those_who_come_later() -> None:
    """The children of a living program go before all others, and their work is counted to their tenant alone."""
    site = Site(stale_s=1e6, aged_share=1e-9)
    site.come("x"), site.come("y")
    for number in range(30):
        site.come(f"child{number}", tenant="b", parent_key="x")
        site.come(f"a{number}", tenant="a")
    site.come("y2", tenant="c")
    for _ in range(20):
        site.now_s += 1.0
        site.end("y" if "y" in site.living else next(key for key in site.living if key != "x"))
        site.admit()
    assert all(key.startswith("child") for key in site.order)
    for number in range(10):
        site.come(f"new{number}", tenant="d")
    site.end("x")
    order = [key for key in site.serve_all() if not key.startswith("child")]
    assert sum(key.startswith("new") for key in order[:6]) >= 2, "not after all of the tenants that waited before"


def test_a_tenant_may_wait_with_one_turn_however_small_its_share() -> None:
    site = Site(stale_s=1e6, max_waiting=8, tenant_weights={"a": 100.0})
    site.come("x"), site.come("y")
    assert site.come("a1") == Wait()
    assert site.come("small", tenant="b") == Wait()
    refused = site.come("more", tenant="b")
    assert isinstance(refused, Refuse) and refused.reason is Refused.TENANT_SHARE
    for number in range(2, 20):
        site.come(f"a{number}")
    site.admit()
    assert "small" not in site.refused, "nor is it given up for the others"


def test_where_many_tenants_wait_a_few_programs_are_tried_at_a_time_and_each_tenant_is_tried_soon(tried: Tried) -> None:
    site, tenants = full_site(tenants=50, waiting=10), [f"t{number}" for number in range(50)]
    met: set[str] = set()
    for _ in range(2 * 50 * LOOKAHEAD // TRIES + 1):
        tried.clear()
        site.engine.ended("turn of x", site.now_s)  # nothing is free with it, since the program goes on
        assert site.admit() == []
        assert 0 < len(tried) <= TRIES + LOOKAHEAD
        order = list(dict.fromkeys(tenant for tenant, _ in tried))
        assert order == sorted(order, key=tenants.index), (
            "the least served first; these are equal, and the oldest first"
        )
        met.update(order)
    assert met == set(tenants)


def test_a_few_tenants_are_all_tried_each_time(tried: Tried) -> None:
    site = full_site(tenants=TENANTS, waiting=10)
    for number in range(10):
        assert site.come(f"batch{number}", tenant="t0", priority=1) == Wait()
    tried.clear()
    for _ in range(3):
        assert site.admit() == []
    each = [(f"t{tenant}", f"t{tenant}.{number}") for tenant in range(TENANTS) for number in range(LOOKAHEAD)]
    assert tried == 3 * (each + [("t0", f"batch{number}") for number in range(LOOKAHEAD)])


def test_of_many_tenants_the_least_served_gets_the_room_whoever_was_tried_before() -> None:
    """With one of them at three times the weight of each other. Looks in between, without room, change nothing."""
    site = full_site(tenants=20, waiting=20, tenant_weights={"t19": 3.0})
    assert admissions(site, 5 * 22) == {f"t{number}": 5 for number in range(19)} | {"t19": 15}


def test_programs_that_do_not_fit_do_not_change_the_shares_of_the_tenants_after_them() -> None:
    """Two tenants' programs are too large. In between, looks without room go on to tenants that were served more."""
    site = Site(stale_s=1e6, max_wait_s=1e9, aged_share=1e-9, tenant_weights={"t17": 3.0})
    site.come("x", tenant="runs"), site.come("y", tenant="runs")
    for number in range(20):
        for tenant in ("big0", "big1"):
            assert site.come(f"{tenant}.{number}", 150_000, tenant=tenant) == Wait()
        for other in range(18):
            assert site.come(f"t{other}.{number}", tenant=f"t{other}") == Wait()
    assert admissions(site, 5 * 20) == {f"t{number}": 5 for number in range(17)} | {"t17": 15}


@pytest.mark.parametrize("how", ["end", "last turn", "end before the last turn"])
def test_the_first_room_is_due_to_the_first_tenant_whose_program_fits(how: str) -> None:
    """However a program ends, and whoever was tried while there was no room."""
    site = Site(stale_s=1e6, max_wait_s=1e9, aged_share=1e-9)
    for key in ("x", "y"):
        site.come(key, tenant="runs", last=how == "last turn")
    for tenant in range(12):
        for number in range(LOOKAHEAD):
            assert site.come(f"t{tenant}.{number}", 2 * HALF if tenant < 2 else HALF, tenant=f"t{tenant}") == Wait()
    for ending, first in (("x", "t2.0"), ("y", "t3.0")):
        if how == "end before the last turn":
            site.engine.forget(ending, site.now_s)
        for _ in range(3):
            assert site.admit() == []
        if how == "end":
            site.end(ending)
        else:
            site.engine.ended(f"turn of {ending}", site.now_s, context_tokens=0)
        assert site.admit() == [first]


def test_a_program_that_fits_is_found_behind_many_tenants_whose_programs_do_not() -> None:
    """Also if programs end before all tenants were tried."""
    site = Site(stale_s=1e6, max_wait_s=1e9, aged_share=1e-9)
    living = [f"small{number}" for number in range(16)]
    for key in living:
        assert isinstance(site.come(key, HALF // 8, tenant="runs"), Go)
    for number in range(LOOKAHEAD):
        for tenant in range(20):
            assert site.come(f"big{tenant}.{number}", 2 * HALF, tenant=f"big{tenant}") == Wait()
    assert site.come("last", HALF // 8, tenant="last") == Wait()
    for key in living[:12]:
        site.end(key)
        site.admit()
    assert site.order == ["last"]


def test_of_many_tenants_batch_work_is_tried_after_the_programs_of_all(tried: Tried) -> None:
    site = full_site(tenants=20, waiting=LOOKAHEAD)
    for number in range(20):
        assert site.come(f"batch{number}", tenant=f"b{number}", priority=1) == Wait()
    tried.clear()
    for _ in range(2 * 40):
        assert site.admit() == []
    assert {tenant for tenant, _ in tried if tenant[0] == "b"} == {f"b{number}" for number in range(20)}
    first = next(number for number, (tenant, _) in enumerate(tried) if tenant[0] == "b")
    assert {tenant for tenant, _ in tried[:first]} == {f"t{number}" for number in range(20)}


def test_of_many_tenants_one_for_which_a_replica_is_kept_gets_it_as_soon_as_it_is_empty() -> None:
    """Its tenant is the most served one, and no other program may take the replica: nothing would end there again."""
    site = Site(stale_s=1e6, max_wait_s=1e9, aged_share=1.0, tenant_weights={"big": 0.01})
    site.come("x"), site.come("y")
    assert [site.come("small", 10_000, tenant="big"), site.come("huge", 150_000, tenant="big")] == [Wait()] * 2
    for number in range(20 * LOOKAHEAD):
        assert site.come(f"t{number}", tenant=f"t{number % 20}") == Wait()
    site.end("x")
    assert site.admit() == ["small"]
    for _ in range(2 * 20 * LOOKAHEAD // (TRIES // 2)):  # in one of these "huge" is tried, and the replica is kept
        assert site.admit() == []
    for key in list(site.living):
        site.end(key)
    assert site.admit() == ["huge"]
