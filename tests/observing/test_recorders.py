"""What the recorders export of numbers that others keep: increments of counters, values of gauges."""

from pathlib import Path

import pytest

from cluster.config.schema import PolicyConfig
from cluster.core.clock import ManualClock
from cluster.core.lifecycle.events import ReleaseReason
from cluster.core.program import Hints, ProgramIdentity
from cluster.core.tools import Outcome, ToolResult
from cluster.observing import catalogue as metrics
from cluster.observing.catalogue import CATALOGUE, Kind, Metric
from cluster.observing.meter import Meter
from cluster.observing.recorders import (
    BatchMetrics,
    Fallback,
    PredictionMetrics,
    ProgramMetrics,
    ReplicaMetrics,
    ReplicaState,
    RouterMetrics,
    ToolMetrics,
)
from replicas.control import dispatch
from replicas.gpu_time import GpuTime
from replicas.scheduler import AgentScheduler
from replicas.settings import SchedulerSettings
from replicas.stats import Part
from replicas.virtual_engine import Shape, VirtualEngine, write_config_only_model
from tests.observing.recorded import Recorded


def model_meter() -> Meter:
    return Meter({"model": "m"})


def test_a_total_that_others_keep_becomes_what_it_grew_by(recorded: Recorded) -> None:
    programs = ProgramMetrics(model_meter())
    programs.record(3, {"started": 2}, 0)
    programs.record(1, {"started": 5, "ended": 1}, 4)
    programs.record(1, {"started": 5, "ended": 1}, 4)
    programs.record_tokens({"stored": 3, "lost": 0})
    assert recorded.of(metrics.RECORDED_TURNS) == {("m", "stored"): 3}
    assert recorded.of(metrics.PROGRAM_EVENTS) == {("started", "m"): 5, ("ended", "m"): 1}
    assert recorded.of(metrics.OPEN_PROGRAMS) == {("m",): 1}
    assert recorded.of(metrics.TOOL_ANSWERS_CUT) == {("m",): 4}


def test_batches_are_counted_by_tenants_that_the_configuration_names(recorded: Recorded) -> None:
    batches = BatchMetrics(Meter(), ["acme"])
    batches.record({"acme": 2, "x": 1, "y": 1}, {"acme": 9, "x": 3}, {("x", "failed"): 2, ("y", "failed"): 1})
    assert recorded.of(metrics.OPEN_BATCHES) == {("acme",): 2, ("other",): 2}
    assert recorded.of(metrics.LEFT_BATCH_LINES) == {("acme",): 9, ("other",): 3}
    batches.record({}, {}, {("x", "failed"): 2, ("y", "failed"): 4, ("acme", "completed"): 1})
    assert recorded.of(metrics.BATCH_LINES) == {("failed", "other"): 6, ("completed", "acme"): 1}
    assert recorded.of(metrics.OPEN_BATCHES) == {}


def test_a_total_that_shrinks_was_started_anew(recorded: Recorded) -> None:
    meter = model_meter()
    for total in (4, 1, 3):
        meter.record(metrics.PROGRAM_MIGRATIONS, total)
    assert recorded.of(metrics.PROGRAM_MIGRATIONS) == {("m",): 7}


def test_two_models_of_one_process_are_counted_apart(recorded: Recorded) -> None:
    for model, total in (("a", 2), ("b", 5)):
        RouterMetrics(Meter({"model": model})).record(
            waiting=0,
            waits_s=[0.5] * total,
            ages_s=[1.0, float(total)],
            states={"up": total},
            moves=total,
            placements={"resident": total},
            refusals={},
            fallbacks={"no_view": total},
        )
    assert recorded.of(metrics.ROUTING_DECISIONS) == {("a", "resident"): 2, ("b", "resident"): 5}
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {("router", "a", "no_view"): 2, ("router", "b", "no_view"): 5}
    assert recorded.of(metrics.PROGRAM_MIGRATIONS) == {("a",): 2, ("b",): 5}
    assert recorded.of(metrics.ADMISSION_S) == {("a",): 1.0, ("b",): 2.5}
    assert recorded.of(metrics.REPLICAS) == {("a", "up"): 2, ("b", "up"): 5}
    assert recorded.of(metrics.SNAPSHOT_AGE) == {("a",): 2.0, ("b",): 5.0}


def test_nothing_is_recorded_where_it_is_turned_off(recorded: Recorded) -> None:
    meter = Meter({"model": "m"}, enabled=False)
    ProgramMetrics(meter).record(3, {"started": 2}, 1)
    meter.begin(metrics.PROGRAM_MIGRATIONS)
    meter.observe(metrics.KV_PIN_S, 1.0)
    assert not recorded


def test_a_series_begins_at_zero(recorded: Recorded) -> None:
    model_meter().begin(metrics.PROGRAM_MIGRATIONS)
    assert list(recorded.items()) == [(("caesura_program_migrations", (("model", "m"),)), 0)]


def test_a_tool_that_has_never_been_called_has_a_series(recorded: Recorded) -> None:
    tools = ToolMetrics(Meter(), ("shell", "notes"))
    tools.record("shell", ToolResult("1", "shell", Outcome.ERROR, "no"))
    assert recorded.series(metrics.TOOL_CALLS) == {("ok", "shell"): 0, ("ok", "notes"): 0, ("error", "shell"): 1}


