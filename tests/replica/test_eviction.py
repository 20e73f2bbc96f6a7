"""A turn that lacks memory gets the end of a hold, as much as it lacks. 63 usable blocks of 16 tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from replicas.eviction import kept_blocks
from replicas.hold_table import HeldBlocks
from replicas.virtual_engine import VirtualEngine
from tests.replica.test_timelines import BLOCK, SYNC_AND_ASYNC, Programs

Replica = Callable[..., VirtualEngine]


def held(*owners: int) -> HeldBlocks[Any]:
    """A hold whose blocks have so many owners."""
    blocks = [SimpleNamespace(ref_cnt=count) for count in owners]
    return HeldBlocks("a", blocks, BLOCK * len(blocks), 0.0, 1.0)


@pytest.mark.parametrize(
    ("owners", "lacking", "kept"),
    [
        ((1,) * 8, 3, 5),
        ((1,) * 80, 3, 70),  # an eighth at least
        ((1,) * 8, 20, 0),
        ((1, 1, 2, 1, 1), 3, 1),  # the block that another program has, too, does not become free
        ((2, 2), 1, 0),
    ],
)
def test_as_much_of_the_end_is_given_up_as_is_lacking(owners: tuple[int, ...], lacking: int, kept: int) -> None:
    assert kept_blocks(held(*owners), lacking) == kept


@SYNC_AND_ASYNC
def test_a_turn_that_grows_gets_the_end_of_a_hold(replica: Replica, asynchronous: bool) -> None:
    """`a` holds 31 blocks, and `b` takes the other 32 for its prompt."""
    p = Programs(replica("caesura", asynchronous))
    p.turn("a", new_tokens=31 * BLOCK)
    p.arrive("b", new_tokens=32 * BLOCK, output=3 * BLOCK, last=True)
    p.engine.run()
    assert p.phase("a") is Phase.HELD
    [hold] = p.scheduler.holds
    assert len(hold.blocks) == 31 - 4, "an eighth at once: enough for the three blocks of the output"
    assert hold.tokens == 27 * BLOCK
    assert p.scheduler.counters["evicted_blocks"] == 4
    assert sum(p.scheduler.stats.holds_ended.values()) == 0
    resumed = p.arrive("a", new_tokens=10)
    assert p.step()[resumed] < 31 * BLOCK - 27 * BLOCK + 2 * BLOCK
    p.scheduler.check_integrity()


def test_where_nothing_runs_a_waiting_turn_gets_what_it_lacks(replica: Replica) -> None:
    p = Programs(replica("caesura"))
    p.turn("a", new_tokens=50 * BLOCK)
    head = p.arrive("b", new_tokens=30 * BLOCK, last=True)
    assert list(p.step()) == [head]
    [hold] = p.scheduler.holds
    assert len(hold.blocks) == 63 - 30
    assert p.phase("a") is Phase.HELD


def test_a_hold_of_which_nothing_is_left_ends(replica: Replica) -> None:
    p = Programs(replica("caesura"))
    p.turn("a", new_tokens=30 * BLOCK)
    p.turn("b", new_tokens=63 * BLOCK - 1, last=True)
    assert p.held() == set()
    assert p.scheduler.stats.holds_ended[ReleaseReason.BROKEN_STARVED] == 1


def test_the_hold_of_the_turn_itself_ends_as_a_whole(replica: Replica) -> None:
    """Its partial block is in the way: of 900 tokens 56 blocks and a part, and 6 are free where 7 are needed."""
    p = Programs(replica("caesura"))
    p.turn("a", new_tokens=900)
    p.turn("a", new_tokens=100, last=True)
    assert p.held() == set()
    assert p.phase("a") is None
    assert p.scheduler.counters["evicted_blocks"] == 0


def test_the_papers_policies_give_up_whole_holds(replica: Replica) -> None:
    p = Programs(replica("continuum", default_ttl_s=60.0, max_ttl_s=60.0))
    p.turn("a", new_tokens=31 * BLOCK)
    assert p.held() == {"a"}
    p.turn("b", new_tokens=32 * BLOCK, output=3 * BLOCK, last=True)
    assert p.held() == set()
    assert p.scheduler.counters["evicted_blocks"] == 0
