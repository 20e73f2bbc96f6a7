"""Which part of an answer that may go on is settled, as far as its text shows."""

import pytest

from replicas.early_prompt import LONGEST_WORD, SLICE, common, settled


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("word", ""),
        ("one two", "one"),
        ("one two ", "one"),
        ("one\ntwo\tthree\n\n", "one\ntwo"),
        ("  ", ""),
        ("x" * 1000, "x" * (1000 - LONGEST_WORD)),
        ("one " + "x" * 1000, "one " + "x" * (1000 - LONGEST_WORD)),
    ],
)
def test_the_last_word_is_left_out(text: str, expected: str) -> None:
    assert settled(text) == expected


def test_the_common_beginning() -> None:
    assert [common(*both) for both in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [2]), ([1, 2, 3], [1, 5, 3]))] == [
        0,
        2,
        0,
        1,
    ]


@pytest.mark.parametrize("differs", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE - 1, 3 * SLICE, 3 * SLICE + 5])
def test_a_long_common_beginning_ends_at_the_first_difference_or_with_the_shorter_list(differs: int) -> None:
    ids = list(range(4 * SLICE + 7))
    assert common(ids, [*ids[:differs], -1, *ids[differs + 1 :]]) == differs
    assert common(ids[:differs], ids) == common(ids, ids[:differs]) == differs
    assert common(ids, list(ids)) == len(ids)
