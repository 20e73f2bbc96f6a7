"""What the autoscaler uses of Ray Serve 2.60.0, with Ray's own state of an autoscaled deployment."""

import time
import warnings
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig

from cluster.app import number_of_replicas
from cluster.config.schema import CaesuraConfig
from cluster.core.registry import OUR_AUTOSCALER
from cluster.core.scaling_report import Demand, ReplicaLoadReport, ReplicaReport
from cluster.observing.meter import Meter
from router.autoscaling.serve_autoscaler import STALE_S, STATE, ServeAutoscaler

DEPLOYMENT = DeploymentID(name="ProgramServer:tiny", app_name="caesura")


def configured(**replicas: int) -> CaesuraConfig:
    return CaesuraConfig.model_validate({"replicas": replicas})


class Controller:
    """The part of Ray's controller that decides the number of replicas."""

    def __init__(self, **bounds: int) -> None:
        options = number_of_replicas(configured(**bounds))
        assert options["num_replicas"] == "auto"
        config: AutoscalingConfig = options["autoscaling_config"]
        self.state = DeploymentAutoscalingState(DEPLOYMENT)
        info: Any = DeploymentInfo(
            deployment_config=DeploymentConfig(autoscaling_config=config),
            replica_config=None,  # type: ignore[arg-type]
            start_time_ms=0,
            deployer_job_id="",
            version="1",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.target = self.state.register(info, 0)
        self.replicas: list[ReplicaID] = []

    def runs(self, number: int) -> None:
        self.replicas = [ReplicaID(unique_id=f"r{index}", deployment_id=DEPLOYMENT) for index in range(number)]
        self.state.update_running_replica_ids(self.replicas)

    def reports(self, load: ReplicaLoadReport, demand: Demand, age_s: float = 0.0) -> None:
        """Each replica reports the load, and the first one the demand."""
        now_s = time.time() - age_s
        for index, replica in enumerate(self.replicas):
            numbers = ReplicaReport(load, {} if index else {"ingress": demand}).numbers()
            series = {name: [TimeStampedValue(now_s, number)] for name, number in numbers.items()}
            self.state.record_request_metrics_for_replica(ReplicaMetricReport(replica, series, now_s))

    def decides(self) -> int:
        self.target = self.state.get_decision_num_replicas(self.target)
        return self.target


LOAD = ReplicaLoadReport(kv_tokens=1000.0, working_set_tokens=2000.0, turns=5.0, start_s=20.0)


def test_a_fixed_number_is_no_autoscaling() -> None:
    assert number_of_replicas(configured(count=3)) == {"num_replicas": 3}


def test_the_policy_decides_by_the_newest_reports_at_once() -> None:
    controller = Controller(min=1, max=5)
    assert controller.target == 1, "it begins with the least"
    controller.runs(1)
    assert controller.decides() == 1, "nothing is known yet"
    controller.reports(LOAD, Demand())
    controller.state._policy_state = {}
    assert controller.decides() == 3, "2,000 tokens need 2.5 replicas; without Ray's delay of 30 s"
    assert set(controller.state._policy_state or {}) >= {STATE}
    assert controller.decides() == 3, "Ray gives the state back"


def test_ray_applies_the_bounds() -> None:
    controller = Controller(min=1, max=2)
    controller.runs(1)
    controller.reports(LOAD, Demand())
    assert controller.decides() == 2


def test_an_old_report_is_no_report() -> None:
    controller = Controller(min=1, max=5)
    controller.runs(1)
    controller.reports(LOAD, Demand(), age_s=STALE_S + 1)
    assert controller.decides() == 1


def test_a_demand_that_a_replica_no_longer_reports_does_not_count() -> None:
    """Ray keeps all numbers of the last seconds: here those of an ingress that has ended."""
    controller = Controller(min=1, max=5)
    controller.runs(1)
    load, now_s = ReplicaLoadReport(kv_tokens=1000.0, working_set_tokens=100.0, turns=5.0, start_s=20.0), time.time()
    before = ReplicaReport(load, {"ended": Demand(turn_work=3.0), "ingress": Demand(turn_work=1.5)})
    series = {name: [TimeStampedValue(now_s - 1.0, number)] for name, number in before.numbers().items()}
    for name, number in ReplicaReport(load, {"ingress": Demand(turn_work=1.5)}).numbers().items():
        series[name].append(TimeStampedValue(now_s, number))
    controller.state.record_request_metrics_for_replica(ReplicaMetricReport(controller.replicas[0], series, now_s))
    assert controller.decides() == 2, "1.5 s of work in each second"


def test_a_call_that_waits_starts_the_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(min=0, max=2)
    assert (controller.target, controller.decides()) == (0, 0)
    monkeypatch.setattr(controller.state, "get_total_num_requests", lambda: 1.0)
    assert controller.decides() == 1
    monkeypatch.setattr(controller.state, "get_total_num_requests", lambda: 0.0)
    assert controller.decides() == 1, "it is not taken back while the replica starts"


def test_removed_replicas_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, float]] = []
    monkeypatch.setattr(Meter, "add", lambda _, metric, amount: counted.append((metric.name, amount)))
    autoscaler = ServeAutoscaler(OUR_AUTOSCALER, "tiny", metrics=True)
    for wanted, target in ((3, 1), (3, 3), (1, 3), (1, 3), (1, 1), (0, 1)):
        autoscaler._count(wanted, target)
    assert [one for one in counted if one[1] > 0] == [("replicas_removed", 2), ("replicas_removed", 1)]
