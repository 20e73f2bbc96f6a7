"""Children of living programs that this ingress learns of through the store."""

from router.decisions import Go, Home, Wait
from router.placement_engine import PlacementEngine
from tests.router.router_views import request, snapshot
from tests.router.test_engine_admission import Site


def engine_with_replicas() -> PlacementEngine:
    engine = PlacementEngine()
    engine.observe({"r0": snapshot("r0"), "r1": snapshot("r1")}, 0.0)
    return engine


def test_a_child_that_another_ingress_placed_counts_from_its_first_turn_here() -> None:
    engine = engine_with_replicas()
    engine.settle("x/1", Home("r0", 1), 0.1)
    assert not engine._state.has_children("x")
    engine.turn("t1", request("x/1", parent_key="x"), 0.2)
    engine.turn("t2", request("x/1", parent_key="x"), 0.2)
    assert engine._state.has_children("x")
    engine.check_integrity()
    engine.ended("t1", 1.0)
    engine.ended("t2", 1.0)
    engine.forget("x/1", 1.0)
    assert not engine._state.has_children("x")
    engine.check_integrity()


def test_a_child_that_waited_while_another_ingress_placed_it_counts() -> None:
    site = Site()
    site.come("x"), site.come("y")
    assert site.come("group/1", parent_key="group") == Wait()
    site.engine.settle("group/1", Home("r0", 1), site.now_s)
    assert site.admit() == ["group/1"]
    assert site.engine._state.has_children("group")


def test_a_parent_that_comes_after_its_child_needs_no_second_one_at_once() -> None:
    """One child goes on, so that the parent does not wait for ever."""
    site = Site()
    assert isinstance(site.come("x/1", parent_key="x"), Go)
    site.engine.settle("x", Home("r0", 1), site.now_s)
    site.come("y")
    assert site.come("x/2", parent_key="x") == Wait()
    site.end("x/1")
    assert site.admit() == ["x/2"]
