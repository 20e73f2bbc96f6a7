"""A trained model whose world has changed is corrected by how far off it was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_service.distribution import LENGTH_EDGES, Distribution, bin_of
from predictor_service.predictor import MAX_KEYS, MOST_DRIFT, Drift, stretched

KEY = ("tenant", "bash")


def around(value: float) -> Distribution:
    counts = np.zeros(len(LENGTH_EDGES) - 1)
    counts[bin_of(LENGTH_EDGES, np.array([value / 2, value, value * 2]))] += 1.0
    return Distribution.of_counts(LENGTH_EDGES, counts)


def test_what_is_three_times_as_long_as_forecast_is_forecast_so_in_the_end() -> None:
    drift = Drift(1.0)
    for _ in range(300):
        drift.observe(KEY, around(200.0), 600.0)
    assert drift.ratio(KEY) == pytest.approx(3.0, rel=0.25)
    assert drift.corrected(KEY, around(200.0)).quantile(0.5) == pytest.approx(600.0, rel=0.3)
    assert drift.ratio(("another", "bash")) == 1.0


def test_a_few_surprises_change_little() -> None:
    drift = Drift(1.0)
    drift.observe(KEY, around(200.0), 2000.0)
    assert drift.ratio(KEY) < 1.15


def test_what_comes_later_counts_more_than_what_was_long_ago() -> None:
    drift = Drift(1.0)
    for actual in [800.0] * 1000 + [200.0] * 1500:
        drift.observe(KEY, around(200.0), actual)
    assert drift.ratio(KEY) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_nonsense_is_passed_over(nonsense: float) -> None:
    drift = Drift(1.0)
    drift.observe(KEY, around(10.0), nonsense)
    assert drift.ratios() == {}


def test_no_correction_is_beyond_its_bound_and_keys_are_bounded() -> None:
    drift = Drift(1.0)
    for _ in range(3000):
        drift.observe(KEY, around(10.0), 100_000.0)
    assert drift.ratio(KEY) == pytest.approx(np.exp(MOST_DRIFT))
    for number in range(MAX_KEYS + 10):
        drift.observe((str(number),), around(10.0), 10.0)
    assert len(drift.ratios()) == MAX_KEYS


def test_what_is_told_fills_in_what_another_does_not_know() -> None:
    one, other = Drift(1.0), Drift(1.0)
    for _ in range(100):
        one.observe(KEY, around(100.0), 400.0)
        one.observe(("b",), around(100.0), 400.0)
        other.observe(KEY, around(100.0), 100.0)
    other.fill(one.rows())
    assert other.ratio(("b",)) == one.ratio(("b",))
    assert other.ratio(KEY) < 1.3 < one.ratio(KEY)


@given(st.floats(0.13, 8.0), st.floats(1.0, 1000.0))
def test_stretching_keeps_a_distribution_one(ratio: float, value: float) -> None:
    made = stretched(around(value), ratio)
    assert made.shares.sum() == pytest.approx(1.0)
    assert made.shares.min() >= 0
    assert made.quantile(0.5) == pytest.approx(around(value).quantile(0.5) * ratio, rel=0.25, abs=10.0)
