"""The predictor: a trained model, statistics that learn while they serve, and a correction of the model's drift.

The module uses no Ray, no clock and no I/O. `shared.py` shares the statistics; `service.py` and `client.py` serve
predictions.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    RemainingModel,
    ReturnedModel,
    TurnContext,
    TurnSeen,
    learn,
    sensible,
)
from predictor_service.statistics_model import Encoding, StatisticsModel, result_of

MOST_TOOLS = 3
"""Tools that a prediction names, at most: the most probable ones."""
LEAST_SHARE = 0.02
"""Least probability of a tool that a prediction names."""
MOST = 1e9
"""Upper bound of every number in a prediction."""
VERSION = 1
LENGTH_UNIT, DURATION_UNIT_S = 1.0, 0.01


# --- drift ---

RECENT = 400
"""Number of recent observations that dominate a mean error."""
PRIOR = 30.0
"""Observations with an error of 0 that are added to those of each key."""
MOST_DRIFT = log(8.0)
"""Logarithm of the largest factor by which a distribution is stretched or compressed."""
MAX_KEYS = 2048

Key = tuple[str, ...]
DriftRow = tuple[list[bytes], float, float]
"""A key, the number of its observations, and their mean error."""


class Drift:
    """Corrects the predictions of a trained model for changes since its training.

    The error of a source and tool is the mean of log(actual) - E[log(predicted)] over recent observations. With few
    observations, the mean is shrunk towards 0. A predicted distribution is stretched by the ratio. The least recently
    used key is dropped first.

    Args:
        unit: errors are differences of log(1 + value / unit).
    """

    def __init__(self, unit: float) -> None:
        self._unit = unit
        self._means: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        """By key, the number of observations (at most `RECENT`), and their mean error."""

    def observe(self, key: Key, forecast: Distribution, actual: float) -> None:
        """Compare an uncorrected forecast with the actual value. Invalid values are ignored."""
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
        """Return the factor for the forecasts of ``key``."""
        count, mean = self._means.get(key, (0.0, 0.0))
        return exp(min(max(mean * count / (count + PRIOR), -MOST_DRIFT), MOST_DRIFT))

    def corrected(self, key: Key, forecast: Distribution) -> Distribution:
        """Return the forecast stretched by the key's ratio, on the same edges."""
        ratio = self.ratio(key)
        return forecast if abs(ratio - 1) < 0.01 else stretched(forecast, ratio)

    def rows(self) -> list[DriftRow]:
        """Return all mean errors, for other writers."""
        return [(encode_key(key), count, mean) for key, (count, mean) in self._means.items()]

    def fill(self, rows: Iterable[DriftRow]) -> None:
        """Use another writer's mean errors for the keys that are unknown here.

        Raises:
            ValueError: a key is malformed.
        """
        for name, count, mean in rows:
            if isfinite(count) and isfinite(mean) and count > 0 and (key := decode_key(name)) not in self._means:
                self._means[key] = (min(count, RECENT), mean)
        while len(self._means) > MAX_KEYS:
            self._means.popitem(last=False)

    def ratios(self) -> Mapping[str, float]:
        """Return the factor of each key, for operators."""
        return {" ".join(key): self.ratio(key) for key in self._means}

    def _expected(self, forecast: Distribution) -> float:
        middles = (forecast.edges[:-1] + forecast.edges[1:]) / 2
        return float(forecast.shares @ np.log1p(middles / self._unit))


def stretched(distribution: Distribution, ratio: float) -> Distribution:
    """Return the distribution of ``ratio`` times the value, on the same edges. The last bin is open."""
    edges = distribution.edges
    cumulated = np.concatenate([[0.0], np.cumsum(distribution.shares)])
    at = np.interp(edges / ratio, edges, cumulated)
    at[-1] = cumulated[-1]
    return Distribution(edges, np.diff(at))


# --- the predictor ---


@runtime_checkable
class JointLengthModel(Protocol):
    """A LengthModel that predicts lengths and remaining work in one computation."""

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """Predict both for each turn: see `LengthModel`."""
        ...


@runtime_checkable
class JointDurationModel(Protocol):
    """A DurationModel that predicts durations and returned tokens in one computation."""

    def durations_and_returned(
        self, pauses: Sequence[PauseContext]
    ) -> tuple[Sequence[Distribution], Sequence[Distribution]]:
        """Predict both for each pause: see `DurationModel`."""
        ...


class _State(msgspec.Struct, array_like=True):
    """The stored format, in msgpack."""

    version: int
    statistics: bytes
    lengths: list[DriftRow]
    durations: list[DriftRow]
    bundle: str = ""
    """Identifies the trained models whose drift this is."""


