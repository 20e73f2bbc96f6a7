"""A turn that lacks memory gets the end of a hold, as much as it lacks. 63 usable blocks of 16 tokens."""

import random
import statistics
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.lifecycle.machine import Phase
from replicas.eviction import MOST_RANKED, RANKED_A_STEP, SPARE_RANKS, Eviction, kept_blocks
from replicas.hold_table import HeldBlocks, HoldTable
from replicas.policy import Claimant
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
        ((1,) * 8, 5, 3),
        ((1,) * 8, 1, 4),  # four blocks at least
        ((1,) * 80, 3, 70),  # an eighth at least
        ((1,) * 8, 20, 0),
        ((1, 1, 2, 1, 1, 1), 4, 1),  # the block that another program has, too, does not become free
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


class Ranks:
    """A pause policy that ranks holds by given numbers, and counts how often it does."""

    def __init__(self, numbers: dict[str, float], kept: dict[str, set[Claimant]] | None = None) -> None:
        self.numbers, self.kept, self.calls = numbers, kept or {}, 0

    def victim_key(self, key: str) -> tuple[float, ...]:
        self.calls += 1
        return (self.numbers[key],)

    def yields(self, key: str, claimant: Claimant) -> bool:
        return claimant not in self.kept.get(key, set())

    def victim(self, keys: Iterable[str], claimant: Claimant, own: str | None) -> str | None:
        """The victim, found by looking at every hold."""
        ranked = ((key == own, self.numbers[key], key) for key in keys if self.yields(key, claimant))
        return min(ranked, default=(None, None, None))[2]


class Evictor:
    """An `Eviction` whose holds have one block each, and which notes whose holds ended."""

    def __init__(self, ranks: Ranks) -> None:
        self.holds: HoldTable[Any] = HoldTable(lambda blocks: None)
        self.ranks, self.ended = ranks, list[str]()
        self.policy: Any = SimpleNamespace(pause=ranks, evicts_ends=False)
        self.eviction = Eviction(
            holds=self.holds,
            view=lambda held: held.key,  # type: ignore[arg-type,return-value]
            program_of=lambda request: str(request.own),  # type: ignore[attr-defined]
            anything_runs=lambda: True,
            end=self.end,
            trim=None,
            note=lambda victim, owner: None,
        )
        for key in ranks.numbers:
            self.hold(key)

    def hold(self, key: str) -> None:
        self.holds.hold(key, [SimpleNamespace(ref_cnt=1)], BLOCK, 0.0, 1.0)

    def end(self, key: str, reason: ReleaseReason) -> None:
        self.holds.release(key)
        self.ended.append(key)

    def evict(self, step: int, claimant: Claimant = Claimant.RUNNING, own: str = "") -> str | None:
        status = RequestStatus.RUNNING if claimant is Claimant.RUNNING else RequestStatus.WAITING
        request: Any = SimpleNamespace(status=status, own=own)
        return self.ended[-1] if self.eviction.evict(request, 1, self.policy, step) else None


@pytest.mark.parametrize("holds", [10, RANKED_A_STEP - 1])
def test_each_eviction_of_a_step_takes_the_least_of_all_holds(holds: int) -> None:
    """Holds come, change and are kept from waiting turns between the evictions."""
    chance = random.Random(holds)
    ranks = Ranks(
        {f"p{number}": chance.randrange(9) for number in range(holds)},
        {f"p{number}": {Claimant.WAITING} for number in range(0, holds, 3)},
    )
    one = Evictor(ranks)
    for number in range(2 * holds):
        step = number // 7
        if number % 5 == 0:
            ranks.numbers[f"new{number}"] = chance.randrange(9)
            one.hold(f"new{number}")
        if number % 11 == 0 and (held := next(iter(one.holds), None)) is not None:
            ranks.numbers[held.key] = chance.randrange(9)
            one.holds.extend(held.key, 2.0)
        claimant = chance.choice([Claimant.RUNNING, Claimant.WAITING])
        own = chance.choice([*ranks.numbers])
        expected = ranks.victim([held.key for held in one.holds], claimant, own)
        assert one.evict(step, claimant, own) == expected, number


def test_many_holds_are_not_ranked_again_for_each_eviction() -> None:
    """4,000 programs hold, and each of 200 steps lacks memory four times."""
    numbers = list(range(4000))
    random.Random(0).shuffle(numbers)
    ranks = Ranks({f"p{number}": number for number in numbers})
    one = Evictor(ranks)
    calls = []
    for step in range(200):
        before = ranks.calls
        for _ in range(4):
            assert one.evict(step) is not None
        calls.append(ranks.calls - before)
    assert max(calls) <= 2 * MOST_RANKED + 2 * 4
    assert statistics.fmean(calls[50:]) <= RANKED_A_STEP + 2 * 4
    late = [int(key[1:]) for key in one.ended[400:]]
    assert late == sorted(late), "once all are ranked, the least of all goes first"
    assert sorted(int(key[1:]) for key in one.ended)[:400] == list(range(400))


def test_ended_holds_and_old_ranks_are_dropped() -> None:
    ranks = Ranks({f"p{number}": number for number in range(500)})
    one = Evictor(ranks)
    assert one.evict(0, Claimant.WAITING) == "p0"
    one.hold("p0")
    for step in range(2000):
        ranks.numbers = {key: number + 1 for key, number in ranks.numbers.items()}
        ranks.numbers[f"new{step}"] = step
        one.hold(f"new{step}")
        assert one.evict(step) is not None
    rarely, ranking = one.eviction._rankings.values()
    assert len(one.holds) == 500
    assert len(rarely._unranked) <= 2 * 500 + SPARE_RANKS
    assert len(ranking._ranks) <= 2 * 500 + SPARE_RANKS
    assert len(ranking._heap) <= 2 * len(ranking._ranks) + SPARE_RANKS + MOST_RANKED


def test_a_hold_that_became_more_valuable_is_not_evicted_by_an_old_rank() -> None:
    ranks = Ranks({f"p{number}": number for number in range(200)})
    one = Evictor(ranks)
    assert one.evict(0) == "p0"
    ranks.numbers["p1"] = 2000
    assert [one.evict(0), one.evict(0)] == ["p2", "p3"]


def test_holds_are_ranked_anew_after_some_steps_and_for_another_policy() -> None:
    ranks = Ranks({f"p{number}": number for number in range(200)})
    one = Evictor(ranks)
    assert one.evict(0) == "p0"
    ranks.numbers["p199"] = -1  # nothing tells so
    ended = [one.evict(step) for step in range(1, 9)]
    assert ended[0] == "p1"
    assert "p199" in ended
    one.policy.pause = Ranks({key: -number for key, number in ranks.numbers.items()})
    assert one.evict(9) == "p198"


def test_a_hold_that_no_waiting_turn_may_evict_stays_until_a_running_one_needs_it() -> None:
    one = Evictor(Ranks({"a": 1, "b": 2}, {"a": {Claimant.WAITING}, "b": {Claimant.WAITING}}))
    assert one.evict(0, Claimant.WAITING) is None
    assert one.evict(0) == "a"
    assert one.evict(0, Claimant.WAITING) is None
