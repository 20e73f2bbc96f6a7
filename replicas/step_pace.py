"""Measures how long steps take, compared with the cost model.

A preset describes the device alone, and a measured model describes the day of its measurement. A shared or slower
machine differs from both. All decisions in seconds (whether a turn is feasible, what a hold is worth, how large a step
may be) are then wrong by the same factor as the step time. Therefore one factor is learnt, and the model's computation
times are multiplied by it. The factor stays while it is about right, because small changes would only make decisions
hard to reproduce.
"""

from collections import deque
from collections.abc import Callable, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from replicas.cost_model import CostModel

SAMPLED = 8
"""One of this many steps is compared. The comparison costs a sum over the step's requests."""
REMEMBERED = 16
"""Number of compared steps that dominate the factor (time constant of the moving average)."""
ENOUGH = 8
"""Number of compared steps before the first change."""
TOLERANCE = 1.25
"""The model stays while steps take between 1 / TOLERANCE and TOLERANCE times the expected time."""
OUTLIER = 8.0
"""Largest ratio of actual to expected time that counts for a step. A compilation or a suspended machine exceeds it."""

Work = tuple[int, int, int, float]
"""The work of a step, as arguments of `CostModel.step_s`: scheduled tokens, context tokens, sequences, pairs."""


def work_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> Work:
    """Return the work of a step that has just been scheduled. ``requests`` are the scheduler's, by id."""
    context = 0
    pairs = 0.0
    for request_id, tokens in output.num_scheduled_tokens.items():
        length = requests[request_id].num_computed_tokens  # vLLM counts the step's own already
        context += length
        pairs += length if tokens == 1 else tokens * (2 * length - tokens + 1) / 2
    return output.total_num_scheduled_tokens, context, len(output.num_scheduled_tokens), pairs


class StepPace:
    """Compares a scheduler's steps with its cost model.

    Args:
        cost: the given model.
        now_s: returns the scheduler's time, in seconds.
        requests: vLLM's requests by id.
    """

    def __init__(self, cost: CostModel, now_s: Callable[[], float], requests: Mapping[str, Request]) -> None:
        self._given = cost
        self.cost = cost
        """The given model, with computation ``scale`` times as slow."""
        self.scale = 1.0
        self._now_s = now_s
        self._requests = requests
        self._begun: deque[tuple[float, float | None]] = deque()
        self._steps = self._compared = 0
        self._expected_s = self._took_s = self._ended_s = 0.0

    def began(self, output: SchedulerOutput) -> None:
        """Note a step that was scheduled. An asynchronous engine may still be computing the step before it."""
        if not output.total_num_scheduled_tokens:
            return
        expected_s = None
        if not self._steps % SAMPLED:
            expected_s = self._given.step_s(*work_of(output, self._requests))
        self._steps += 1
        self._begun.append((self._now_s(), expected_s))

    def ended(self, output: SchedulerOutput) -> float:
        """Note the end of the oldest step in flight. Return its seconds, or 0 for a step without tokens."""
        if not output.total_num_scheduled_tokens or not self._begun:
            return 0.0
        now_s = self._now_s()
        scheduled_s, expected_s = self._begun.popleft()
        took_s, self._ended_s = now_s - max(scheduled_s, self._ended_s), now_s
        if expected_s:
            self._compare(took_s, expected_s)
        return took_s

    def _compare(self, took_s: float, expected_s: float) -> None:
        kept = 1 - 1 / REMEMBERED
        self._expected_s = kept * self._expected_s + expected_s
        self._took_s = kept * self._took_s + min(took_s, OUTLIER * self.scale * expected_s)
        self._compared += 1
        scale = self._took_s / self._expected_s
        if self._compared < ENOUGH or scale <= 0 or self.scale / TOLERANCE <= scale <= self.scale * TOLERANCE:
            return
        self.scale = scale
        self.cost = self._given.slowed(scale)
