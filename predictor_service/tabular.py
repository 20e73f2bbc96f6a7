"""The model `tabular`: the statistics' forecast, corrected by small networks that look at cheap features.

Features are `features.py`'s and what the statistics forecast. torch is needed to learn it, numpy alone to ask it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from predictor_service.bundle import Bundle, Origin, read_bundle, write_bundle
from predictor_service.context import PauseContext, TurnContext
from predictor_service.distribution import DURATION_EDGES, LENGTH_EDGES, Distribution, Floats
from predictor_service.examples import ProgramExample
from predictor_service.features import (
    FEATURES_VERSION,
    PAUSE_FEATURES,
    TURN_FEATURES,
    Vectors,
    pause_features,
    turn_features,
)
from predictor_service.model import DurationModel, LengthModel, Remaining
from predictor_service.network import TURN_COUNT_EDGES, Head, Networks
from predictor_service.statistics_model import StatisticsModel

LENGTH_BINS, DURATION_BINS, TURN_COUNT_BINS = (
    len(edges) - 1 for edges in (LENGTH_EDGES, DURATION_EDGES, TURN_COUNT_EDGES)
)
TURN_HEADS = (Head("lengths", LENGTH_BINS), Head("remaining", LENGTH_BINS), Head("turns", TURN_COUNT_BINS))
PAUSE_HEADS = (Head("durations", DURATION_BINS), Head("returned", LENGTH_BINS))
PRIORS_SHARE = 0.3
"""Of an answer, as it is: two that err apart are better together, and statistics that go on learning are followed where
the networks would not believe what they never saw."""
_PRIOR_FEATURES = 3
"""For each prior: its mean, its median and its upper decile."""
_TURN_INPUTS = TURN_FEATURES + 2 * _PRIOR_FEATURES + 1
_PAUSE_INPUTS = PAUSE_FEATURES + 2 * _PRIOR_FEATURES

_MODEL, _STATISTICS = "tabular", "statistics.bin"


class Prior(LengthModel, DurationModel, Protocol):
    """What is corrected."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a network sees, and the priors by head."""

    features: Vectors
    priors: Mapping[str, Floats]


def turn_inputs(turns: Sequence[TurnContext], prior: LengthModel) -> Inputs:
    """Of the networks for turns."""
    lengths = _shares([answer.shares for answer in prior.lengths(turns)], LENGTH_BINS)
    later = prior.remaining(turns)
    remaining = _shares([answer.tokens.shares for answer in later], LENGTH_BINS)
    counts = np.log1p(np.array([[answer.turns] for answer in later], dtype=np.float64).reshape(-1, 1))
    told = [_told(lengths, LENGTH_EDGES), _told(remaining, LENGTH_EDGES), counts.astype(np.float32)]
    return Inputs(np.hstack([turn_features(turns), *told]), {"lengths": lengths, "remaining": remaining})


def pause_inputs(pauses: Sequence[PauseContext], prior: DurationModel) -> Inputs:
    """Of the networks for pauses."""
    durations = _shares([answer.shares for answer in prior.durations(pauses)], DURATION_BINS)
    returned = _shares([answer.shares for answer in prior.returned(pauses)], LENGTH_BINS)
    told = [_told(durations, DURATION_EDGES), _told(returned, LENGTH_EDGES)]
    return Inputs(np.hstack([pause_features(pauses), *told]), {"durations": durations, "returned": returned})


