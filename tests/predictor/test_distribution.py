import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, bin_of

COUNTS = arrays.arrays(np.float64, len(LENGTH_EDGES) - 1, elements=st.floats(0, 1e6)).filter(lambda a: a.sum() > 1e-3)
VALUES = st.floats(0, 2e5)
EVEN = Distribution(np.array([0.0, 10.0]), np.array([1.0]))


def test_edges_are_the_papers_bins_and_go_on() -> None:
    assert LENGTH_EDGES[:51].tolist() == [10.0 * bin for bin in range(51)]
    assert len(LENGTH_EDGES) == 91
    assert np.all(np.diff(LENGTH_EDGES) > 0)
    assert np.all(np.diff(DURATION_EDGES) > 0)
    assert bin_of(LENGTH_EDGES, np.array([0, 1, 10, 11, 500, 501, 1e9])).tolist() == [0, 0, 0, 1, 49, 50, 89]


@given(COUNTS, st.floats(0, 1))
def test_a_quantile_is_where_that_share_ends(counts: np.ndarray, q: float) -> None:
    distribution = Distribution.of_counts(LENGTH_EDGES, counts)
    assert distribution.share_up_to(distribution.quantile(q)) == pytest.approx(q, abs=1e-6)


@given(COUNTS, VALUES, VALUES)
def test_survival_falls_and_is_what_is_not_yet(counts: np.ndarray, one: float, other: float) -> None:
    distribution = Distribution.of_counts(LENGTH_EDGES, counts)
    low, high = sorted((one, other))
    assert 1 >= distribution.survival(low) >= distribution.survival(high) >= 0
    assert distribution.survival(low) + distribution.share_up_to(low) == pytest.approx(1)


def test_the_numbers_of_an_even_distribution() -> None:
    assert EVEN.mean == 5
    assert EVEN.quantile(0.25) == 2.5
    # ∫₀¹⁰ (x/10 - 1[x ≥ 5])² dx = 2 · ∫₀⁵ x²/100 dx
    assert EVEN.crps(5.0) == pytest.approx(10 / 12)
    assert EVEN.crps(20.0) == pytest.approx(10 / 3 + 10)


@given(COUNTS, VALUES)
def test_crps_is_least_for_the_point_that_happened(counts: np.ndarray, value: float) -> None:
    distribution = Distribution.of_counts(LENGTH_EDGES, counts)
    point = Distribution(np.array([value, value + 1e-9]), np.array([1.0]))
    assert point.crps(value) == pytest.approx(0, abs=1e-6)
    assert distribution.crps(value) >= -1e-9
    assert point.crps(value + 7) == pytest.approx(7, abs=1e-6)


@pytest.mark.parametrize("counts", [[0.0, 0.0], [-1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_counts_nothing_is_refused(counts: list[float]) -> None:
    with pytest.raises(ValueError, match="counts of a distribution"):
        Distribution.of_counts(np.array([0.0, 1.0, 2.0]), np.array(counts))
    with pytest.raises(ValueError, match="rank"):
        EVEN.quantile(1.5)
