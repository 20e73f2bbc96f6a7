"""A scheduler's own snapshots and observations, as a replica records them."""

from collections import Counter
from pathlib import Path

import pytest
from ray.util import metrics as ray_metrics

from cluster.clock import ManualClock
from cluster.config import PolicyConfig
from cluster.observing.meter import Meter
from cluster.observing.replica import ReplicaMetrics, ReplicaState
from cluster.program import Hints, ProgramIdentity
from replicas.control import dispatch
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.tally import HoldEnd, Part
from replicas.virtual_engine import Shape, VirtualEngine, write_config_only_model


class Told:
    """What Ray is told: sums of counters and histograms, last values of gauges."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def __call__(self, metric: ray_metrics.Metric, value: float, tags: dict[str, str] | None = None) -> None:
        final = dict(metric._get_final_tags(tags))
        metric._validate_tags(final)
        assert final.pop("model") == "m"
        key = metric._name, tuple(final.values())
        self.values[key] = value if isinstance(metric, ray_metrics.Gauge) else self.values[key] + value

    def of(self, name: str) -> dict[str, float]:
        return {"|".join(labels): value for (metric, labels), value in self.values.items() if metric == name}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(ray_metrics.Metric, "_record", lambda self, value, tags=None: told(self, value, tags))
    return told


def test_a_replica_tells_what_its_scheduler_did(told: Told, tmp_path: Path) -> None:
    settings = SchedulerSettings(policy=PolicyConfig(name="continuum", parameters={"default_ttl_s": 10.0}))
    model = write_config_only_model(tmp_path, 1024)
    engine = VirtualEngine(AgentScheduler, model, Shape(max_model_len=1024), settings)
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    scheduler.clock = clock = ManualClock()
    recorder, taken = ReplicaMetrics(Meter({"model": "m"})), 0

    def exchange() -> None:
        nonlocal taken
        answer = dispatch(scheduler, "exchange", {"observed": taken})
        taken = answer["observations"]["number"]
        recorder.record(answer["snapshot"])
        recorder.observe(answer["observations"])

    exchange()
    assert told.of("caesura_holds_ended") == dict.fromkeys(HoldEnd, 0)
    assert told.of("caesura_context_tokens") == dict.fromkeys(Part, 0)
    who = ProgramIdentity(program_id="a", hints=Hints(expected_tool="ls"))
    engine.submit("a1", range(1000, 1100), 1, who)
    engine.run()
    exchange()
    clock.advance(2.0)
    engine.submit("a2", range(1000, 1120), 1, who)
    engine.run()
    exchange()
    exchange()
    token_bytes = dispatch(scheduler, "exchange", {})["snapshot"]["token_bytes"]
    assert told.of("caesura_pauses") == {"hold|ttl": 2, "hold|policy": 0, "swap|policy": 0, "release|policy": 0}
    assert told.of("caesura_holds_ended") == {**dict.fromkeys(HoldEnd, 0), "used": 1}
    assert told.of("caesura_hold_seconds") == {"": 2.0}
    assert told.of("caesura_queue_seconds") == {"first": 0.0, "resumed": 0.0}
    assert told.of("caesura_wasted_kv_byte_seconds")["held"] == pytest.approx(2.0 * 100 * token_bytes)
    assert told.of("caesura_context_tokens") == {"new": 119, "reused": 96, "fetched": 0, "recomputed": 5}
    assert told.of("caesura_steps")[""] == 2
    assert told.of("caesura_policy") == {"continuum": 1}
    dispatch(scheduler, "set_policy", {"name": "vllm"})
    exchange()
    assert told.of("caesura_policy") == {"continuum": 0, "vllm": 1}


def test_a_replica_is_in_one_state_and_its_start_is_counted_when_it_serves(told: Told) -> None:
    recorder = ReplicaMetrics(Meter({"model": "m"}))
    assert told.of("caesura_replica_starts") == {"": 0}
    recorder.started()
    recorder.record_state(ReplicaState.UP)
    recorder.record_state(ReplicaState.DRAINING)
    assert told.of("caesura_replica_starts") == {"": 1}
    assert told.of("caesura_replica_up") == {"up": 0, "draining": 1}
