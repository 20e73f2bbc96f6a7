"""`benchmarks.elastic`: when programs arrive, and when turns meet their SLO again after the step."""

import random

import pytest

from benchmarks.elastic import TOKENS, TTFT_S, Turn, arrivals, back_s


class Regular(random.Random):
    """Each gap is the mean one."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd


def turns(*good: bool) -> list[Turn]:
    """A turn each second from 10 s on."""
    return [Turn(10.0 + at_s, TTFT_S if one else TTFT_S + 1, TOKENS) for at_s, one in enumerate(good)]


def test_the_high_rate_begins_with_its_phase_whatever_the_low_one_left_over() -> None:
    found = list(arrivals(Regular(), 0.05, 10.0, (10.0, 20.0, 50.0)))
    assert found == pytest.approx([*range(12, 30, 2), 50, 70])


@pytest.mark.parametrize(
    ("good", "expected"),
    [
        ([True] * 40, 0.0),
        ([False] + [True] * 39, 0.0),
        ([True] * 5, 0.0),
        ([False] * 12 + [True] * 28, 12.0),
        ([True] * 5 + [False] * 7 + [True] * 28, 12.0),
        ([False] * 30 + [True] * 10, None),
        ([False] * 40, None),
        ([], None),
    ],
)
def test_the_slo_is_met_again_from_the_moment_after_which_turns_are_good(
    good: list[bool], expected: float | None
) -> None:
    assert back_s(turns(*good), 10.0, 60.0) == expected
