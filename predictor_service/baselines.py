"""What forecasts are compared with: the mean per tool, and an exponential distribution of that mean (InferCept)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cluster.program import without_class
from predictor_service.context import PauseContext, TurnContext
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, Floats
from predictor_service.examples import ProgramExample
from predictor_service.model import NO_TOOL, Remaining

_POINT = 1e-9
"""Width of a distribution that is a number."""
Key = tuple[str, str]


class _Means:
    """Of the values of a source's tool; where there were none, of all values."""

    def __init__(self) -> None:
        self._sums: dict[Key | None, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, key: Key, value: float) -> None:
        for level in (key, None):
            self._sums[level][0] += 1
            self._sums[level][1] += value

    def of(self, key: Key) -> float:
        count, total = self._sums.get(key) or self._sums.get(None) or (1.0, 0.0)
        return total / count


class PerToolMean:
    """Means of the train side, per source and tool: of a turn, the tool whose result it brings."""

    def __init__(self) -> None:
        self._length, self._left_tokens, self._left_turns = _Means(), _Means(), _Means()
        self._duration, self._returned = _Means(), _Means()
        self._next: dict[Key, Counter[str]] = defaultdict(Counter)

    @classmethod
    def fit(cls, programs: Iterable[ProgramExample]) -> "PerToolMean":
        """From what is known of ``programs``."""
        model = cls()
        for program in programs:
            for turn in program.turns:
                model._learn_turn(turn.context, turn.outcome.output_tokens, turn.outcome.tool, turn.remaining)
                if turn.pause is not None and turn.pause_outcome is not None:
                    key, outcome = _called(turn.pause), turn.pause_outcome
                    if outcome.duration_s is not None:
                        model._duration.add(key, outcome.duration_s)
                    if outcome.returned_tokens is not None:
                        model._returned.add(key, outcome.returned_tokens)
        return model

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`; a number, on edges of its own."""
        return [self._spread(self._length.of(_brought(turn)), LENGTH_EDGES) for turn in turns]

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return [
            Remaining(self._spread(self._left_tokens.of(key), LENGTH_EDGES), self._left_turns.of(key))
            for key in map(_brought, turns)
        ]

    def tools(self, turns: Sequence[TurnContext]) -> Sequence[Mapping[str, float]]:
        """See `ToolModel`: shares after the same tool."""
        return [self._shares(_brought(turn)) for turn in turns]

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return [self._spread(self._duration.of(_called(pause)), DURATION_EDGES) for pause in pauses]

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return [self._spread(self._returned.of(_called(pause)), LENGTH_EDGES) for pause in pauses]

    def _spread(self, mean: float, edges: Floats) -> Distribution:
        mean = max(mean, _POINT)
        return Distribution(np.array([mean - _POINT, mean]), np.array([1.0]))

    def _learn_turn(self, turn: TurnContext, tokens: int, tool: str, remaining: tuple[int, int]) -> None:
        key = _brought(turn)
        self._length.add(key, tokens)
        self._left_tokens.add(key, remaining[0])
        self._left_turns.add(key, remaining[1])
        self._next[key][tool] += 1

    def _shares(self, key: Key) -> Mapping[str, float]:
        counts = self._next.get(key) or {NO_TOOL: 1}
        total = sum(counts.values())
        return {tool: count / total for tool, count in counts.items()}


class PerToolExponential(PerToolMean):
    """The same means, each with an exponential distribution."""

    def _spread(self, mean: float, edges: Floats) -> Distribution:
        below = -np.expm1(-edges / max(mean, _POINT))
        return Distribution.of_counts(edges, np.diff(below))


def _brought(turn: TurnContext) -> Key:
    return turn.source, without_class(turn.tools[0]) if turn.tools else "start"


def _called(pause: PauseContext) -> Key:
    return pause.turn.source, without_class(pause.tool)
