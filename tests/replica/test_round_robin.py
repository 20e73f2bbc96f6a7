"""Whose turn it is: everybody's within the period, and an equal share in each step."""

from hypothesis import given
from hypothesis import strategies as st

from replicas.hold_table import RoundRobin

PERIODS = st.integers(1, 9)


def of(*keys: str) -> RoundRobin[str]:
    keys_in_turn: RoundRobin[str] = RoundRobin(1000)
    for key in keys:
        keys_in_turn.add(key)
    return keys_in_turn


def test_who_was_not_looked_at_for_longest_comes_first() -> None:
    keys_in_turn = of(*"abcd")
    assert [keys_in_turn.next(2) for _ in range(3)] == [["a", "b"], ["c", "d"], ["a", "b"]]
    keys_in_turn.add("c")  # looked at for another reason
    assert [keys_in_turn.next(2) for _ in range(2)] == [["d", "a"], ["b", "c"]]


def test_a_period_of_one_step_is_everybody_each_time() -> None:
    keys_in_turn = of(*"abc")
    assert keys_in_turn.next(1) == keys_in_turn.next(1) == [*"abc"]


def test_no_step_looks_at_more_than_the_bound_and_who_came_first_comes_first() -> None:
    keys_in_turn: RoundRobin[int] = RoundRobin(most=3)
    for key in range(8):
        keys_in_turn.add(key)
    assert [keys_in_turn.next(2) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]


def test_nobody_is_looked_at_where_nobody_is() -> None:
    keys_in_turn = of("a")
    keys_in_turn.remove("a")
    keys_in_turn.remove("a")
    assert (keys_in_turn.next(3), len(keys_in_turn)) == ([], 0)


@given(st.integers(0, 40), PERIODS)
def test_work_is_spread_evenly_and_all_is_done_once_a_period(count: int, steps: int) -> None:
    keys_in_turn: RoundRobin[int] = RoundRobin(1000)
    for key in range(count):
        keys_in_turn.add(key)
    looks = [keys_in_turn.next(steps) for _ in range(steps)]
    assert max(len(look) for look in looks) <= -(-count // steps)
    assert {key for look in looks for key in look} == set(range(count))


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=9), st.sets(st.integers(0, 30))), max_size=40), PERIODS)
def test_nobody_waits_longer_than_the_period_whoever_comes_and_goes(
    events: list[tuple[list[int], set[int]]], steps: int
) -> None:
    keys_in_turn: RoundRobin[int] = RoundRobin(1000)
    waited: dict[int, int] = {}
    for come, go in events:
        for key in come:
            keys_in_turn.add(key)
            waited[key] = 0
        for key in go:
            keys_in_turn.remove(key)
            waited.pop(key, None)
        looks = keys_in_turn.next(steps)
        assert len(set(looks)) == len(looks)
        assert set(looks) <= waited.keys()
        waited = {key: 0 if key in looks else waits + 1 for key, waits in waited.items()}
        assert all(waits < steps for waits in waited.values())
