"""The pause of calls that run together is distributed as their maximum."""

import math
import random
from dataclasses import dataclass

import pytest

from cluster.durations.concurrent import Slowest
from cluster.durations.statistics import DurationStatistics
from cluster.durations.table import DurationTable


@dataclass(frozen=True)
class Uniform:
    """Durations between 0 and ``longest_s``, each as likely."""

    longest_s: float

    def survival(self, t: float) -> float:
        return 1.0 - min(max(t / self.longest_s, 0.0), 1.0)

    def quantile(self, q: float) -> float:
        return q * self.longest_s


def test_the_maximum_of_uniform_durations_is_known_exactly() -> None:
    slowest = Slowest([Uniform(1.0)] * 3)
    assert slowest.survival(0.5) == pytest.approx(1 - 0.5**3)
    for q in (0.1, 0.5, 0.9):
        assert slowest.quantile(q) == pytest.approx(q ** (1 / 3), rel=2e-3)
    assert slowest.hazard(0.5, 0.1) == pytest.approx((0.6**3 - 0.5**3) / (1 - 0.5**3) / 0.1)
    assert (slowest.survival(1.0), slowest.hazard(1.0, 1.0)) == (0.0, 0.0)


def test_one_call_is_its_own_maximum_and_a_quick_one_adds_nothing() -> None:
    assert Slowest([Uniform(2.0)]).quantile(0.3) == pytest.approx(0.6)
    assert Slowest([Uniform(2.0), Uniform(1e-6)]).quantile(0.9) == pytest.approx(1.8)


def test_learnt_durations_of_a_turn_are_those_that_are_seen() -> None:
    rng = random.Random(1)
    quick, heavy = DurationStatistics(), DurationStatistics()
    pairs = [(rng.expovariate(1.0), rng.lognormvariate(0.0, 1.0)) for _ in range(4000)]
    for a, b in pairs:
        quick.observe(a)
        heavy.observe(b)
    slowest = Slowest([quick, heavy])
    seen = sorted(map(max, pairs))
    for q in (0.1, 0.5, 0.9, 0.99):
        share = sum(pause <= slowest.quantile(q) for pause in seen) / len(seen)
        assert share == pytest.approx(q, abs=0.03)


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan")])
def test_what_makes_no_sense_is_refused(q: float) -> None:
    with pytest.raises(ValueError):
        Slowest([Uniform(1.0)]).quantile(q)
    with pytest.raises(ValueError):
        Slowest([Uniform(1.0)]).hazard(0.0, 0.0)
    with pytest.raises(ValueError):
        Slowest([])


def observed(*durations: float) -> DurationStatistics:
    statistics = DurationStatistics()
    for seconds in durations:
        statistics.observe(seconds)
    return statistics


def test_the_moments_of_few_durations_are_exact() -> None:
    slowest = Slowest([observed(1.0, 5.0), observed(2.0, 3.0, 4.0)])
    outcomes = [max(a, b) for a in (1.0, 5.0) for b in (2.0, 3.0, 4.0)]
    mean_s = sum(outcomes) / 6
    assert (slowest.count, slowest.min_s, slowest.max_s) == (2, 2.0, 5.0)
    assert slowest.mean_s == pytest.approx(mean_s)
    variance = sum((seconds - mean_s) ** 2 for seconds in outcomes) / 6
    doubt = math.log(2 / 0.1)
    bound_s = mean_s + math.sqrt(2 * variance * doubt) + 7 * 3.0 * doubt / 3
    assert slowest.bernstein_bound_s(0.1) == pytest.approx(bound_s)
    with pytest.raises(ValueError, match="delta"):
        slowest.bernstein_bound_s(1.0)


def test_the_mean_of_many_is_near_that_of_the_maxima_that_are_seen() -> None:
    rng = random.Random(2)
    pairs = [(rng.expovariate(1.0), rng.lognormvariate(0.0, 1.0)) for _ in range(4000)]
    slowest = Slowest([observed(*(a for a, _ in pairs)), observed(*(b for _, b in pairs))])
    assert slowest.mean_s == pytest.approx(sum(map(max, pairs)) / 4000, rel=0.05)
    alone = observed(*(a for a, _ in pairs))
    assert Slowest([alone]).mean_s == alone.mean_s


def test_a_table_judges_tools_that_never_ran_together_by_the_slowest() -> None:
    table = DurationTable()
    for tool, seconds in (("bash:cd", 0.1), ("bash:make", 60.0), ("search", 2.0), ("search", 4.0)):
        table.observe(tool, seconds)

    def means(name: str) -> list[float]:
        return [level.mean_s for level in table.levels(name)]

    all_s = (0.1 + 60.0 + 2.0 + 4.0) / 4
    assert means("bash:cd+search") == pytest.approx([3.0, (60.0 * 2 + 2.0 + 4.0) / 4, all_s])
    assert means("bash:cd+bash:make") == pytest.approx([60.0, 0.1 / 4 + 60.0 * 3 / 4, all_s])
    assert means("bash:ls+search") == pytest.approx([(60.0 * 2 + 2.0 + 4.0) / 4, all_s]), "bash in general is known"
    for unknown in ("search+unknown", "search+", "+"):
        assert means(unknown) == pytest.approx([all_s])
    table.observe("bash:cd+search", 10.0)
    assert means("bash:cd+search")[:2] == [10.0, 10.0], "together comes first: with such arguments, and without"
    assert [level.count for level in table.levels("bash:cd+search")] == [1, 1, 1, 2, 5]
