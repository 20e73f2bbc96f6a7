"""A trained model, statistics that learn while they serve, and the correction of the model's drift.

Plain: no Ray, no clock, no I/O. `shared.py` shares what is learnt, `service.py` and `client.py` serve it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from math import exp, isfinite, log, log1p
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from cluster.core.program import Prediction, ToolPrediction
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, Floats
from predictor_service.level_counts import decode_key, encode_key
from predictor_service.model import (
    NO_TOOL,
    DurationModel,
    LengthModel,
    Observation,
    PauseContext,
    PauseSeen,
    Remaining,
    TurnContext,
    TurnSeen,
    learn,
    sensible,
)
from predictor_service.statistics_model import StatisticsModel

MOST_TOOLS = 3
"""A prediction names so many tools of a turn, the most probable ones."""
LEAST_SHARE = 0.02
"""A less probable tool is not named."""
MOST = 1e9
"""No number of a prediction is larger."""
VERSION = 1
LENGTH_UNIT, DURATION_UNIT_S = 1.0, 0.01


# --- drift ---

RECENT = 400
"""A mean error is mostly of so many observations."""
PRIOR = 30.0
"""Observations without an error that are added to those of a key."""
MOST_DRIFT = log(8.0)
"""No distribution is stretched or squeezed by more."""
MAX_KEYS = 2048

Key = tuple[str, ...]
DriftRow = tuple[list[bytes], float, float]
"""A key, its observations and their mean error."""


class Drift:
    """Corrects a trained model for what has changed since its training.

    Errors are ratios: by source and tool, the mean of log(actual) - E[log(predicted)] of recent observations. With few
    observations the mean is drawn to 0. A predicted distribution is stretched by the ratio. The least recently used key
    is dropped first.

    Args:
        unit: errors are of log(1 + value / unit).
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._means: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        """Observations, at most RECENT; their mean error."""

    def observe(self, key: Key, forecast: Distribution, actual: float) -> None:
        """Compare an uncorrected forecast with what happened. Values that make no sense are ignored."""
        if not (isfinite(actual) and actual >= 0):
            return
        error = log1p(actual / self._unit) - self._expected(forecast)
        if not isfinite(error):
            return
        count, mean = self._means.get(key, (0.0, 0.0))
        count = min(count + 1, RECENT)
        self._means[key] = (count, mean + (error - mean) / count)
        self._means.move_to_end(key)
        if len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)

    def ratio(self, key: Key) -> float:
        """The factor for the forecasts of ``key``."""
        count, mean = self._means.get(key, (0.0, 0.0))
        return exp(min(max(mean * count / (count + PRIOR), -MOST_DRIFT), MOST_DRIFT))

    def corrected(self, key: Key, forecast: Distribution) -> Distribution:
        """The forecast, stretched; on the same edges."""
        ratio = self.ratio(key)
        return forecast if abs(ratio - 1) < 0.01 else stretched(forecast, ratio)

    def rows(self) -> list[DriftRow]:
        """All mean errors, for other writers."""
        return [(encode_key(key), count, mean) for key, (count, mean) in self._means.items()]

    def fill(self, rows: Iterable[DriftRow]) -> None:
        """Take another writer's mean errors for the keys that are unknown here.

        Raises:
            ValueError: a key is malformed.
        """
        for name, count, mean in rows:
            if isfinite(count) and isfinite(mean) and count > 0 and (key := decode_key(name)) not in self._means:
                self._means[key] = (min(count, RECENT), mean)
        while len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)

    def ratios(self) -> Mapping[str, float]:
        """By key, for operators."""
        return {" ".join(key): self.ratio(key) for key in self._means}

    def _expected(self, forecast: Distribution) -> float:
        middles = (forecast.edges[:-1] + forecast.edges[1:]) / 2
        return float(forecast.shares @ np.log1p(middles / self._unit))


def stretched(distribution: Distribution, ratio: float) -> Distribution:
    """The distribution of ``ratio`` times the value, on the same edges; what is beyond the edges is in the last bin."""
    edges = distribution.edges
    cumulated = np.concatenate([[0.0], np.cumsum(distribution.shares)])
    at = np.interp(edges / ratio, edges, cumulated)
    at[-1] = cumulated[-1]
    return Distribution(edges, np.diff(at))


# --- the predictor ---