def test_predictions_are_counted_by_source_and_compared_by_quantity(recorded: Recorded) -> None:
    predictions = PredictionMetrics(Meter(), "service")
    predictions.waited(0.25)
    predictions.record({"service": 3, "deadline": 1}, {"tokens": (2, 10.0, 40.0)})
    assert recorded.of(metrics.PREDICTION_SECONDS) == {("service",): 0.25}
    assert recorded.of(metrics.PREDICTIONS) == {("service",): 3, ("deadline",): 1}
    assert recorded.of(metrics.PREDICTIONS_COMPARED) == {("tokens",): 2}
    assert recorded.of(metrics.PREDICTION_ERROR) == {("tokens",): 10}
    assert recorded.of(metrics.PREDICTION_ACTUAL) == {("tokens",): 40}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_ray_accepts_each_metric_of_the_catalogue(metric: Metric) -> None:
    meter = Meter()
    record = {Kind.COUNTER: meter.add, Kind.GAUGE: meter.set, Kind.HISTOGRAM: meter.observe}[metric.kind]
    record(metric, 1.0, **dict.fromkeys(metric.labels, "x"))
    if metric.labels:
        with pytest.raises(ValueError, match=r"Missing|Unrecognized"):
            record(metric, 1.0)


def test_a_replica_exports_what_its_scheduler_did(recorded: Recorded, tmp_path: Path) -> None:
    settings = SchedulerSettings(policy=PolicyConfig(name="continuum", parameters={"default_ttl_s": 10.0}))
    model = write_config_only_model(tmp_path, 1024)
    engine = VirtualEngine(AgentScheduler, model, Shape(max_model_len=1024), settings)
    scheduler = engine.scheduler
    assert isinstance(scheduler, AgentScheduler)
    scheduler.clock = clock = ManualClock()
    recorder, taken = ReplicaMetrics(model_meter()), 0

    def exchange() -> None:
        nonlocal taken
        answer = dispatch(scheduler, "exchange", {"observed": taken})
        taken = answer["observations"]["number"]
        recorder.record(answer["snapshot"])
        recorder.observe(answer["observations"])

    exchange()
    assert recorded.series(metrics.KV_PINS_RELEASED) == {
        ("m", reason): 0 for reason in {one.label for one in ReleaseReason}
    }
    assert recorded.series(metrics.CONTEXT_TOKENS) == {("m", part): 0 for part in Part}
    assert {metric.name for metric in CATALOGUE if metric.snapshot and not recorded.series(metric)} == set()
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
    assert recorded.series(metrics.KV_RETENTION_DECISIONS) == {
        **{(decision, "m", "policy"): 0 for decision in ("hold", "swap", "release")},
        ("hold", "m", "ttl"): 2,
    }
    assert recorded.of(metrics.KV_PINS_RELEASED) == {("m", "used"): 1}
    assert recorded.of(metrics.KV_PIN_S) == {("m",): 2.0}
    assert recorded.series(metrics.QUEUE_S) == {("m", "first"): 0.0, ("m", "resumed"): 0.0}
    assert recorded.of(metrics.WASTED)["m", "held"] == pytest.approx(2.0 * 100 * token_bytes)
    assert recorded.of(metrics.CONTEXT_TOKENS) == {("m", "new"): 119, ("m", "reused"): 96, ("m", "recomputed"): 5}
    assert recorded.of(metrics.STEPS) == {("m",): 2}
    used = recorded.series(metrics.GPU_S)
    assert used["m", "default", "held"] == pytest.approx(2.0 * 100 / scheduler.facts.capacity_tokens, abs=1e-5)
    assert recorded.series(metrics.POLICY) == {("m", "continuum"): 1}
    dispatch(scheduler, "set_policy", {"name": "vllm"})
    exchange()
    assert recorded.series(metrics.POLICY) == {("m", "continuum"): 0, ("m", "vllm"): 1}


def test_uses_of_gpu_time_have_no_second_in_common_and_clients_make_no_labels() -> None:
    recorder = ReplicaMetrics(model_meter(), ["team"])
    times = GpuTime(prefill_s=3.0, decode_s=2.0, recomputed_s=1.0, held_s=0.5, caused_s=9.0).to_public_dict()
    other = {"prefill": 4.0, "recomputed": 2.0, "decode": 4.0, "held": 1.0}
    assert recorder._uses({"team": times, "x": times, "y": times}) == {
        "team": {"prefill": 2.0, "recomputed": 1.0, "decode": 2.0, "held": 0.5},
        "other": other,
    }


def test_a_replica_is_in_one_state_and_its_start_is_counted_when_it_serves(recorded: Recorded) -> None:
    recorder = ReplicaMetrics(model_meter())
    assert recorded.series(metrics.REPLICA_STARTS) == {("m",): 0}
    recorder.started()
    recorder.record_state(ReplicaState.UP)
    recorder.record_state(ReplicaState.DRAINING)
    assert recorded.series(metrics.REPLICA_STARTS) == {("m",): 1}
    assert recorded.series(metrics.REPLICA_UP) == {("m", "up"): 0, ("m", "draining"): 1}


def test_a_degraded_decision_names_the_component_and_the_reason(recorded: Recorded) -> None:
    recorder = ReplicaMetrics(model_meter())
    recorder.fell_back(Fallback.CONTROL_TIMEOUT)
    recorder.record_store({"timeout": 2}, up=False)
    assert recorded.of(metrics.DEGRADED_DECISIONS) == {("replica", "m", "control_timeout"): 1}
    assert recorded.series(metrics.STORE_UP) == {("replica",): 0}
    assert recorded.of(metrics.STORE_FAILURES) == {("replica", "timeout"): 2}
