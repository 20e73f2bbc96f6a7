"""What a simulated program's client says of its turns: the tool that a turn calls and, as an oracle, the future."""

from dataclasses import dataclass, field, replace

import numpy as np

from cluster.bench.workload import PlannedProgram
from cluster.program import Hints, ProgramIdentity
from cluster.simulator.forecasts import Forecasts
from cluster.simulator.work import TurnWork, tokens_of, turns_of

NOISE_STREAM = 0x6E6F6973
"""Sets the forecasts' random numbers apart from those of the same program's token ids."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """How much of the future a turn's hints tell."""

    oracle: bool = False
    """Lengths and durations are told; else only the tool's name, as live clients do."""
    noise: float = 0.0
    """p: each told value m becomes max(0, m + N(0, p·m)), the error that the papers inject."""
    forecasts: Forecasts = field(default_factory=dict)
    """What a predictor says beside the hints."""

    def identities(self, name: str, program: PlannedProgram, seed: tuple[int, ...]) -> list[ProgramIdentity]:
        """One for each turn; the same for the same ``seed``, whatever the policy."""
        works = turns_of(program)
        rng = np.random.default_rng([*seed, NOISE_STREAM])
        last = len(works) - 1
        identities: list[ProgramIdentity] = []
        for index, turn in enumerate(program.turns):
            hints = Hints(
                expected_tool=turn.tool,
                last_tool=program.turns[index - 1].tool if index else None,
            )
            if self.oracle:
                hints = self._told(hints, turn.pause_s, works[index:], rng)
            said = self.forecasts.get(program.program_id)
            forecast = None if said is None else said[index]
            identities.append(ProgramIdentity(program_id=name, last_turn=index == last, hints=hints, forecast=forecast))
        return identities

    def _told(self, hints: Hints, pause_s: float, works: list[TurnWork], rng: np.random.Generator) -> Hints:
        """``works``: this turn's and those after it. Five numbers are drawn, whatever the noise."""
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
