"""What the papers measure, on programs whose numbers can be worked out by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.errors import ConfigError
from cluster.core.slo import Outcome, ProgramRecord, TurnRecord
from cluster.offline.reproduce import running
from cluster.offline.reproduce.measures import OF_RUN, Window, measure_of
from cluster.offline.reproduce.plan import Figure, Job
from cluster.offline.simulator.run import Wasted
from cluster.offline.simulator.settings import SimulationSettings
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


def test_queueing_is_a_part_of_the_time_of_completed_requests() -> None:
    done = program(10, 0.5, 30, tool_s=8)
    waited = replace(done, turns=tuple(replace(turn, queue_s=2.0) for turn in done.turns))
    assert value("queueing", waited, program(0, 2.5, 9, done=False)) == pytest.approx(100 * 4 / 20)
    assert value("queueing") is None


def test_wasted_memory_is_a_part_of_memory_and_time_and_computing_again_of_the_time_of_steps() -> None:
    settings = SimulationSettings(policies=("vllm",), rates_per_s=(1.0,), minutes=1.0, warmup_minutes=0.5)
    memory_gib = settings.blocks * 16 * settings.cost_model().kv_bytes_per_token / 2**30
    result: Any = SimpleNamespace(
        wasted_gib_s=Wasted(held=memory_gib * 6, recomputed=memory_gib * 9),
        recomputing_share=0.375,
        arrivals_s=90.0,
        replicas=1,
    )
    assert OF_RUN["wasted_memory"](result, settings) == pytest.approx(100 * 15 / 60)
    assert OF_RUN["recomputing"](result, settings) == 37.5
    result.recomputing_share = None
    assert OF_RUN["recomputing"](result, settings) is None


def test_the_latency_of_a_request_has_its_tools_and_the_normalised_one_of_infercept_does_not() -> None:
    [one] = [program(10, 0.5, 30, tool_s=8)]
    assert value("latency_s.mean", one) == 20
    assert value("latency_without_tools_s.mean", one) == 12
    assert value("per_token_s.p50", one) == pytest.approx(12 / 20)
    assert value("per_token_with_tools_s.mean", one) == pytest.approx(1.0)


def test_infercepts_benchmark_counts_programs_under_way_and_the_tokens_that_tools_return() -> None:
    """20 tokens of output and 5 returned: 12 s without the tool. The other one has waited for 40 s since its tool."""
    done = program(10, 0.5, 30, tool_s=8)
    done = replace(done, turns=(done.turns[0], replace(done.turns[1], previous_context_tokens=15)))
    waits = program(10, 0.5, 30, tool_s=8, done=False)
    later = replace(waits.turns[1], previous_context_tokens=15, output_tokens=0, first_token_s=None, last_token_s=None)
    waits = replace(waits, turns=(waits.turns[0], later), until_s=59.5)
    assert value("per_token_so_far_s.mean", done) == pytest.approx(12 / 25)
    assert value("per_token_so_far_s.mean", waits) == pytest.approx((1.5 + 40) / 15)


def test_the_ttft_of_completed_programs_leaves_the_others_out() -> None:
    programs = [program(0, 0.5, 9), program(0, 2.5, 9, done=False)]
    assert value("ttft_completed_s.mean", *programs) == 0.5


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
    settings = SimpleNamespace(
        policies=("vllm",), rates_per_s=(1.0,), routers=("x",), seeds=(0,), noises=(0.0,), warmup_s=600.0
    )
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
