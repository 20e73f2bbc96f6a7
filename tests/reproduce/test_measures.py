"""What the papers measure, on programs whose numbers can be worked out by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.offline.reproduce import running
from cluster.offline.reproduce.measures import Window, measure_of
from cluster.offline.reproduce.plan import Figure, Job
from replicas.presets import TINY_CPU

BOUNDS = {"ttft_s": 1, "iterations": 10}


def program(arrival_s: float, ttft_s: float, end_s: float, tool_s: float = 0.0, done: bool = True) -> ProgramRecord:
    """Two turns of ten tokens: the first ends a second after its first token, then a tool of ``tool_s``, and the second
    ends at ``end_s``."""
    first_end_s = arrival_s + ttft_s + 1
    outcome = Outcome.OK if done else Outcome.UNFINISHED
    turns = (
        TurnRecord("p", 0, arrival_s, Outcome.OK, arrival_s + ttft_s, first_end_s, 5, 10),
        TurnRecord("p", 1, first_end_s + tool_s, outcome, end_s - 1, end_s, 20, 10),
    )
    return ProgramRecord("p", arrival_s, outcome, turns, 2)


def value(spec: object, *programs: ProgramRecord, window: Window = (0.0, 100.0)) -> float | None:
    return measure_of(spec)(programs, window, 0.1)  # type: ignore[arg-type]


def test_the_latency_of_a_request_has_its_tools_and_the_normalised_one_of_infercept_does_not() -> None:
    [one] = [program(10, 0.5, 30, tool_s=8)]
    assert value("latency_s.mean", one) == 20
    assert value("latency_without_tools_s.mean", one) == 12
    assert value("per_token_s.p50", one) == pytest.approx(12 / 20)
    assert value("per_token_with_tools_s.mean", one) == pytest.approx(1.0)


def test_the_ttft_is_that_of_the_first_turn_even_of_a_program_that_has_not_ended() -> None:
    programs = [program(0, 0.5, 9), program(0, 2.5, 9, done=False)]
    assert value("ttft_s.mean", *programs) == 1.5
    assert value("latency_s.mean", *programs) == 9


def test_a_request_is_good_if_first_token_and_pace_are_in_time_and_tools_count_only_if_they_should() -> None:
    # 20 tokens at ten iterations of 0.1 s: 20 s at most.
    slow = program(0, 2, 9)
    waits_for_its_tool = program(0, 0.5, 21, tool_s=15)
    good = program(0, 0.5, 19)
    for tools, expected in ((True, 1), (False, 2)):
        goodput = {"name": "goodput", **BOUNDS, "tools": tools, "per_s": 50}
        assert value(goodput, slow, waits_for_its_tool, good) == pytest.approx(expected / 50)
        attainment = {"name": "attainment", **BOUNDS, "tools": tools}
        running = program(0, 0.5, 9, done=False)
        assert value(attainment, slow, waits_for_its_tool, good, running) == pytest.approx(100 * expected / 3)


def test_throughput_counts_what_completed_in_the_window_whenever_it_arrived() -> None:
    assert value("throughput", program(0, 1, 90), program(60, 1, 101), program(0, 1, 9, done=False)) == 1 / 100
    after_warmup = (program(600, 1, 690), program(660, 1, 701), program(600, 1, 699))
    assert value("throughput", *after_warmup, window=(600, 700)) == 2 / 100
    from_the_warmup = (program(500, 1, 650), program(500, 1, 599))
    assert value("throughput", *after_warmup, *from_the_warmup, window=(600, 700)) == 3 / 100


def test_all_other_measures_are_of_the_programs_that_arrived_in_the_window() -> None:
    mine, *others = program(600, 1, 640), program(599, 50, 698), program(700, 50, 760)
    for spec in ("ttft_s.mean", "latency_s.p99", {"name": "attainment", **BOUNDS, "tools": True}):
        assert value(spec, mine, *others, window=(600, 700)) == value(spec, mine, window=(600, 700))
        assert value(spec, *others, window=(600, 700)) is None
    goodput = {"name": "goodput", "ttft_s": 60, "iterations": 1000, "tools": True, "per_s": 1}
    assert value(goodput, mine, *others, window=(600, 700)) == 1


def test_without_a_completed_program_there_is_no_latency() -> None:
    assert value("latency_s.p99", program(0, 1, 9, done=False)) is None


@pytest.mark.parametrize("spec", ["speed", "ttft_s.p42", "nothing.mean", {"name": "goodput", "ttft_s": 1}])
def test_an_unknown_measure_is_refused(spec: object) -> None:
    with pytest.raises(ConfigError, match="measure"):
        measure_of(spec)  # type: ignore[arg-type]


def test_the_programs_of_the_warmup_reach_the_measures_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(policies=("vllm",), rates_per_s=(1.0,), routers=("x",), warmup_s=600.0)
    goodput = SimpleNamespace(offered_programs=0, completed_programs=0)
    result = SimpleNamespace(
        recorded=SimpleNamespace(programs=(program(500, 1, 650), program(500, 1, 701))),
        arrivals_s=700.0,
        summary=SimpleNamespace(goodput=goodput),
    )
    monkeypatch.setattr(running, "settings_of", lambda *_: (settings, TINY_CPU))
    monkeypatch.setattr(running, "simulate", lambda *_: result)
    measures = {"throughput": "throughput", "latency": "latency_s.mean"}
    figure = Figure.model_construct(measures=measures)
    found = running.measured(Job("f", "vLLM", "1", 0), {"f": figure}, Path())
    assert found.values == {"throughput": 1 / 100, "latency": None}
