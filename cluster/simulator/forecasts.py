"""What the predictor service would say of a trace's turns, each by a model that has not seen the program's group.

The groups are dealt to two halves; a model fitted on one forecasts the other. So all of a trace can be replayed, and
the numbers are comparable with those of replays that tell the truth, or nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from cluster.errors import ConfigError
from cluster.program import Forecasted
from cluster.registry import PREDICTORS
from predictor_service.examples import read_programs
from predictor_service.predictor import Predictor
from predictor_service.split import split
from predictor_service.statistics_model import StatisticsModel

HALF = 0.5
DEALING_SEED = 0

Forecasts = Mapping[str, tuple[Forecasted, ...]]
"""By program, one for each turn."""


@lru_cache(maxsize=4)
def forecasts_of(trace: Path, name: str) -> Forecasts:
    """Of all programs of ``trace``, by the registered predictor ``name``; texts are not read.

    Raises:
        TraceError: the trace cannot be used.
        ConfigError: no such predictor, or a trace of one group.
    """
    model = PREDICTORS.load(name)
    halves = split(read_programs([trace]), DEALING_SEED, HALF)
    if not all(halves):
        raise ConfigError(f"--forecasts: {trace}: its programs are of one group, so that none can be learnt from")
    found: dict[str, tuple[Forecasted, ...]] = {}
    for asked, learnt in (halves, halves[::-1]):
        statistics = StatisticsModel.fit(learnt)
        fitted = statistics if model is StatisticsModel else model.fit(learnt)
        predictor = Predictor(
            statistics,
            None if fitted is statistics else fitted,
            fitted if fitted is not statistics and hasattr(fitted, "durations") else None,
        )
        for program in asked:
            found[program.program_id] = tuple(predictor.forecast([turn.context for turn in program.turns]))
    return found
