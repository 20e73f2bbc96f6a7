"""A few small networks that answer together: what learning leaves behind, in numpy alone.

Each one corrects a forecast that is there before it (the statistics', the *prior*): its logits are added to the
prior's logarithms. So a network that knows nothing answers as the statistics do. The answer is their mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor_service.distribution import Floats
from predictor_service.features import Vectors

TURN_COUNT_EDGES: Floats = np.concatenate([np.arange(9) - 0.5, np.round(np.geomspace(9, 512, 18)) - 0.5])
"""Turns that come: a bin for each number up to 7, then bins in about equal ratios."""

LEAST_SHARE = 1e-7
"""Of a prior's bin, before its logarithm is taken."""
LARGEST_INPUT = 6.0
"""Standard deviations: features beyond are cut off, so that what was never seen does not run away."""

ROWS_AT_A_TIME = 4
"""With more, BLAS would share the work among threads: on a busy machine they wait for each other many times as long."""

Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Head:
    """One question that the networks answer, by a share for each bin."""

    name: str
    bins: int


@dataclass(frozen=True, slots=True, eq=False)
class Networks:
    """Of ``m`` members, each two hidden layers of ``h``. All arrays are float32 and finite."""

    heads: tuple[Head, ...]
    mean: NDArray[np.float32]
    """Of the features, shape [f]."""
    spread: NDArray[np.float32]
    """Of the features, shape [f], positive."""
    first: NDArray[np.float32]
    """Shape [m, f, h]."""
    first_bias: NDArray[np.float32]
    """Shape [m, h]."""
    second: NDArray[np.float32]
    """Shape [m, h, h]."""
    second_bias: NDArray[np.float32]
    last: NDArray[np.float32]
    """Shape [m, h, all heads' bins]."""
    last_bias: NDArray[np.float32]
    trust: NDArray[np.float32]
    """Factors on the logarithms of priors, shape [m, heads]: counts that are few are noisy."""

    def shares(self, features: Vectors, priors: Mapping[str, Floats]) -> dict[str, Floats]:
        """Of each head's bins, shape [rows, bins]; ``priors`` likewise, a head without one starts from even shares."""
        inputs = standardised(features, self.mean, self.spread)
        starts = range(0, len(inputs), ROWS_AT_A_TIME)
        logits = np.concatenate([self._logits(inputs[start : start + ROWS_AT_A_TIME]) for start in starts], axis=1)
        answers: dict[str, Floats] = {}
        start = 0
        for number, head in enumerate(self.heads):
            part = logits[:, :, start : start + head.bins].astype(np.float64)
            if head.name in priors:
                part += self.trust[:, number, None, None] * log_prior(priors[head.name])
            answers[head.name] = _together(part)
            start += head.bins
        return answers

    def _logits(self, inputs: Vectors) -> NDArray[np.float32]:
        hidden = np.maximum(inputs @ self.first + self.first_bias[:, None], 0)
        hidden = np.maximum(hidden @ self.second + self.second_bias[:, None], 0)
        logits: NDArray[np.float32] = hidden @ self.last + self.last_bias[:, None]
        return logits

    def tensors(self, prefix: str) -> dict[str, NDArray[np.float32]]:
        """All arrays, by names that begin with ``prefix``."""
        return {f"{prefix}.{name}": getattr(self, name) for name in _ARRAYS}

    @classmethod
    def from_tensors(cls, tensors: Tensors, prefix: str, heads: Sequence[Head], features: int) -> "Networks":
        """The networks whose `tensors` these are.

        Raises:
            ValueError: an array is missing, has another shape or type than these heads and features need, or has
                values that are not finite; the message begins with its name.
        """
        arrays = {name: _array(tensors, f"{prefix}.{name}") for name in _ARRAYS}
        if arrays["first"].ndim != 3:
            raise ValueError(f"{prefix}.first: has shape {arrays['first'].shape}, not three dimensions")
        members, _, hidden = arrays["first"].shape
        out = sum(head.bins for head in heads)
        shapes: dict[str, tuple[int, ...]] = {
            "mean": (features,),
            "spread": (features,),
            "first": (members, features, hidden),
            "first_bias": (members, hidden),
            "second": (members, hidden, hidden),
            "second_bias": (members, hidden),
            "last": (members, hidden, out),
            "last_bias": (members, out),
            "trust": (members, len(heads)),
        }
        for name, shape in shapes.items():
            if arrays[name].shape != shape or 0 in shape:
                raise ValueError(f"{prefix}.{name}: has shape {arrays[name].shape}, not {shape}")
        if arrays["spread"].min() <= 0:
            raise ValueError(f"{prefix}.spread: has values that are not positive")
        return cls(heads=tuple(heads), **arrays)


_ARRAYS = ("mean", "spread", "first", "first_bias", "second", "second_bias", "last", "last_bias", "trust")


def standardised(features: Vectors, mean: Vectors, spread: Vectors) -> Vectors:
    """Features in standard deviations, cut off at LARGEST_INPUT."""
    return np.clip((features - mean) / spread, -LARGEST_INPUT, LARGEST_INPUT).astype(np.float32, copy=False)


def log_prior(prior: Floats) -> Floats:
    """What is added to logits."""
    return np.log(prior + LEAST_SHARE)


def _together(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    shares: Floats = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=0)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def _array(tensors: Tensors, name: str) -> NDArray[np.float32]:
    if name not in tensors:
        raise ValueError(f"{name}: is missing")
    array = tensors[name]
    if array.dtype != np.float32:
        raise ValueError(f"{name}: is of type {array.dtype}, not float32")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: has values that are not finite")
    return array
