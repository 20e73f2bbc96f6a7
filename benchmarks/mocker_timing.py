"""The step times of Dynamo's mocker, as a replica of ours can take them too.

The mocker has two functions of time. One is for the prompts of a step, by their number and their mean lengths; the
other is for its decodes, by the length of all contexts. A step with both takes the sum. Its built-in functions are
polynomials. It also reads tables, between whose points it interpolates: one of the tokens of a step's prompts, and one
of the decodes' tokens and mean context. Times are in milliseconds, as there.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from replicas.cost_model import CostModel
from replicas.virtual_replica import VirtualReplica

MS = 1e3
MIN_DECODE_MS = 1.0
"""Least time of the decodes of a step in the mocker."""
POINTS = 48
"""Points of each axis of a table. Between them interpolation errs by less than a thousandth."""
FIRST_CONTEXT = 16


class Timing(Protocol):
    """The two functions of a step's time."""

    def prefill_ms(self, sequences: int, end_tokens: int, begin_tokens: int) -> float:
        """Return the time of a step's prompts.

        Args:
            sequences: number of sequences that compute a part of their prompt.
            end_tokens: mean length of these sequences after the step.
            begin_tokens: mean length before it.
        """
        ...

    def decode_ms(self, sequences: int, context_tokens: int, capacity_tokens: int) -> float:
        """Return the time of a step's decodes.

        Args:
            sequences: number of sequences that decode a token.
            context_tokens: sum of their lengths after the step.
            capacity_tokens: tokens that the KV cache holds.
        """
        ...


@dataclass(frozen=True, slots=True)
class Polynomial:
    """The mocker's built-in times (aisimulate-core 0.13). The model and the device that they describe are not named."""

    def prefill_ms(self, sequences: int, end_tokens: int, begin_tokens: int) -> float:
        """See Timing."""
        tokens = sequences * (end_tokens - begin_tokens)
        return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 16.50142 if tokens > 0 else 0.0

    def decode_ms(self, sequences: int, context_tokens: int, capacity_tokens: int) -> float:
        """See Timing."""
        used = min(1.0, context_tokens / capacity_tokens)
        return max(MIN_DECODE_MS, -25.74 * used**2 + 54.01 * used + 5.74)


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of step times, in the form that Dynamo's profiler writes and the mocker reads."""

    prompt_tokens: NDArray[np.float64]
    """New tokens of a step's prompts, (P,)."""
    prompt_ms: NDArray[np.float64]
    """Their times, (P,)."""
    decode_tokens: NDArray[np.float64]
    """Sum of the decoding sequences' lengths, (D,)."""
    decode_context: NDArray[np.float64]
    """Mean length of these sequences, (C,)."""
    decode_times_ms: NDArray[np.float64]
    """Their times, (D, C)."""

    @classmethod
    def of(cls, cost: CostModel, longest: int, *, alone: bool) -> "Tables":
        """Return the tables of a cost model.

        The time of decodes is exact for a step with decodes only. The time of prompts cannot be exact for all steps,
        because the mocker adds it to that of the decodes, which already contains the overhead and the reading of the
        weights.

        Args:
            cost: the cost model.
            longest: tokens of the longest context.
            alone: whether the time of prompts is that of a step with one prompt and nothing else, as Dynamo's profiler
                measures it. Otherwise it is what a prompt adds to a step with decodes, which is too short for a step
                without them.
        """
        prompts = np.unique(np.geomspace(1, cost.step_tokens, POINTS).round())
        added = 0.0 if alone else cost.decode_step_s()
        prompt_s = [max(0.0, cost.prefill_s(int(tokens)) - added) for tokens in prompts]
        totals = np.concatenate([[0.0], np.geomspace(FIRST_CONTEXT, cost.kv_capacity_tokens, POINTS)])
        contexts = np.geomspace(FIRST_CONTEXT, longest, POINTS)
        decodes = [[_decodes_s(cost, total, context) for context in contexts] for total in totals]
        return cls(prompts, np.array(prompt_s) * MS, totals, contexts, np.array(decodes) * MS)

    def save(self, path: Path) -> None:
        """Write the tables as the mocker reads them (``dynamo_profile``)."""
        np.savez(
            path,
            prefill_isl=self.prompt_tokens,
            prefill_ttft_ms=self.prompt_ms,
            decode_active_kv_tokens=self.decode_tokens,
            decode_context_length=self.decode_context,
            decode_itl=self.decode_times_ms,
        )

    def prefill_ms(self, sequences: int, end_tokens: int, begin_tokens: int) -> float:
        """See Timing."""
        tokens = sequences * (end_tokens - begin_tokens)
        return max(0.0, _between(self.prompt_tokens, self.prompt_ms, tokens)) if tokens > 0 else 0.0

    def decode_ms(self, sequences: int, context_tokens: int, capacity_tokens: int) -> float:
        """See Timing."""
        left, share = _place(self.decode_tokens, context_tokens)
        row = self.decode_times_ms[left] + share * (self.decode_times_ms[left + 1] - self.decode_times_ms[left])
        return max(MIN_DECODE_MS, _between(self.decode_context, row, context_tokens // sequences))


def _decodes_s(cost: CostModel, total: float, context: float) -> float:
    sequences = max(1.0, total / context)
    linear_s = max(cost.weights_s, sequences * cost.token_s)
    return cost.overhead_s + sequences * cost.sequence_s + linear_s + total * (cost.context_s + cost.pair_s)


def _place(xs: NDArray[np.float64], x: float) -> tuple[int, float]:
    """Return the interval of ``x``, or the nearest one, and the place of ``x`` in it, from 0 to 1 if it is inside."""
    left = min(max(1, int(np.searchsorted(xs, x))), len(xs) - 1) - 1
    return left, float((x - xs[left]) / (xs[left + 1] - xs[left]))


def _between(xs: NDArray[np.float64], ys: NDArray[np.float64], x: float) -> float:
    left, share = _place(xs, x)
    return float(ys[left] + share * (ys[left + 1] - ys[left]))


@dataclass(slots=True)
class TimedReplica(VirtualReplica):
    """A virtual replica whose steps take the mocker's times. `VirtualReplica.build` makes one; then set ``timing``."""

    timing: Timing = field(default_factory=Polynomial)

    def cost_of(self, output: SchedulerOutput) -> float:
        """Return the seconds of a step that was scheduled."""
        requests = self.engine.scheduler.requests
        prompts, decodes = [], []
        for request_id, tokens in output.num_scheduled_tokens.items():
            end = requests[request_id].num_computed_tokens  # vLLM counts the step's own already
            if tokens > 1 or end <= requests[request_id].num_prompt_tokens:
                prompts.append((end, end - tokens))
            else:
                decodes.append(end)
        milliseconds = 0.0
        if prompts:
            ends, begins = (sum(lengths) // len(prompts) for lengths in zip(*prompts, strict=True))
            milliseconds += self.timing.prefill_ms(len(prompts), ends, begins)
        if decodes:
            capacity = (self.engine.shape.num_blocks - 1) * self.engine.shape.block_size
            milliseconds += self.timing.decode_ms(len(decodes), sum(decodes), capacity)
        return milliseconds / MS
