"""What the recorders make of numbers that others keep: increments of counters, values of gauges."""

from collections import Counter

import pytest

from cluster import metrics
from cluster.metrics import CATALOGUE, Kind, Metric
from cluster.observing.meter import Meter
from cluster.observing.programs import ProgramMetrics
from cluster.observing.router import RouterMetrics
from cluster.observing.tools import ToolMetrics
from cluster.tools import Outcome, ToolResult


def test_a_total_that_others_keep_becomes_what_it_grew_by(recorded: Counter[object]) -> None:
    programs = ProgramMetrics(Meter({"model": "m"}))
    programs.record(3, {"started": 2})
    programs.record(1, {"started": 5, "ended": 1})
    programs.record(1, {"started": 5, "ended": 1})
    events = {tags: n for (name, tags), n in recorded.items() if name == "caesura_program_events"}
    assert events == {(("kind", "started"), ("model", "m")): 5, (("kind", "ended"), ("model", "m")): 1}


def test_a_total_that_shrinks_began_anew(recorded: Counter[object]) -> None:
    meter = Meter({"model": "m"})
    for total in (4, 1, 3):
        meter.count_to(metrics.MOVES, total)
    assert recorded["caesura_moves", (("model", "m"),)] == 7


def test_two_models_of_one_process_are_counted_apart(recorded: Counter[object]) -> None:
    for model, total in (("a", 2), ("b", 5)):
        RouterMetrics(Meter({"model": model})).record(
            waiting=0,
            waits_s=[0.5] * total,
            ages_s=[],
            states={"up": total},
            moves=total,
            placements={"resident": total},
            refusals={},
            fallbacks={},
        )
    assert recorded["caesura_placements", (("model", "a"), ("reason", "resident"))] == 2
    assert recorded["caesura_placements", (("model", "b"), ("reason", "resident"))] == 5
    assert recorded["caesura_moves", (("model", "b"),)] == 5
    assert recorded["caesura_admission_seconds", (("model", "a"),)] == 1.0
    assert recorded["caesura_replicas", (("model", "a"), ("state", "up"))] == 2


def test_nothing_is_recorded_where_it_is_turned_off(recorded: Counter[object]) -> None:
    meter = Meter({"model": "m"}, enabled=False)
    ProgramMetrics(meter).record(3, {"started": 2})
    meter.begin(metrics.MOVES)
    meter.observe(metrics.HOLD_S, 1.0)
    assert not recorded


def test_a_series_begins_at_zero(recorded: Counter[object]) -> None:
    Meter({"model": "m"}).begin(metrics.MOVES)
    assert list(recorded.items()) == [(("caesura_moves", (("model", "m"),)), 0)]


def test_a_tool_that_has_never_been_called_is_there_with_no_call(recorded: Counter[object]) -> None:
    tools = ToolMetrics(Meter(), ("shell", "notes"))
    tools.record("shell", ToolResult("1", "shell", Outcome.ERROR, "no"))
    assert {tags: n for (name, tags), n in recorded.items() if name == "caesura_tool_calls"} == {
        (("outcome", "ok"), ("tool", "shell")): 0,
        (("outcome", "ok"), ("tool", "notes")): 0,
        (("outcome", "error"), ("tool", "shell")): 1,
    }


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_ray_takes_each_metric_of_the_catalogue(metric: Metric) -> None:
    meter = Meter()
    record = {Kind.COUNTER: meter.add, Kind.GAUGE: meter.set, Kind.HISTOGRAM: meter.observe}[metric.kind]
    record(metric, 1.0, **dict.fromkeys(metric.labels, "x"))
    with pytest.raises(ValueError, match=r"Missing|Unrecognized"):
        record(metric, 1.0)
