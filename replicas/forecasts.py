"""Forecasts a turn: by the client's hints, else by the predictor, else by earlier turns of its kind.

The kind of a turn is the tool whose result it brings. The kind of a first turn is the size class of its prompt. Means
are learnt online at three levels (all turns; kind; kind and position). Each mean is shrunk towards that of the level
above while it has few observations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.program import Hints, Prediction, ToolPrediction
from cluster.durations.table import DurationTable
from replicas.policy import Forecast

MAX_POSITION = 24
"""Largest position that is distinguished. Later positions count as this one."""
MAX_KINDS = 1024
"""Largest number of kinds and positions that are kept. Others count at the level above."""
PARENT_WEIGHT = 4.0
"""Number of observations for which the mean of the level above counts."""
MAX_OPEN_TURNS = 512
"""Largest number of turns of an unfinished program that are kept until the program ends."""


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a turn when it arrives."""

    kind: str
    position: int

    @classmethod
    def of(cls, tool: str, position: int, prompt_tokens: int) -> "Features":
        """Return the features of a turn.

        Args:
            tool: the tool whose result the turn brings; empty for a first turn.
            position: number of the program's turns before it.
            prompt_tokens: length of its prompt, in tokens.
        """
        return cls(tool or f"prompt:{prompt_tokens.bit_length()}", min(position, MAX_POSITION))

    @property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """Keys of the three levels, the most general first."""
        return ("", -1), (self.kind, -1), (self.kind, self.position)


NOTHING_KNOWN = Features("", -1)


class _Means:
    """The mean of a value at each level, shrunk towards the mean of the level above."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._sums: dict[tuple[str, int], tuple[int, float]] = {}

    def observe(self, features: Features, value: float) -> None:
        for level in features.levels:
            if level in self._sums or len(self._sums) < MAX_KINDS:
                count, total = self._sums.get(level, (0, 0.0))
                self._sums[level] = (count + 1, total + value)

    def of(self, features: Features) -> float:
        mean = self._default
        for level in features.levels:
            count, total = self._sums.get(level, (0, 0.0))
            mean = (total + PARENT_WEIGHT * mean) / (count + PARENT_WEIGHT)
        return mean


class Forecaster:
    """Learns from turns that have ended. Each replica has one."""

    def __init__(self) -> None:
        self._output = _Means(default=128.0)
        self._returned = _Means(default=64.0)
        self._later_tokens = _Means(default=512.0)
        self._later_turns = _Means(default=2.0)
        self._open: dict[str, list[tuple[Features, int]]] = {}

    def of(
        self,
        features: Features,
        hints: Hints,
        durations: DurationTable,
        last: bool,
        foreseen: Prediction | None = None,
    ) -> Forecast:
        """Return the forecast of a turn.

        Args:
            features: what is known of the turn.
            hints: the client's hints, which come first.
            durations: tool durations, for the pause.
            last: whether the turn is its program's last; nothing follows it then.
            foreseen: the predictor's forecast, which comes second. None: the means of this replica are used.
        """
        output = _first_of(
            hints.expected_output_tokens,
            None if foreseen is None else foreseen.output_tokens,
            lambda: self._output.of(features),
        )
        if last:
            return Forecast(output, 0.0, 0.0, 0.0, 0.0)
        # A tool that is named, by the client or by the turn's own output, corrects what was foreseen without it.
        of_tool: Prediction | ToolPrediction | None = foreseen
        if foreseen is not None and hints.expected_tool is not None:
            of_tool = foreseen.tool(hints.expected_tool)
        tool = hints.expected_tool or features.kind
        return Forecast(
            output_tokens=output,
            pause_s=_first_of(
                hints.expected_pause_s,
                None if of_tool is None else of_tool.pause_s,
                lambda: expected_pause_s(tool, durations),
            ),
            returned_tokens=_first_of(
                hints.expected_returned_tokens,
                None if of_tool is None else of_tool.returned_tokens,
                lambda: self._returned.of(features),
            ),
            later_tokens=_first_of(
                hints.expected_later_tokens,
                None if foreseen is None else foreseen.later_tokens,
                lambda: self._later_tokens.of(features),
            ),
            later_turns=_first_of(
                hints.expected_later_turns,
                None if foreseen is None else foreseen.later_turns,
                lambda: self._later_turns.of(features),
            ),
            pause_hinted=hints.expected_pause_s is not None,
        )

    def turn_ended(self, key: str, features: Features, output_tokens: int, served_tokens: int) -> None:
        """Learn from a turn that ended.

        Args:
            key: the program's key.
            features: what was known of the turn.
            output_tokens: tokens that the turn generated.
            served_tokens: tokens computed for the program so far, this turn included.
        """
        self._output.observe(features, output_tokens)
        turns = self._open.setdefault(key, [])
        if len(turns) < MAX_OPEN_TURNS:
            turns.append((features, served_tokens))

    def tools_returned(self, key: str, tokens: int) -> None:
        """Learn how many new prompt tokens the program's next turn brought."""
        if turns := self._open.get(key):
            self._returned.observe(turns[-1][0], tokens)

    def program_ended(self, key: str, served_tokens: int) -> None:
        """Learn from a program that ended: it is now known what came after each of its turns."""
        turns = self._open.pop(key, [])
        for position, (features, so_far) in enumerate(turns):
            self._later_tokens.observe(features, max(0, served_tokens - so_far))
            self._later_turns.observe(features, len(turns) - 1 - position)


def expected_pause_s(tool: str, durations: DurationTable) -> float:
    """Return the mean duration of the tool with such arguments, else of the tool, else of all tools, else 1 s."""
    return next((statistics.mean_s for statistics in durations.levels(tool)), 1.0)


def _first_of(hint: float | None, foreseen: float | None, otherwise: Callable[[], float]) -> float:
    if hint is not None:
        return float(hint)
    return foreseen if foreseen is not None else otherwise()
