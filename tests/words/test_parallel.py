"""The pause of calls that run together is distributed as their maximum."""

import random
from dataclasses import dataclass

import pytest

from cluster.parallel import Slowest
from cluster.statistics import DurationStatistics


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
