"""How many pods may be evicted at once."""

from typing import Any

import pytest

from tests.deploy.chart import needs_helm, of_kind, template
from tests.deploy.value_sets import EXTERNAL_REDIS, scaled_group

pytestmark = needs_helm

SIZE = {"requests": {"cpu": "1"}, "limits": {"memory": "8Gi"}}


def budgets(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    documents = template(values, preset="cpu")
    found = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "PodDisruptionBudget"}
    # Kubernetes evicts no pod that two budgets select.
    assert len({tuple(sorted(budget["selector"]["matchLabels"].items())) for budget in found.values()}) == len(found)
    return found


@pytest.mark.parametrize(
    ("values", "stay"),
    [
        ({}, {"workers": 1}),
        ({"podDisruptionBudgets": {"workersMaxUnavailable": 0}}, {"workers": 2}),
        ({"podDisruptionBudgets": {"workersMaxUnavailable": 2}}, {}),
        ({"workerGroups": {"workers": {"replicas": 1}, "more": {"replicas": 9, "resources": SIZE}}}, {"more": 8}),
        (scaled_group(replicas=3, minReplicas=1), {}),
        (scaled_group(replicas=3, minReplicas=3), {"workers": 2}),
    ],
)
def test_a_number_of_each_worker_group_stays(values: dict[str, Any], stay: dict[str, int]) -> None:
    """A RayCluster has no scale subresource: for its pods, Kubernetes takes an integer minAvailable only."""
    found = budgets(values)
    assert found.keys() == {f"t-caesura-worker-{group}" for group in stay} | {"t-caesura-redis"}
    for group, number in stay.items():
        budget = found[f"t-caesura-worker-{group}"]
        assert budget["minAvailable"] == number and "maxUnavailable" not in budget
        labels = budget["selector"]["matchLabels"]
        assert (labels["app.kubernetes.io/component"], labels["ray.io/group"]) == ("worker", group)


def test_the_redis_of_the_chart_has_a_budget_and_another_has_none() -> None:
    documents = template(preset="cpu")
    pod = of_kind(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    budget = of_kind(documents, "PodDisruptionBudget", "t-caesura-redis")["spec"]
    assert budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"].items() <= pod.items()
    assert budgets({"redis": EXTERNAL_REDIS}).keys() == {"t-caesura-worker-workers"}
