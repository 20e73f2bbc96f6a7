"""The header by which proxies tell since when a request waits."""

import pytest

from cluster.observing.slo_tracker import request_start, waited_s

NOW_S = 1_700_000_000.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("t=1700000000.25", 1_700_000_000.25),  # nginx
        ("1700000000.25", 1_700_000_000.25),
        ("1700000000250", 1_700_000_000.25),  # Heroku
        ("t=1700000000250000", 1_700_000_000.25),  # Apache
        (" t=1700000000 ", 1_700_000_000.0),
        ("", None),
        ("t=", None),
        ("yesterday", None),
        ("-5", None),
        ("0", None),
        ("nan", None),
        ("inf", None),
        ("1e300", None),
    ],
)
def test_units_are_told_by_size(value: str, seconds: float | None) -> None:
    assert request_start(value) == (None if seconds is None else pytest.approx(seconds, abs=1e-6))


@pytest.mark.parametrize(
    ("value", "waited"),
    [
        (f"t={NOW_S - 2.5}", 2.5),
        (f"t={NOW_S + 60}", 0.0),  # a clock that is ahead
        (f"t={NOW_S - 90_000}", 600.0),  # a clock that stands still
        ("nonsense", 0.0),
    ],
)
def test_a_wait_is_never_negative_and_never_endless(value: str, waited: float) -> None:
    assert waited_s({"x-request-start": value}, NOW_S, 600.0) == pytest.approx(waited)


def test_without_the_header_nothing_was_waited() -> None:
    assert waited_s({}, NOW_S, 600.0) == 0.0
