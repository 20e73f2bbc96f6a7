"""Whose word counts of a turn: its client's, then the predictor's, then what the replica has learnt."""

import pytest

from cluster.core.program import Hints, Prediction, ToolPrediction
from cluster.durations.table import DurationTable
from replicas.forecasts import Features, Forecaster

FORESEEN = Prediction(
    output_tokens=70.0,
    output_p90_tokens=200.0,
    pause_s=4.0,
    pause_p50_s=1.0,
    returned_tokens=300.0,
    later_tokens=9000.0,
    later_turns=6.0,
    tools=(ToolPrediction("search", 0.6, 0.5, 100.0), ToolPrediction("bash:make", 0.3, 40.0, 900.0)),
)
FEATURES = Features.of("search", 3, 1000)


def learnt() -> tuple[Forecaster, DurationTable]:
    forecaster, durations = Forecaster(), DurationTable()
    for _ in range(100):
        forecaster.turn_ended("t/p", FEATURES, 10, 20)
        durations.observe("search", 2.0)
        durations.observe("bash:make", 8.0)
        durations.observe("bash:ls", 0.1)
    return forecaster, durations


def test_without_a_forecast_the_replica_goes_by_what_it_learnt() -> None:
    forecaster, durations = learnt()
    forecast = forecaster.of(FEATURES, Hints(), durations, last=False)
    assert forecast.output_tokens == pytest.approx(10.0, rel=0.5)
    assert forecast.pause_s == pytest.approx(2.0)


def test_a_forecast_comes_before_what_was_learnt_and_is_nobodys_word() -> None:
    forecaster, durations = learnt()
    forecast = forecaster.of(FEATURES, Hints(), durations, last=False, foreseen=FORESEEN)
    assert (forecast.output_tokens, forecast.pause_s, forecast.returned_tokens) == (70.0, 4.0, 300.0)
    assert (forecast.later_tokens, forecast.later_turns, forecast.pause_hinted) == (9000.0, 6.0, False)


def test_a_hint_comes_before_a_forecast() -> None:
    hints = Hints(expected_output_tokens=5, expected_pause_s=0.25, expected_returned_tokens=7, expected_later_turns=1)
    forecaster, durations = learnt()
    forecast = forecaster.of(FEATURES, hints, durations, last=False, foreseen=FORESEEN)
    assert (forecast.output_tokens, forecast.pause_s, forecast.returned_tokens) == (5.0, 0.25, 7.0)
    assert (forecast.later_tokens, forecast.later_turns, forecast.pause_hinted) == (9000.0, 1.0, True)


def test_the_tool_that_is_called_corrects_the_pause() -> None:
    forecaster, durations = learnt()
    called = forecaster.of(FEATURES, Hints(expected_tool="bash:make"), durations, last=False, foreseen=FORESEEN)
    assert (called.pause_s, called.returned_tokens) == (40.0, 900.0)
    unpredicted = forecaster.of(FEATURES, Hints(expected_tool="bash:ls"), durations, last=False, foreseen=FORESEEN)
    assert unpredicted.pause_s == pytest.approx(0.1)
    assert unpredicted.later_tokens == 9000.0


def test_after_a_last_turn_nothing_comes() -> None:
    forecaster, durations = learnt()
    forecast = forecaster.of(FEATURES, Hints(), durations, last=True, foreseen=FORESEEN)
    assert forecast.output_tokens == 70.0
    assert (forecast.pause_s, forecast.later_tokens, forecast.later_turns) == (0.0, 0.0, 0.0)
