"""What is expected of a turn: the client's hints, the predictor's forecast, or else what turns of its kind did before.

The kind of a turn is the tool whose result it brings; of a first turn, the size class of its prompt. Means are learnt
online at three levels (all turns, kind, kind and position), each drawn to its parent while it has seen little.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.program import Hints, Prediction, ToolPrediction
from cluster.durations.table import DurationTable
from replicas.policy import Forecast

MAX_POSITION = 24
"""Later positions count as this one."""
MAX_KINDS = 1024
"""Kinds and positions that are kept; others count at the level above."""
PARENT_WEIGHT = 4.0
"""Observations that the parent's mean counts for."""
MAX_OPEN_TURNS = 512
"""Turns of one unfinished program that are remembered for what came after them."""


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a turn when it arrives."""

    kind: str
    position: int

    @classmethod
    def of(cls, tool: str, position: int, prompt_tokens: int) -> "Features":
        """``tool``: whose result it brings, empty at the start; ``position``: turns before it."""
        return cls(tool or f"prompt:{prompt_tokens.bit_length()}", min(position, MAX_POSITION))

    @property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """From the general to the particular."""
        return ("", -1), (self.kind, -1), (self.kind, self.position)


NOTHING_KNOWN = Features("", -1)


class _Means:
    """A mean for every level, drawn to its parent's."""

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
    """Learns from turns that have ended; one per replica."""

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
        """The forecast of a turn: hints first, then what the predictor foresaw, then what was learnt here."""
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
        """A turn generated ``output_tokens``; ``served_tokens`` were computed for its program so far, it included."""
        self._output.observe(features, output_tokens)
        turns = self._open.setdefault(key, [])
        if len(turns) < MAX_OPEN_TURNS:
            turns.append((features, served_tokens))

    def tools_returned(self, key: str, tokens: int) -> None:
        """The program's next turn brought so many new prompt tokens."""
        if turns := self._open.get(key):
            self._returned.observe(turns[-1][0], tokens)

    def program_ended(self, key: str, served_tokens: int) -> None:
        """The program is over: what came after each of its turns is known."""
        turns = self._open.pop(key, [])
        for position, (features, so_far) in enumerate(turns):
            self._later_tokens.observe(features, max(0, served_tokens - so_far))
            self._later_turns.observe(features, len(turns) - 1 - position)


def expected_pause_s(tool: str, durations: DurationTable) -> float:
    """Mean duration of the tool with such arguments, else of the tool, else of all tools, else 1 s."""
    return next((statistics.mean_s for statistics in durations.levels(tool)), 1.0)


def _first_of(hint: float | None, foreseen: float | None, otherwise: Callable[[], float]) -> float:
    if hint is not None:
        return float(hint)
    return foreseen if foreseen is not None else otherwise()