class Predictor:
    """Predicts turns, and learns from them.

    Args:
        statistics: learns while it serves, and predicts what the trained models do not.
        lengths: a trained model of lengths, and of the remaining work if it is a RemainingModel; None uses the
            statistics.
        durations: a trained model of durations, and of returned tokens if it is a ReturnedModel; None uses the
            statistics.
        base: `StatisticsModel.to_bytes` of earlier observations, which count as those of another writer.
        bundle: identifies the trained models: see `bundle_id`. The drift of other models is not used. Empty: there is
            no bundle.

    Raises:
        ValueError: ``base`` cannot be decoded.
    """

    def __init__(
        self,
        statistics: StatisticsModel,
        lengths: LengthModel | None = None,
        durations: DurationModel | None = None,
        base: bytes | None = None,
        bundle: str = "",
    ) -> None:
        self.statistics = statistics
        self._base = () if base is None else (base,)
        self._bundle = bundle
        statistics.replace_others(self._base)
        self.nonsense = 0
        """Number of invalid observations."""
        self.broken = 0
        """Number of answers of trained models that were no distributions."""
        self.length_drift, self.duration_drift = Drift(LENGTH_UNIT), Drift(DURATION_UNIT_S)
        self._lengths = lengths
        self._durations = durations

    def predict(self, turns: Sequence[TurnContext]) -> list[Prediction]:
        """Return one prediction for each turn, in their order."""
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
        """Learn from observations. Invalid ones are counted, and change nothing."""
        good = [one for one in observations if sensible(one)]
        self.nonsense += len(observations) - len(good)
        self._learn_drift(good)
        for one in good:
            self.nonsense += not learn(self.statistics, one)

    # --- sharing and keeping ---

    def to_bytes(self) -> bytes:
        """Encode the statistics and the drift that this predictor has learnt itself."""
        return result_of(self.encoding())

    def encoding(self) -> Encoding:
        """Return the steps of `to_bytes`. The predictor may learn between two steps."""
        statistics = yield from self.statistics.encoding()
        yield
        state = _State(VERSION, statistics, self.length_drift.rows(), self.duration_drift.rows(), self._bundle)
        return bytes(msgspec.msgpack.encode(state))

    def replace_others(self, others: Iterable[bytes]) -> None:
        """Replace what other writers have learnt by these ``to_bytes``.

        Their drift is used for keys without an observation here, if it is that of the same bundle.

        Raises:
            ValueError: the bytes cannot be decoded.
        """
        self.read_others(others)()

    def read_others(self, others: Iterable[bytes]) -> Callable[[], None]:
        """Read these ``to_bytes``, and return the function that does the rest of `replace_others`.

        Another thread may read while the predictor is used.

        Raises:
            ValueError: the bytes cannot be decoded.
        """
        states = [_state(data) for data in others]
        use_statistics = self.statistics.read_others([*self._base, *(state.statistics for state in states)])

        def use() -> None:
            use_statistics()
            for state in states:
                if state.bundle == self._bundle:
                    self.length_drift.fill(state.lengths)
                    self.duration_drift.fill(state.durations)

        return use

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
            other = model if isinstance(model, RemainingModel) else statistics
            lengths, remaining = model.lengths(turns), other.remaining(turns)
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
            other = model if isinstance(model, ReturnedModel) else statistics
            durations, returned = model.durations(pauses), other.returned(pauses)
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
    """Return whether these bytes are the result of `Predictor.to_bytes`."""
    try:
        Predictor(StatisticsModel(), bundle=_state(data).bundle).replace_others([data])
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
    """Return the tools that a prediction names, with the most probable one first."""
    called = [(tool, share) for tool, share in shares.items() if tool != NO_TOOL and share >= LEAST_SHARE]
    return nlargest(MOST_TOOLS, called, key=lambda one: one[1])


def _prediction(
    length: Distribution,
    ahead: Remaining,
    tools: Sequence[tuple[str, float, Distribution, Distribution]],
    calls: float,
) -> Prediction:
    """Make a prediction.

    Args:
        length: the turn's output tokens.
        ahead: the program's remaining work.
        tools: each tool's name, probability, duration and returned tokens.
        calls: the probability that the turn calls any tool.
    """
    named = tuple(
        ToolPrediction(tool, _number(share), _number(duration.mean), _number(returned.mean))
        for tool, share, duration, returned in tools
    )
    covered = sum(one.share for one in named)
    pause_s = returned_tokens = pause_p50_s = 0.0
    if covered > 0:
        # The tools that are not named are assumed to behave like the named ones.
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
    """Return a finite number rounded to four digits, so that its JSON is short."""
    return float(f"{min(max(float(value), 0.0), MOST):.4g}")


def _is_distribution(distribution: Distribution, edges: Floats) -> bool:
    """Return whether a trained model's answer is a distribution on these edges."""
    return len(distribution.shares) == len(edges) - 1 and isfinite(distribution.mean)


def _source(turn: TurnContext) -> tuple[str, ...]:
    return (turn.source,)


def _called(pause: PauseContext) -> tuple[str, ...]:
    return pause.turn.source, pause.tool
