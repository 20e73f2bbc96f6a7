"""Programs move with their KV: the router knows which volume has it, and which replicas read that volume."""

from typing import Any

import pytest

from cluster.core.replica_snapshot import program_name
from router.candidate import Arrival, expected_work, gap
from router.decisions import Go, Placed
from router.placement_engine import PlacementEngine
from router.router_state import RouterState
from router.settings import EngineSettings
from router.volumes import MAX_WRITERS, Volumes
from tests.router.router_views import request, snapshot

FAST_S = 1e-6
"""Seconds to read a token: 4 us with the link, where computing one takes 30 us."""


def on_volume(replica: str, number: int = 1, volume: str = "v", **fields: Any) -> Any:
    return snapshot(replica, number, volume=volume, disk_token_s=FAST_S, **fields)


def served(engine: PlacementEngine, key: str, tokens: int, now_s: float) -> Go:
    """Serve a turn of a program."""
    decision = engine.turn(f"{key}{now_s}", request(key, tokens), now_s)
    assert isinstance(decision, Go)
    engine.ended(f"{key}{now_s}", now_s + 1.0, context_tokens=tokens)
    return decision


def test_a_program_whose_replica_is_gone_goes_where_its_kv_can_be_read() -> None:
    """Time 0: p is placed on a. 2: its KV is on volume v, by a's snapshot. 3: a is gone. 4: its next turn goes to c,
    which reads v, though b has less to do.
    """
    engine = PlacementEngine()
    engine.observe({"a": on_volume("a")}, 0.0)
    assert served(engine, "p", 20_000, 0.0).home.replica == "a"
    engine.observe({"a": on_volume("a", 2, residents=["p"], on_disk=["p"])}, 2.0)
    busy = {"running": 1, "running_tokens": 5000, "waiting_tokens": 5000}
    engine.observe({"b": on_volume("b", volume="another"), "c": on_volume("c", **busy)}, 3.0)
    moved = served(engine, "p", 20_100, 4.0)
    assert (moved.home.replica, moved.reason) == ("c", Placed.MOVED_FROM_LOST)


def test_without_its_kv_on_the_volume_it_goes_where_there_is_less_to_do() -> None:
    engine = PlacementEngine()
    engine.observe({"a": on_volume("a")}, 0.0)
    served(engine, "p", 20_000, 0.0)
    engine.observe({"a": on_volume("a", 2, residents=["p"])}, 2.0)
    busy = {"running": 1, "running_tokens": 5000, "waiting_tokens": 5000}
    engine.observe({"b": on_volume("b", volume="another"), "c": on_volume("c", **busy)}, 3.0)
    assert served(engine, "p", 20_100, 4.0).home.replica == "b"


@pytest.mark.parametrize(("on_disk", "moves"), [(["p"], True), ([], False)])
def test_a_program_moves_for_load_if_its_kv_can_be_read_there(on_disk: list[str], moves: bool) -> None:
    """Its home computes 400,000 tokens of others first, which takes 12 s. Elsewhere p's 50,000 tokens take 1.5 s to
    compute, and 0.2 s to read.
    """
    engine = PlacementEngine()
    engine.observe({"a": on_volume("a")}, 0.0)
    assert served(engine, "p", 50_000, 0.0).home.replica == "a"
    here = on_volume(
        "a", 4, residents=["p"], on_disk=on_disk, on_host=["p"], host_tokens=100_000, waiting_tokens=400_000
    )
    engine.observe({"a": here, "b": on_volume("b", 4)}, 4.0)
    decision = served(engine, "p", 50_100, 4.0)
    assert (decision.home.replica == "b") is moves


def test_kv_on_disk_is_read_at_home_too_and_only_if_that_is_faster_than_computing() -> None:
    for read_s, kept in ((FAST_S, True), (1.0, False)):
        state = RouterState(EngineSettings())
        state.observe({"a": snapshot("a", volume="v", disk_token_s=read_s, residents=["p"], on_disk=["p"])}, 0.0)
        [candidate] = state.candidates(0.0)
        work = expected_work(state.workload, request("p").hints, 1000, 1, False)
        turn = Arrival("p", program_name("p"), "a", (), work, home="a", home_tokens=900)
        assert gap(turn, candidate)[0::3] == ((100, 900) if kept else (1000, 0.0))


def test_what_a_replica_has_written_counts_until_it_was_silent_for_long() -> None:
    volumes = Volumes(kept_s=100.0)
    of_b = volumes.wrote("b", "v", frozenset({2}), 0.0)
    of_a = volumes.wrote("a", "v", frozenset({1}), 50.0)
    assert of_a is of_b
    assert 1 in of_b
    assert 2 in of_a
    volumes.wrote("a", "v", frozenset({1}), 100.5)
    assert 2 not in of_a, "b has published nothing for 100 s"
    other = volumes.wrote("a", "w", frozenset({1}), 101.0)
    assert 1 in other
    assert 1 not in of_a, "a reads another volume now"
    for number in range(MAX_WRITERS + 10):
        volumes.wrote(f"r{number}", "w", frozenset({number + 10}), 102.0)
    assert 1 not in other
    assert 10 not in other
    assert MAX_WRITERS + 19 in other
