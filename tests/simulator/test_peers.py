"""The simulated routers of others: each rule on a timeline of a few turns."""

from collections.abc import Sequence

import pytest

from cluster.core.program import ProgramIdentity
from cluster.offline.simulator.peers import Everywhere, KvAware
from cluster.offline.simulator.ray_peers import ConsistentHash, PowerOfTwo, PrefixAffinity, shared_prefix
from cluster.offline.simulator.routing import LeastPrograms, RoundRobin, Sent, SimulatedTurn, TurnRouter, Waits


def turn(program: str, index: int = 0, prompt: Sequence[int] = (50,) * 40, last: bool = False) -> SimulatedTurn:
    identity = ProgramIdentity(program_id=program)
    return SimulatedTurn(f"{program}.{index}", program, index, list(prompt), identity, ends_program=last)


def to(router: TurnRouter, *turns: SimulatedTurn) -> list[int | None]:
    answers = [router.route(one, 0.0) for one in turns]
    return [answer.replica if isinstance(answer, Sent) else None for answer in answers]


def end(router: TurnRouter, one: SimulatedTurn, replica: int) -> None:
    router.ended(one, replica, len(one.prompt), 1.0)


def test_round_robin_goes_around_and_passes_over_who_is_full() -> None:
    assert to(RoundRobin(3), *(turn("a", i) for i in range(4))) == [0, 1, 2, 0]
    router = RoundRobin(2, max_ongoing=1)
    first, second = turn("a"), turn("b")
    assert to(router, first, second, turn("c")) == [0, 1, None]
    end(router, second, 1)
    assert router.waited(1.0) == [("c.0", Sent(1, "next"))]


def test_least_programs_counts_programs_until_their_last_turn_has_ended() -> None:
    router = LeastPrograms(2)
    only, long = turn("a", last=True), turn("b")
    assert to(router, only, long, turn("b", 1), turn("b", 2)) == [0, 1, 1, 1]
    end(router, only, 0)
    end(router, long, 1)
    # b goes on, however idle its replica is.
    assert to(router, turn("c"), turn("d"), turn("e")) == [0, 0, 1]
    assert router.route(turn("b", 3), 2.0) == Sent(1, "stayed")


def test_power_of_two_takes_the_shorter_queue_of_a_pair() -> None:
    router = PowerOfTwo(2, seed=4)
    placed = to(router, *(turn(str(i)) for i in range(10)))
    # With two replicas the pair is always both.
    assert [placed.count(0), placed.count(1)] == [5, 5]
    many = PowerOfTwo(16, seed=4)
    to(many, *(turn(str(i)) for i in range(1600)))
    assert sum(many.ongoing) == 1600
    assert max(many.ongoing) - min(many.ongoing) <= 5  # a single random choice leaves some 40
    again = PowerOfTwo(16, seed=4)
    assert to(again, *(turn(str(i)) for i in range(50))) == to(PowerOfTwo(16, 4), *(turn(str(i)) for i in range(50)))


def test_consistent_hash_sticks_and_goes_on_along_the_ring_only_where_it_is_full() -> None:
    free = ConsistentHash(4)
    [home] = to(free, turn("a"))
    assert to(free, *(turn("a", i) for i in range(1, 9))) == [home] * 8
    assert len(set(to(free, *(turn(f"p{i}") for i in range(64))))) == 4

    bound = ConsistentHash(4, max_ongoing=2)
    sent = [bound.route(turn("a", i), 0.0) for i in range(7)]
    places = [one.replica for one in sent if isinstance(one, Sent)]
    assert [one.reason for one in sent if isinstance(one, Sent)] == ["primary"] * 2 + ["fallback"] * 4
    assert places[:2] == [home] * 2
    assert len(set(places)) == 3  # its own and two after it, never the fourth
    assert sent[6] == Waits()
    end(bound, turn("a"), places[3])
    assert bound.waited(1.0) == [("a.6", Sent(places[3], "fallback"))]


