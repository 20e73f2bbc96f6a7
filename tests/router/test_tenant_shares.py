"""What a tenant gets of the admissions and of the queue, beside the others."""

from router.decisions import Refuse, Refused, Wait
from tests.router.test_engine_admission import Site


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