@runtime_checkable
class JointLengthModel(Protocol):
    """A LengthModel that answers both questions at the price of one."""

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """See `LengthModel`."""
        ...


@runtime_checkable
class JointDurationModel(Protocol):
    """A DurationModel that answers both questions at the price of one."""

    def durations_and_returned(
        self, pauses: Sequence[PauseContext]
    ) -> tuple[Sequence[Distribution], Sequence[Distribution]]:
        """See `DurationModel`."""
        ...


class _State(msgspec.Struct, array_like=True):
    """The bytes' format, in msgpack."""

    version: int
    statistics: bytes
    lengths: list[DriftRow]
    durations: list[DriftRow]


class Predictor:
    """Predicts turns, and learns from them.

    Args:
        statistics: learns while it serves; answers what the trained models do not.
        lengths: a trained model; None: the statistics.
        durations: the same for pauses.
        base: `StatisticsModel.to_bytes` of what was seen before, that the statistics begin with; as another writer's.

    Raises:
        ValueError: ``base`` is no such bytes.
    """

    def __init__(
        self,
        statistics: StatisticsModel,
        lengths: LengthModel | None = None,
        durations: DurationModel | None = None,
        base: bytes | None = None,
    ) -> None:
        self.statistics = statistics
        self._base = () if base is None else (base,)
        statistics.replace_others(self._base)
        self.nonsense = 0
        """Observations that made no sense."""
        self.broken = 0
        """Answers of trained models that were no distributions."""
        self.length_drift, self.duration_drift = Drift(LENGTH_UNIT), Drift(DURATION_UNIT_S)
        self._lengths = lengths
        self._durations = durations

    def predict(self, turns: Sequence[TurnContext]) -> list[Prediction]:
        """One for each turn, in their order."""
        lengths, remaining = self._of_turns(turns)
        shares = self.statistics.tools(turns)
        likely = [_likely(each) for each in shares]
        pauses = [
            PauseContext(turn, tool, round(length.mean))
            for turn, length, tools in zip(turns, lengths, likely, strict=True)
            for tool, _ in tools
        ]
        durations, returned = map(iter, self._of_pauses(pauses))
        made = []
        for length, ahead, tools, share in zip(lengths, remaining, likely, shares, strict=True):
            of_tools = [(tool, p, next(durations), next(returned)) for tool, p in tools]
            made.append(_prediction(length, ahead, of_tools, 1.0 - share.get(NO_TOOL, 0.0)))
        return made

    def learn(self, observations: Sequence[Observation]) -> None:
        """Learn from observations. Those that make no sense are counted, and change nothing."""
        good = [one for one in observations if sensible(one)]
        self.nonsense += len(observations) - len(good)
        self._learn_drift(good)
        for one in good:
            self.nonsense += not learn(self.statistics, one)

    # --- sharing and keeping ---

    def to_bytes(self) -> bytes:
        """What this one has learnt itself: statistics and drift."""
        state = _State(VERSION, self.statistics.to_bytes(), self.length_drift.rows(), self.duration_drift.rows())
        return bytes(msgspec.msgpack.encode(state))

    def replace_others(self, others: Iterable[bytes]) -> None:
        """From now on these ``to_bytes`` are what other writers have learnt.

        Their drift counts for keys of which nothing was seen here.

        Raises:
            ValueError: they are no such bytes.
        """
        states = [_state(data) for data in others]
        self.statistics.replace_others([*self._base, *(state.statistics for state in states)])
        for state in states:
            self.length_drift.fill(state.lengths)
            self.duration_drift.fill(state.durations)

    def _learn_drift(self, observations: Sequence[Observation]) -> None:
        if self._lengths is not None:
            turns = [one for one in observations if isinstance(one, TurnSeen)]
            for seen, length in zip(turns, self._lengths.lengths([one.turn for one in turns]), strict=True):
                self.length_drift.observe(_source(seen.turn), length, seen.outcome.output_tokens)
        if self._durations is not None:
            pauses = [one for one in observations if isinstance(one, PauseSeen)]
            for pause, duration in zip(pauses, self._durations.durations([one.pause for one in pauses]), strict=True):
                if pause.outcome.duration_s is not None:
                    self.duration_drift.observe(_called(pause.pause), duration, pause.outcome.duration_s)

    def _of_turns(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        statistics, model = self.statistics, self._lengths
        if model is None:
            return statistics.lengths(turns), statistics.remaining(turns)
        if isinstance(model, JointLengthModel):
            lengths, remaining = model.lengths_and_remaining(turns)
        else:
            lengths, remaining = model.lengths(turns), model.remaining(turns)
        if not all(_is_distribution(one, LENGTH_EDGES) for one in lengths):
            self.broken += 1
            lengths = statistics.lengths(turns)
        else:
            drift = self.length_drift
            lengths = [drift.corrected(_source(turn), one) for turn, one in zip(turns, lengths, strict=True)]
        if not all(_is_distribution(one.tokens, LENGTH_EDGES) and isfinite(one.turns) for one in remaining):
            self.broken += 1
            remaining = statistics.remaining(turns)
        return lengths, remaining

    def _of_pauses(self, pauses: Sequence[PauseContext]) -> tuple[Sequence[Distribution], Sequence[Distribution]]:
        statistics, model = self.statistics, self._durations
        if not pauses:
            return (), ()
        if model is None:
            return statistics.durations(pauses), statistics.returned(pauses)
        if isinstance(model, JointDurationModel):
            durations, returned = model.durations_and_returned(pauses)
        else:
            durations, returned = model.durations(pauses), model.returned(pauses)
        if not all(_is_distribution(one, DURATION_EDGES) for one in durations):
            self.broken += 1
            durations = statistics.durations(pauses)
        else:
            drift = self.duration_drift
            durations = [drift.corrected(_called(pause), one) for pause, one in zip(pauses, durations, strict=True)]
        if not all(_is_distribution(one, LENGTH_EDGES) for one in returned):
            self.broken += 1
            returned = statistics.returned(pauses)
        return durations, returned


def readable(data: bytes) -> bool:
    """Whether these are a predictor's ``to_bytes``."""
    try:
        Predictor(StatisticsModel()).replace_others([data])
    except ValueError:
        return False
    return True


def _state(data: bytes) -> _State:
    try:
        state = msgspec.msgpack.decode(data, type=_State)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not the state of a predictor: {error}") from error
    if state.version != VERSION:
        raise ValueError(f"version {state.version} of a predictor's state, not {VERSION}")
    return state


def _likely(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    """The tools that a prediction names, the most probable first."""
    called = [(tool, share) for tool, share in shares.items() if tool != NO_TOOL and share >= LEAST_SHARE]
    return nlargest(MOST_TOOLS, called, key=lambda one: one[1])


def _prediction(
    length: Distribution,
    ahead: Remaining,
    tools: Sequence[tuple[str, float, Distribution, Distribution]],
    calls: float,
) -> Prediction:
    """``tools``: each with its probability, how long it takes and what it brings; ``calls``: that there is any."""
    named = tuple(
        ToolPrediction(tool, _number(share), _number(duration.mean), _number(returned.mean))
        for tool, share, duration, returned in tools
    )
    covered = sum(one.share for one in named)
    pause_s = returned_tokens = pause_p50_s = 0.0
    if covered > 0:
        # The tools that are not named are assumed to be like those that are.
        pause_s = calls * sum(one.share * one.pause_s for one in named) / covered
        returned_tokens = calls * sum(one.share * one.returned_tokens for one in named) / covered
        mixed = sum((share * duration.shares for _, share, duration, _ in tools), np.zeros(len(DURATION_EDGES) - 1))
        pause_p50_s = Distribution.of_counts(DURATION_EDGES, mixed).quantile(0.5)
    return Prediction(
        output_tokens=_number(length.mean),
        output_p90_tokens=_number(length.quantile(0.9)),
        pause_s=_number(pause_s),
        pause_p50_s=_number(pause_p50_s),
        returned_tokens=_number(returned_tokens),
        later_tokens=_number(ahead.tokens.mean),
        later_turns=_number(ahead.turns),
        tools=named,
    )


def _number(value: float) -> float:
    """A finite number in four digits, which is short as JSON."""
    return float(f"{min(max(float(value), 0.0), MOST):.4g}")


def _is_distribution(distribution: Distribution, edges: Floats) -> bool:
    """Whether a trained model's answer is a distribution on these edges."""
    return len(distribution.shares) == len(edges) - 1 and isfinite(distribution.mean)


def _source(turn: TurnContext) -> tuple[str, ...]:
    return (turn.source,)


def _called(pause: PauseContext) -> tuple[str, ...]:
    return pause.turn.source, pause.tool
