"""Bounded-load rendezvous hashing: alike everywhere, within the bound, and little moves when replicas change."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from router.rendezvous import bounded, ranked

KEYS = [f"tenant/program{number}" for number in range(400)]
REPLICAS = [f"replica{number}" for number in range(8)]


@given(
    st.text(),
    st.dictionaries(st.text(), st.integers(0, 10**6), min_size=1, max_size=9),
    st.floats(1, 10),
)
def test_a_place_is_found_within_the_bound_whatever_the_order(key: str, programs: dict[str, int], bound: float) -> None:
    replica = bounded(key, programs, bound)
    assert replica is not None
    assert programs[replica] + 1 <= ceil(bound * (sum(programs.values()) + 1) / len(programs))
    assert bounded(key, dict(reversed(programs.items())), bound) == replica


def test_nowhere_where_there_is_none() -> None:
    assert bounded("p", {}, 1.25) is None


def test_only_the_keys_of_a_replica_that_goes_are_placed_elsewhere() -> None:
    before = {key: ranked(key, REPLICAS)[0] for key in KEYS}
    after = {key: ranked(key, REPLICAS[1:])[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == REPLICAS[0]}


def test_keys_spread() -> None:
    firsts = [ranked(key, REPLICAS)[0] for key in KEYS]
    assert all(25 <= firsts.count(replica) <= 75 for replica in REPLICAS)
