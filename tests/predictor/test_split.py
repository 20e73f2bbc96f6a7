from hypothesis import given
from hypothesis import strategies as st

from predictor_service.examples import ProgramExample, in_test, split


def programs(groups: list[str]) -> list[ProgramExample]:
    return [ProgramExample(f"p{index}", "made", group, ()) for index, group in enumerate(groups)]


@given(st.lists(st.text(max_size=3), max_size=40), st.integers(0, 9))
def test_a_group_is_on_one_side_and_nothing_is_lost(groups: list[str], seed: int) -> None:
    train, test = split(programs(groups), seed)
    assert not {p.split_group for p in train} & {p.split_group for p in test}
    assert sorted(p.program_id for p in train + test) == sorted(p.program_id for p in programs(groups))


@given(st.lists(st.text(max_size=3), max_size=20), st.lists(st.text(max_size=3), max_size=20))
def test_a_group_stays_on_its_side_whatever_else_is_read(some: list[str], more: list[str]) -> None:
    alone, _ = split(programs(some), 3)
    among, _ = split(programs(some + more), 3)
    assert alone == among[: len(alone)]


def test_the_share_is_met_in_the_mean_and_the_seed_matters() -> None:
    groups = [f"task {index}" for index in range(2000)]
    tested = {group for group in groups if in_test(group, 0)}
    assert 0.27 < len(tested) / len(groups) < 0.33
    assert tested != {group for group in groups if in_test(group, 1)}
    assert not split(programs(groups), 0, 0.0)[1]
