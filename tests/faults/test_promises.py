"""The table of promises itself."""

import pytest
from promises import Limit, Promises, Row, percentile, table


def row(measured: float, limit: Limit = Limit.AT_MOST, unit: str = "") -> Row:
    return Row("a fault", "a thing", limit, 5, measured, unit, "here")


@pytest.mark.parametrize(
    ("limit", "kept"), [(Limit.EXACTLY, [False, True, False]), (Limit.AT_MOST, [True, True, False])]
)
def test_a_promise_is_kept_or_not(limit: Limit, kept: list[bool]) -> None:
    assert [row(value, limit).kept for value in (4, 5, 6)] == kept


def test_a_broken_promise_fails_and_is_in_the_table() -> None:
    promises = Promises(is_long=False)
    promises.measured(row(5))
    with pytest.raises(AssertionError, match="a fault: a thing <= 5 , measured 6"):
        promises.measured(row(6))
    assert [line.split(" | ")[3] for line in table(promises.rows).splitlines()[2:]] == ["yes", "NO"]


def test_times_fail_in_the_long_form_only() -> None:
    Promises(is_long=False).measured(row(6, unit="s"))
    with pytest.raises(AssertionError):
        Promises(is_long=True).measured(row(6, unit="s"))


def test_the_percentile_of_few_is_the_largest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile(range(100), 0.5) == 50
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)
