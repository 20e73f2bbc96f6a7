"""Ray Serve's default autoscaling policy under virtual time: by the number of turns that run or wait.

Ray's own functions decide (Ray 2.60.0, the functions behind `replica_queue_length_autoscaling_policy`): the number of
turns over the target of a replica, after Ray's default delays. Only the clock is replaced. Ray is imported when the
policy is made.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.autoscaling.policy import Reason, ScalingDecision, ScalingView

SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """Ray's state between two decisions. The samples are changed in place."""

    ray: dict[str, Any] = field(default_factory=dict)
    samples: deque[tuple[float, int]] = field(default_factory=deque)


class RayQueueLength:
    """The policy.

    Args:
        open_turns: returns the number of turns that run or wait, in the replicas and before them.
        target_ongoing: ``target_ongoing_requests`` of Ray's AutoscalingConfig, whose default is 2.
    """

    def __init__(self, open_turns: Callable[[], int], target_ongoing: float) -> None:
        from ray.serve.config import AutoscalingConfig

        self._open_turns = open_turns
        self._config = AutoscalingConfig(min_replicas=0, max_replicas=1024, target_ongoing_requests=target_ongoing)

    def first(self) -> QueueState:
        """Return the state before the first decision."""
        return QueueState()

    def decide(self, view: ScalingView, state: QueueState) -> ScalingDecision[QueueState]:
        """Return the number of replicas that is wanted."""
        from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors

        samples = state.samples
        if not samples or view.now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((view.now_s, self._open_turns()))
        while view.now_s - samples[0][0] > self._config.look_back_period_s:
            samples.popleft()
        mean = sum(number for _, number in samples) / len(samples)
        desired = mean / self._config.get_target_ongoing_requests()
        scaled = _apply_scaling_factors(desired, view.ready, self._config)
        within = min(view.most, max(view.least, scaled))
        wanted, ray = _apply_delay_logic(within, view.target, self._config, dict(state.ray), _now=view.now_s)
        return ScalingDecision(min(view.most, max(view.least, wanted)), Reason.QUEUE, QueueState(ray, samples))