class TabularModel:
    """Lengths, remaining work and durations.

    Args:
        prior: what the networks correct. They were learnt on top of statistics fitted to the same programs; statistics
            that go on learning while they serve are as good, and what they learn shows in the answers.
    """

    def __init__(self, statistics: StatisticsModel, turns: Networks, pauses: Networks, prior: Prior | None = None):
        self.statistics = statistics
        self._turns, self._pauses = turns, pauses
        self._prior: Prior = statistics if prior is None else prior

    def with_prior(self, prior: Prior) -> "TabularModel":
        """The same networks on top of other statistics."""
        return TabularModel(self.statistics, self._turns, self._pauses, prior)

    def lengths(self, turns: Sequence[TurnContext]) -> Sequence[Distribution]:
        """See `LengthModel`."""
        return _distributions(LENGTH_EDGES, self._turn_shares(turns)["lengths"]) if turns else []

    def remaining(self, turns: Sequence[TurnContext]) -> Sequence[Remaining]:
        """See `LengthModel`."""
        return self.lengths_and_remaining(turns)[1]

    def lengths_and_remaining(self, turns: Sequence[TurnContext]) -> tuple[Sequence[Distribution], Sequence[Remaining]]:
        """Both answers at the price of one."""
        if not turns:
            return [], []
        shares = self._turn_shares(turns)
        counts = np.maximum(shares["turns"] @ _MIDDLES_OF_TURN_COUNTS, 0.0)
        tokens = _distributions(LENGTH_EDGES, shares["remaining"])
        remaining = [Remaining(answer, float(count)) for answer, count in zip(tokens, counts, strict=True)]
        return _distributions(LENGTH_EDGES, shares["lengths"]), remaining

    def durations(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return self.durations_and_returned(pauses)[0]

    def returned(self, pauses: Sequence[PauseContext]) -> Sequence[Distribution]:
        """See `DurationModel`."""
        return self.durations_and_returned(pauses)[1]

    def durations_and_returned(
        self, pauses: Sequence[PauseContext]
    ) -> tuple[Sequence[Distribution], Sequence[Distribution]]:
        """Both answers at the price of one."""
        if not pauses:
            return [], []
        shares = _answers(self._pauses, pause_inputs(pauses, self._prior))
        return _distributions(DURATION_EDGES, shares["durations"]), _distributions(LENGTH_EDGES, shares["returned"])

    @classmethod
    def fit(cls, programs: Sequence[ProgramExample], seed: int = 0) -> "TabularModel":
        """Learnt from ``programs``, in a minute or so on one core; part of their split groups says when to stop.

        Raises:
            ConfigError: there is too little to learn from.
        """
        # torch takes seconds to import, and who only asks the model does not need it.
        from predictor_service.tabular_training import fit_tabular

        return fit_tabular(programs, seed)

    def save(self, directory: Path, origin: Origin | None = None) -> None:
        """Write a bundle.

        Raises:
            ConfigError: it cannot be written.
        """
        tensors = self._turns.tensors("turns") | self._pauses.tensors("pauses")
        write_bundle(
            directory,
            Bundle(_MODEL, FEATURES_VERSION, origin or Origin(), tensors, {_STATISTICS: self.statistics.to_bytes()}),
        )

    @classmethod
    def load(cls, directory: Path) -> "TabularModel":
        """What `save` wrote.

        Raises:
            ConfigError: it is no whole bundle of this model and version; names file and field.
        """
        bundle = read_bundle(directory, _MODEL, FEATURES_VERSION)
        with bundle.refused(directory):
            return cls(
                StatisticsModel.from_bytes(bundle.part(_STATISTICS)),
                Networks.from_tensors(bundle.tensors, "turns", TURN_HEADS, _TURN_INPUTS),
                Networks.from_tensors(bundle.tensors, "pauses", PAUSE_HEADS, _PAUSE_INPUTS),
            )

    def _turn_shares(self, turns: Sequence[TurnContext]) -> Mapping[str, Floats]:
        return _answers(self._turns, turn_inputs(turns, self._prior))


_MIDDLES_OF_TURN_COUNTS: Floats = (TURN_COUNT_EDGES[:-1] + TURN_COUNT_EDGES[1:]) / 2


def _answers(networks: Networks, inputs: Inputs) -> Mapping[str, Floats]:
    shares = networks.shares(inputs.features, inputs.priors)
    return shares | {
        name: (1 - PRIORS_SHARE) * shares[name] + PRIORS_SHARE * prior for name, prior in inputs.priors.items()
    }


def _distributions(edges: Floats, shares: Floats) -> list[Distribution]:
    return [Distribution(edges, row) for row in shares]


def _shares(rows: Sequence[Floats], bins: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), bins)


def _told(shares: Floats, edges: Floats) -> Vectors:
    """What a prior says, as features: shape [rows, _PRIOR_FEATURES]."""
    cumulated = np.cumsum(shares, axis=1)
    middles = (edges[:-1] + edges[1:]) / 2
    ranks = [middles[np.minimum((cumulated < q).sum(axis=1), len(middles) - 1)] for q in (0.5, 0.9)]
    return np.log(np.stack([shares @ middles, *ranks], axis=1) + 1e-3).astype(np.float32)
