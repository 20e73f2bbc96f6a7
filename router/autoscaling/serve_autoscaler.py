"""Runs an autoscaling policy in Ray Serve's controller, as `AutoscalingConfig.policy` (Ray 2.60.0).

Ray calls it several times a second with an AutoscalingContext. It applies the bounds, starts the first replica as soon
as a call waits for one, and removes the last replica only where one is left. Ray's own delays and factors are off,
since the policy has its own. tests/contracts/test_ray_autoscaling.py holds what is used of Ray.

Ray sends this module to the controller by value, and imports the others there.
"""

import logging
from typing import Any

from ray.serve.config import AutoscalingContext

from cluster.core.registry import AUTOSCALERS
from cluster.core.scaling_report import ReplicaReport
from cluster.observing.catalogue import REPLICAS_REMOVED
from cluster.observing.meter import Meter
from router.autoscaling.policy import AutoscalingPolicy, Reason, ScalingView

STATE = "caesura"
"""Key of the policy's state in Ray's ``policy_state``."""
STALE_S = 15.0
"""A report that is older than this is ignored: Ray keeps the last one of a replica that hangs."""


class ServeAutoscaler:
    """The policy of one deployment.

    Args:
        policy: the registered name of the policy.
        model: the deployment's model, as a label of its metrics.
        metrics: whether metrics are exported.
    """

    def __init__(self, policy: str, model: str, metrics: bool) -> None:
        self._policy: AutoscalingPolicy[Any] = AUTOSCALERS.load(policy)()
        self._meter = Meter({"model": model}, enabled=metrics)
        self._wanted: int | None = None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas that is wanted, and the state for the next call."""
        view = view_of(context)
        before = context.policy_state.get(STATE)
        decision = self._policy.decide(view, self._policy.first() if before is None else before)
        self._count(decision.replicas, view.target)
        if decision.replicas != view.target and decision.reason is not Reason.KEEP:
            logging.getLogger("ray.serve").warning(
                "%s: %d replicas are wanted instead of %d (%s)",
                context.deployment_name,
                decision.replicas,
                view.target,
                decision.reason,
            )
        return decision.replicas, {STATE: decision.state}

    def _count(self, wanted: int, target: int) -> None:
        """Count the replicas that are removed, once, although Ray may ask again before the target is what is wanted."""
        if self._wanted is None:
            self._meter.begin(REPLICAS_REMOVED)
        if wanted != self._wanted:
            self._meter.add(REPLICAS_REMOVED, target - wanted)
        self._wanted = wanted


def view_of(context: AutoscalingContext) -> ScalingView:
    """Return what the policy sees of Ray's context: of each replica, the numbers of its newest report."""
    metrics: dict[str, dict[Any, Any]] = context.raw_metrics or {}
    reports: list[ReplicaReport] = []
    for replica, loads in metrics.get("kv_tokens", {}).items():
        if loads and context.current_time - (at_s := loads[-1].timestamp) <= STALE_S:
            # Ray keeps the numbers of an ingress for seconds after the replica has dropped them.
            series = ((name, replicas.get(replica)) for name, replicas in metrics.items())
            numbers = {name: one[-1].value for name, one in series if one and one[-1].timestamp >= at_s}
            reports.append(ReplicaReport.of(numbers))
    return ScalingView(
        now_s=context.current_time,
        ready=context.current_num_replicas,
        target=context.target_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
        reports=reports,
    )