def test_prefix_affinity_matches_else_takes_the_smallest_unless_out_of_balance() -> None:
    router = PrefixAffinity(3, seed=1, imbalanced_threshold=4)
    one, other = list(range(32, 132)), list(range(132, 232))

    def reason_of(program: str, prompt: list[int]) -> tuple[int, str]:
        answer = router.route(turn(program, prompt=prompt), 0.0)
        assert isinstance(answer, Sent)
        return answer.replica, answer.reason

    assert reason_of("a", one) == (0, "smallest")
    assert reason_of("b", other) == (1, "smallest")
    assert reason_of("c", [*other, 7]) == (1, "matched")
    # 9 of 100 tokens are less than a tenth, 10 are not.
    assert reason_of("d", [*one[:9], *[240] * 91]) == (2, "smallest")
    assert reason_of("e", [*one[:10], *[241] * 90]) == (0, "matched")
    for number in range(4):
        assert reason_of(f"f{number}", other)[1] == "matched"
    assert router.ongoing == [2, 6, 1]
    assert reason_of("g", other)[1] == "imbalanced"


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 30])
def test_a_shared_prefix_is_as_long_as_it_is(length: int) -> None:
    assert shared_prefix("x" * length + "abc", "x" * length + "b") == length
    assert shared_prefix("x" * length, "x" * 30) == length


def kv_aware(cached: dict[int, int], prefilled: set[str], seed: int = 0) -> KvAware:
    """A block is its prompt's first token and its number. ``cached``: blocks of token 50 that a replica has."""
    return KvAware(
        len(cached),
        lambda prompt: [bytes([prompt[0], i]) for i in range(len(prompt) // 16)],
        lambda replica, hashes: min(cached[replica], len(hashes)) if hashes[0][0] == 50 else 0,
        lambda replica, turn_id: turn_id in prefilled,
        block_size=16,
        seed=seed,
    )


def test_kv_aware_weighs_what_is_cached_against_what_is_active() -> None:
    prefilled: set[str] = set()
    router = kv_aware({0: 0, 1: 3}, prefilled)
    first = turn("a", prompt=[50] * 64)
    # Costs in blocks: 4 to compute + 4 active on replica 0, 1 + 4 on replica 1, which has three blocks.
    assert router.loads(first) == [(64, 4), (16, 4)]
    assert to(router, first) == [1]
    # Replica 1 still has a block of a to compute.
    assert router.loads(turn("b", prompt=[60] * 32)) == [(32, 2), (48, 6)]
    assert to(router, turn("b", prompt=[60] * 32)) == [0]
    prefilled.add("a.0")
    # Replica 1 has its four blocks active already: they count once.
    assert router.loads(turn("c", prompt=[50] * 64)) == [(96, 6), (16, 4)]
    assert to(router, turn("c", prompt=[50] * 64)) == [1]
    assert to(router, turn("d", prompt=[70] * 32)) == [0]
    end(router, first, 1)
    # c goes on, so that the blocks stay active.
    assert router.loads(turn("e", prompt=[80] * 32)) == [(96, 6), (48, 6)]
    end(router, turn("c", prompt=[50] * 64), 1)
    assert router.loads(turn("e", prompt=[80] * 32)) == [(96, 6), (32, 2)]


def test_kv_aware_counts_tokens_to_compute_and_full_blocks_and_draws_between_equal_costs() -> None:
    assert kv_aware({0: 3}, set()).loads(turn("a", prompt=[50] * 70)) == [(22, 4)]
    drawn = {to(kv_aware({0: 0, 1: 0, 2: 0, 3: 3}, set(), seed), turn("b", prompt=[60] * 32))[0] for seed in range(40)}
    assert drawn == {0, 1, 2, 3}
    assert {to(kv_aware({0: 0, 1: 3}, set(), seed), turn("a"))[0] for seed in range(20)} == {1}


def test_everywhere_a_turn_goes_where_the_least_is_under_way_and_finds_what_any_has() -> None:
    cached, copied = {0: 0, 1: 64}, list[tuple[int, int]]()
    router = Everywhere(
        2,
        lambda prompt: [bytes([token]) for token in prompt],
        lambda replica, hashes: min(cached[replica], len(hashes)),
        lambda replica, prompt, blocks: copied.append((replica, blocks)),
        lambda prompt: 1.0 + len(prompt),
        max_ongoing=2,
    )
    long, short = [50] * 100, [50] * 10
    assert to(router, turn("a", prompt=long)) == [0]
    assert copied == [(0, 64)]
    assert to(router, turn("b", prompt=short)) == [1]
    assert to(router, turn("c", prompt=short)) == [1]
    assert to(router, turn("d", prompt=short)) == [0]
    assert to(router, turn("e", prompt=short)) == [None]
    assert copied == [(0, 64), (0, 10)]
    end(router, turn("a", prompt=long), 0)
    assert to(router, turn("f", prompt=long)) == [0]
