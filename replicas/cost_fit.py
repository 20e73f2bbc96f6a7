"""From measured step times to a `CostModel`: least squares with coefficients that cannot be negative. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError
from replicas.cost_model import CostModel

CROSSINGS = tuple(float(2**power) for power in range(13))
"""Pairs per token of context at which attention's roofs may cross: from no reuse of what was read to a full cache."""

SATURATIONS = 33
"""Saturation points that are tried, between the least and the largest but one of the measured token counts."""

TOKEN_COLUMN = 2
"""Of `_columns`: the coefficient that a cost model cannot be without."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepSample:
    """The measured time of one kind of iteration."""

    tokens: int
    """Scheduled."""
    context: int
    """The sequences' lengths after the step, added up."""
    sequences: int
    pairs: float
    """Pairs of a new token and one that it attends to."""
    seconds: float
    requests: int = 0
    """Requests whose way into the engine and out of it is part of ``seconds``."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The step time's coefficients, as in `CostModel`, and how well they fit. Seconds; errors are relative."""

    overhead_s: float
    sequence_s: float
    weights_s: float
    token_s: float
    context_s: float
    pair_s: float
    request_s: float
    """A request's way into the engine and out of it: measured apart, in no step. `CostModel.turn_s`."""
    mean_error: float
    max_error: float

    def cost_model(
        self, name: str, kv_bytes_per_token: float, kv_capacity_tokens: int, swap_token_s: float, swap_overhead_s: float
    ) -> CostModel:
        """With what is not of the step: the size of the KV and the host link."""
        steps: dict[str, Any] = asdict(self)
        for beside in ("request_s", "mean_error", "max_error"):
            del steps[beside]
        return CostModel(
            name=name,
            kv_bytes_per_token=kv_bytes_per_token,
            kv_capacity_tokens=kv_capacity_tokens,
            swap_token_s=swap_token_s,
            swap_overhead_s=swap_overhead_s,
            turn_s=self.request_s,
            **steps,
        )


def fit_steps(samples: Sequence[StepSample]) -> StepCosts:
    """The coefficients with the least sum of squared relative errors.

    The form is linear once it is known where each pair of roofs crosses; both crossings are tried over a grid.

    Raises:
        ConfigError: a time is not positive, or all samples have the same number of tokens.
    """
    seconds = np.array([sample.seconds for sample in samples])
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ConfigError("a cost model needs samples with positive times")
    counts = sorted({sample.tokens for sample in samples})
    if len(counts) < 2:
        raise ConfigError("a cost model needs samples of different numbers of tokens")
    _, saturation, crossing, solution = min(
        (
            (residual, saturation, crossing, solution)
            # At the largest count nothing would have been seen to grow.
            for saturation in np.geomspace(counts[0], counts[-2], SATURATIONS).tolist()
            for crossing in CROSSINGS
            for residual, solution in _solutions(_columns(samples, saturation, crossing) / seconds[:, None])
        ),
        key=itemgetter(0),
    )
    errors = np.abs(_columns(samples, saturation, crossing) @ solution / seconds - 1)
    overhead, sequence, token, context, request = (float(value) for value in solution)
    return StepCosts(
        overhead_s=overhead,
        sequence_s=sequence,
        weights_s=saturation * token,
        token_s=token,
        context_s=context,
        pair_s=context / crossing,
        request_s=request,
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
    )


def _columns(samples: Sequence[StepSample], saturation: float, crossing: float) -> Matrix:
    """What each coefficient is multiplied with: a row for each sample."""
    return np.array(
        [(1, s.sequences, max(s.tokens, saturation), max(s.context, s.pairs / crossing), s.requests) for s in samples],
        dtype=np.float64,
    )


def _solutions(weighted: Matrix) -> Iterator[tuple[float, Matrix]]:
    """Least-squares solutions of ``weighted @ x = 1`` over the subsets of columns, where all of x is positive.

    With so few columns that is the exact optimum without negative coefficients: its own zeros are one of the subsets.
    """
    target = np.ones(len(weighted))
    others = [column for column in range(weighted.shape[1]) if column != TOKEN_COLUMN]
    for size in range(len(others), -1, -1):
        for subset in combinations(others, size):
            chosen = [TOKEN_COLUMN, *subset]
            part, *_ = np.linalg.lstsq(weighted[:, chosen], target, rcond=None)
            if np.all(part > 0):
                solution = np.zeros(weighted.shape[1])
                solution[chosen] = part
                yield float(np.sum((weighted @ solution - target) ** 2)), solution
                if size == len(others):
                    return  # unconstrained and yet positive: nothing fits better
