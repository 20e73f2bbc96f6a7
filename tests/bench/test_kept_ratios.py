"""A benchmark of the front end fails if a ratio falls below that of the kept run."""

import pytest

from benchmarks import front_end


def test_a_ratio_that_falls_by_a_tenth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [
        {"subject": front_end.CAESURA, "streams": 16, "ratio": 0.8},
        {"subject": front_end.CAESURA, "streams": 64, "ratio": 0.9},
        {"subject": front_end.RAY, "streams": 1, "ratio": 2.0},
    ]
    monkeypatch.setattr(front_end, "kept_rows", lambda name: kept if name == "front_end" else [])
    assert front_end.below_kept({1: 0.1, 16: 0.73, 64: 0.82, 256: 0.1}) == {}
    assert front_end.below_kept({16: 0.71, 64: 1.2}) == {16: (0.71, 0.8)}
    monkeypatch.setattr(front_end, "kept_rows", lambda name: [])
    assert front_end.below_kept({16: 0.01}) == {}
