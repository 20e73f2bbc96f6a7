"""What a simulated client reports of its programs, and the forecasts of a predictor.

By default it sends a program's id and the name of the tool whose result a turn brings, as chat messages contain it. The
tool that a turn calls is in its answer. With an oracle, hints also contain the true lengths and durations. Forecasts
are those of the predictor service, with a model that has not seen the program's group.

The groups are split into two halves, and a model fitted on one half forecasts the other. So a whole trace can be
replayed, and its results can be compared with replays with an oracle or without hints. A file of forecasts has those of
the programs that a model was not trained on, and only these are replayed.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np

from cluster.core.errors import ConfigError
from cluster.core.program import Hints, Prediction, ProgramIdentity
from cluster.core.registry import PREDICTORS
from cluster.offline.bench.workload import PlannedProgram, TurnWork, tokens_of, turns_of
from predictor_service.examples import read_programs, split
from predictor_service.forecast_files import Forecasts, predicted, read_forecasts

HALF = 0.5
DEALING_SEED = 0


@lru_cache(maxsize=4)
def forecasts_of(trace: Path, name: str) -> Forecasts:
    """Forecast all complete programs of ``trace`` with the registered predictor ``name``. Texts are not read.

    If ``name`` is no predictor, it is the path of a file that `caesura predictor forecast` wrote, with some programs.

    Raises:
        TraceError: the trace cannot be used.
        ConfigError: there is neither such a predictor nor such a file, or the trace has only one group.
    """
    if name not in PREDICTORS:
        return read_forecasts(Path(name))
    model = PREDICTORS.load(name)
    halves = split(read_programs([trace]), DEALING_SEED, HALF)
    if not all(halves):
        raise ConfigError(f"--forecasts: {trace}: its programs are of one group, so that none can be learnt from")
    found: dict[str, tuple[Prediction, ...]] = {}
    for asked, learnt in (halves, halves[::-1]):
        found.update(predicted(model.fit(learnt), learnt, asked))
    return found


NOISE_STREAM = 0x6E6F6973
"""Seed of the noise, which makes it independent of the random token ids of the same program."""


class Reports(StrEnum):
    """What the clients report of their programs."""

    NOTHING = "nothing"
    """Neither tools nor ends."""
    ENDS = "ends"
    """The end of a program, once its last turn has ended."""
    AHEAD = "ahead"
    """With each turn, which tool it will call, and whether it is the last."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """The knowledge of the future that a turn's hints and forecasts contain."""

    oracle: bool = False
    """Whether hints contain lengths and durations. Turns are then reported ahead, too."""
    noise: float = 0.0
    """The relative error p: each value m becomes max(0, m + N(0, p·m)), as in the papers."""
    forecasts: Forecasts = field(default_factory=dict)
    """Forecasts of a predictor, which are sent in addition to the hints."""
    reports: Reports = Reports.NOTHING

    @property
    def ends_known(self) -> bool:
        """Whether a program is known to have ended once its last turn has."""
        return self.oracle or self.reports is not Reports.NOTHING

    def identities(
        self, name: str, program: PlannedProgram, seed: tuple[int, ...], parent: str | None = None
    ) -> list[ProgramIdentity]:
        """Make the identity of each turn. The result depends on ``seed`` and not on the policy."""
        works = turns_of(program)
        rng = np.random.default_rng([*seed, NOISE_STREAM])
        last, ahead = len(works) - 1, self.oracle or self.reports is Reports.AHEAD
        identities: list[ProgramIdentity] = []
        for index, turn in enumerate(program.turns):
            hints = Hints(
                expected_tool=turn.tool if ahead else None,
                last_tool=program.turns[index - 1].tool if index else None,
            )
            if self.oracle:
                hints = self._with_oracle(hints, turn.pause_s, works[index:], rng)
            forecasts = self.forecasts.get(program.program_id)
            forecast = None if forecasts is None else forecasts[index]
            is_last = ahead and index == last
            identities.append(ProgramIdentity(name, parent, last_turn=is_last, hints=hints, forecast=forecast))
        return identities

    def _with_oracle(self, hints: Hints, pause_s: float, works: list[TurnWork], rng: np.random.Generator) -> Hints:
        """Add true or noisy values to hints. ``works``: those of this turn and of later ones. Draws five numbers."""
        true = np.array(
            [works[0].output_tokens, pause_s, works[0].returned_tokens, tokens_of(works[1:]), len(works) - 1], float
        )
        output, pause, returned, later, turns = np.maximum(0.0, true + self.noise * true * rng.standard_normal(5))
        return replace(
            hints,
            expected_output_tokens=round(output),
            expected_pause_s=float(pause),
            expected_returned_tokens=round(returned),
            expected_later_tokens=round(later),
            expected_later_turns=round(turns),
        )
