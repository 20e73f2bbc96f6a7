"""The table of promises itself."""

import pytest

from tests.faults.promises import Limit, Promises, Row, missed_times, percentile, rows_of, table


def row(measured: float, limit: Limit = Limit.AT_MOST, unit: str = "") -> Row:
    return Row("a fault", "a thing", limit, 5, measured, unit, "here")


@pytest.mark.parametrize(
    ("limit", "kept"), [(Limit.EXACTLY, [False, True, False]), (Limit.AT_MOST, [True, True, False])]
)
def test_a_promise_is_kept_or_not(limit: Limit, kept: list[bool]) -> None:
    assert [row(value, limit).kept for value in (4, 5, 6)] == kept


def test_a_broken_promise_fails_and_is_in_the_table() -> None:
    promises = Promises(False, [])
    promises.measured(row(5))
    with pytest.raises(AssertionError, match="a fault: a thing <= 5 , measured 6"):
        promises.measured(row(6))
    reported = [("other", 1), *promises.properties]
    assert all(type(value) in (int, str) for _, value in reported), "what a worker can send"
    assert rows_of(reported) == [row(5), row(6)]
    assert [line.split(" | ")[3] for line in table(rows_of(reported)).splitlines()[2:]] == ["yes", "NO"]


@pytest.mark.parametrize("unit", ["s", "ms", "x"])
def test_the_short_form_neither_judges_nor_lists_times(unit: str) -> None:
    short, long = Promises(False, []), Promises(True, [])
    short.measured(row(6, unit=unit))
    assert short.properties == []
    with pytest.raises(AssertionError):
        long.measured(row(6, unit=unit))
    assert rows_of(long.properties) == [row(6, unit=unit)]


def test_a_time_that_was_missed_at_first_is_in_the_table_with_both_values() -> None:
    first = Promises(True, [])
    for missed in (row(6), row(7, unit="s")):
        with pytest.raises(AssertionError):
            first.measured(missed)
    assert missed_times(first.properties) == {("a fault", "a thing"): 7}, "the other promise is no time"
    second = Promises(True, [], missed_times(first.properties))
    second.measured(row(5, unit="s"))
    assert table(rows_of(second.properties)).splitlines()[-1].split(" | ")[3] == "yes, at the second try (first: 7 s)"


def test_the_percentile_of_few_is_the_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(range(100), 0.5) == 50
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
