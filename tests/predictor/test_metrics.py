import math

import numpy as np
import pytest

from predictor_service.distribution import LENGTH_EDGES, Distribution
from predictor_service.scores import number_scores, rank_correlation, tool_scores


def point(value: float) -> Distribution:
    return Distribution(np.array([value - 1e-9, value]), np.array([1.0]))


def even(low: float, high: float) -> Distribution:
    return Distribution(np.array([low, high]), np.array([1.0]))


def test_points_are_judged_by_their_errors() -> None:
    scores = number_scores([point(10), point(20), point(40), point(900)], [12, 30, 40, 600])
    assert scores is not None
    assert (scores.count, scores.mae) == (4, pytest.approx((2 + 10 + 0 + 300) / 4))
    assert scores.crps == pytest.approx(scores.mae)
    assert (scores.within_5, scores.within_15) == (0.5, 0.75)
    assert scores.rank_correlation == pytest.approx(1)
    # 10 and 12 are in different bins, 20 and 30 too; 900 and 600 are both beyond the last.
    assert scores.bin_accuracy == 0.5


def test_an_interval_covers_what_is_in_its_middle_nine_tenths() -> None:
    happened = [2.0, 6.0, 50.0, 94.0, 98.0]
    scores = number_scores([even(0, 100)] * len(happened), happened)
    assert scores is not None
    assert scores.coverage == pytest.approx(3 / 5)
    assert scores.rank_correlation is None, "a forecast that is always the same orders nothing"


def test_the_likeliest_bin_counts_all_beyond_the_last() -> None:
    shares = np.zeros(len(LENGTH_EDGES) - 1)
    shares[3], shares[60:80] = 0.4, 0.03
    scores = number_scores([Distribution(LENGTH_EDGES, shares)] * 2, [35, 5000])
    assert scores is not None
    assert scores.bin_accuracy == 0.5


def test_ranks_of_equal_values_are_shared() -> None:
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 1.5 1.5 3 4 against 1 2 3 4.
    assert rank_correlation([5, 5, 6, 7], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert rank_correlation([1], [1]) is None


def test_tools_are_judged_by_the_likeliest_and_by_the_true_ones_share() -> None:
    scores = tool_scores([{"a": 0.5, "b": 0.25, "": 0.25}, {"a": 1.0}], ["b", "unheard of"])
    assert scores is not None
    assert (scores.count, scores.top_1) == (2, 0.0)
    assert scores.log_loss == pytest.approx((math.log(4) + math.log(1e6)) / 2)


def test_of_nothing_there_are_no_scores() -> None:
    assert number_scores([], []) is None
    assert tool_scores([], []) is None
