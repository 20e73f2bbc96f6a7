"""Prefixes that prompts share, by the ids of their blocks."""

import pytest

from cluster.offline.traces.blocks import common_prefixes, other_prefixes, shared_prefix


@pytest.mark.parametrize(
    ("prompts", "prefix", "others"),
    [
        ([[1, 2, 3], [1, 2, 3], [1, 4], [1, 5], [1, 6]], (1,), 1),
        ([[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 9], [1, 4]], (1, 2, 3), 1),
        ([[1, 2], [1, 2], [3]], (1, 2), 0),
    ],
    ids=["many share little", "some share much", "whole prompts"],
)
def test_the_prefix_is_that_of_which_most_blocks_are_shared(
    prompts: list[list[int]], prefix: tuple[int, ...], others: int
) -> None:
    common = common_prefixes(prompts)
    assert common == {1: prefix}
    assert other_prefixes(prompts, common) == others
    whole = {"group": "1", "tokens": 512 * len(prefix)}
    have = [whole if tuple(ids[: len(prefix)]) == prefix else None for ids in prompts]
    assert [shared_prefix(ids, common, 512) for ids in prompts] == have


def test_single_and_empty_prompts_share_nothing() -> None:
    common = common_prefixes([[1, 2], [3], []])
    assert common == {}
    assert [shared_prefix(ids, common, 512) for ids in ([1, 2], [])] == [None, None]
