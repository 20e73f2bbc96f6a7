"""When do paused programs come back, if they do? By what was observed of their tools, and how long they are away."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp

from cluster.durations import Durations
from cluster.lifecycle import ProgramState
from cluster.program import tool_key
from cluster.statistics import OVERALL, DurationTable
from replicas.policies.stopping import TOLD_SLACK, Tool
from replicas.policy import Forecast

MIN_OBSERVATIONS = 5
"""Durations of a tool that are enough to go by; with fewer, what is known of tools in general counts."""
PRIOR_PAUSES = 10
"""Before anything was seen, one pause of so many is taken for an end."""
DONE_S = 1.0
"""A program whose tool has finished, as its executor said, is expected back after about so long."""


AGES_PER_OCTAVE = 8
"""Pauses of about the same length, an eighth more or less, are taken for the same: it saves most of the work."""


@dataclass(frozen=True, slots=True)
class Comeback:
    """Of one paused program."""

    alive: float
    """Probability that it comes back at all."""
    within: tuple[float, ...]
    """Probabilities that it is back by the given times."""


class Comebacks:
    """Answers for one moment.

    A program that says nothing any more looks like one that waits for a slow tool. By Bayes, with e how often a pause
    has turned out to be an end and S(t) the share of pauses longer than t:
    P(comes back | silent for t) = (1 - e) S(t) / ((1 - e) S(t) + e).

    Args:
        durations: what is known of pauses.
        ends: pauses that were none, of those seen here: programs that ended without saying so.
        now_s: the moment.
        horizons_s: seconds from then that are asked for.
    """

    def __init__(self, durations: DurationTable, ends: int, now_s: float, horizons_s: Sequence[float]) -> None:
        self._durations = durations
        self._end_share = (ends + 1) / (ends + durations.own()[OVERALL].count + PRIOR_PAUSES)
        self._now_s = now_s
        self._horizons_s = horizons_s
        self._known: dict[str, Durations | None] = {}
        self._answers: dict[tuple[str, int], Comeback] = {}

    def of(self, program: ProgramState, forecast: Forecast | None) -> Comeback:
        """Of a program that has no turn in flight; ``forecast``: of the turn that its pause followed, if known."""
        if program.paused_s is not None and program.observed:
            return self._answer(Tool(None, None, DONE_S), max(0.0, self._now_s - program.last_event_s))
        began_s = program.last_event_s if program.paused_s is None else program.paused_s
        away_s = max(0.0, self._now_s - (began_s if program.tool_started_s is None else program.tool_started_s))
        name = program.tools[0] if len(program.tools) == 1 else tool_key(program.tools)
        if forecast is not None and forecast.pause_told:
            told_s = max(0.0, forecast.pause_s)
            return self._answer(Tool(self._statistics(name), told_s, max(1e-3, told_s)), away_s)
        mantissa, octave = frexp(away_s)
        age = int(((octave + 2 * mantissa) if away_s else -64) * AGES_PER_OCTAVE)
        answer = self._answers.get((name, age))
        if answer is None:
            statistics = self._statistics(name)
            tool = Tool(statistics, None, statistics.mean_s if statistics else 1.0)
            answer = self._answers[name, age] = self._answer(tool, away_s)
        return answer

    def _statistics(self, name: str) -> Durations | None:
        if name not in self._known:
            levels = list(self._durations.levels(name))
            enough = (level for level in levels if level.count >= MIN_OBSERVATIONS)
            self._known[name] = next(enough, levels[-1] if levels else None)
        return self._known[name]

    def _answer(self, tool: Tool, away_s: float) -> Comeback:
        lasts = (1 - self._end_share) * _share_longer(tool, away_s)
        alive = lasts / (lasts + self._end_share)
        survival = tool.survival(away_s)
        return Comeback(alive, tuple(alive * (1.0 - survival(more_s)) for more_s in self._horizons_s))


def _share_longer(tool: Tool, away_s: float) -> float:
    """S(away): the share of such pauses that last longer. Past all that was observed it falls as 1 / away."""
    if tool.told_s is not None and away_s <= tool.told_s * TOLD_SLACK:
        return 1.0
    statistics = tool.statistics
    if statistics is None:
        return tool.expected_s / (tool.expected_s + away_s)
    longer = statistics.survival(away_s)
    return longer if longer > 0 else statistics.max_s / max(away_s, statistics.max_s, 1e-3) / (statistics.count + 1)
