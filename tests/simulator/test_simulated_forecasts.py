"""A predictor in the simulator: who is forecast, by whom, and what is refused."""

import dataclasses
from pathlib import Path

import pytest

from cluster.core.errors import ConfigError
from cluster.offline.bench.trace import programs_from_trace
from cluster.offline.simulator.foresight import DEALING_SEED, HALF, Foresight, forecasts_of
from cluster.offline.simulator.settings import SimulationSettings
from predictor_service.examples import read_programs, split
from predictor_service.predictor import Predictor
from predictor_service.statistics_model import StatisticsModel


def test_every_turn_is_forecast_by_a_model_of_the_other_half(varied_trace: Path) -> None:
    forecasts = forecasts_of(varied_trace, "statistics")
    one, other = split(read_programs([varied_trace]), DEALING_SEED, HALF)
    assert one
    assert other
    predictor = Predictor(StatisticsModel.fit(other))
    for program in one:
        assert forecasts[program.program_id] == tuple(predictor.predict([turn.context for turn in program.turns]))
    assert set(forecasts) == {program.program_id for program in one + other}


def test_forecasts_come_beside_the_hints_and_an_oracle_stays_one(varied_trace: Path) -> None:
    planned = programs_from_trace(varied_trace).programs[0]
    forecasts = forecasts_of(varied_trace, "statistics")
    identities = Foresight(forecasts=forecasts).identities("p", planned, (0,))
    assert tuple(identity.forecast for identity in identities) == forecasts[planned.program_id]
    assert [dataclasses.replace(identity, forecast=None) for identity in identities] == Foresight().identities(
        "p", planned, (0,)
    )
    told = Foresight(oracle=True, forecasts=forecasts).identities("p", planned, (0,))
    assert told[0].hints.expected_output_tokens == 20


def test_forecasts_want_a_predictor_and_a_trace_as_it_was_recorded(small_trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--forecasts: no predictor 'guess'"):
        SimulationSettings(policies=("caesura",), rates_per_s=(1.0,), trace=small_trace, forecasts="guess")
    with pytest.raises(ConfigError, match="--forecasts: of a --trace"):
        SimulationSettings(policies=("caesura",), rates_per_s=(1.0,), forecasts="statistics")
    single = tmp_path / "single.jsonl"
    program = '{"program_id":"a","turns":[{"new_prompt_tokens":4,"context_tokens":4,"output_tokens":1,"tool":null,'
    single.write_text(program + '"tool_duration_s":null,"tool_return_tokens":null}]}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="of one group"):
        forecasts_of(single, "statistics")
