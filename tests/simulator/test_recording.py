"""`caesura simulate --record`: what is recorded, and that to be watched changes nothing."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.offline.report.page import render
from cluster.offline.report.reading import read
from tests.simulator.test_simulate_command import REAL_TIME, caesura, lines, small


def test_a_recorded_run_is_the_same_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_trace: Path) -> None:
    what = small(small_trace, "--policies", "vllm,continuum", "--host-gib", "2", "--quiet")
    plain, watched, record = (tmp_path / name for name in ("plain.jsonl", "watched.jsonl", "record.jsonl"))
    assert caesura(monkeypatch, *what, "--json", str(plain)) == 0
    assert caesura(monkeypatch, *what, "--json", str(watched), "--record", str(record)) == 0
    for one, other in zip(lines(plain), lines(watched), strict=True):
        for key in REAL_TIME:
            del one[key], other[key]
        assert one == other
    runs = read([record]).runs
    assert [run.head.policy for run in runs] == ["vllm", "continuum"]
    for run, summary in zip(runs, lines(plain), strict=True):
        measured = list(run.measured)
        assert len(measured) == summary["offered"]
        assert sum(program.good for program in measured) / 30 == pytest.approx(summary["goodput_programs"])
        capacity = run.head.capacity_tokens
        assert len(run.memory) > 50
        assert {m.running + m.held + m.cached + m.empty for m in run.memory} == {capacity}
        assert any(m.cached for m in run.memory)
    stock, continuum = runs
    assert not any(program.pauses for program in stock.programs)
    assert any(m.held for m in continuum.memory) and not any(m.held for m in stock.memory)
    for program in continuum.programs:
        first, second = program.turns
        assert first.decision and second.start_s > (first.last_s or 0.0)
        # The pauses lie without a gap between the turns. None follows the last turn, whose client reports the end.
        assert program.pauses[0].from_s == pytest.approx(first.last_s, abs=1e-3)
        assert program.pauses[-1].to_s == pytest.approx(second.start_s, abs=1e-3)
        assert all(a.to_s == b.from_s for a, b in pairwise(program.pauses))
    assert "continuum" in render(read([record]))


def test_programs_that_moved_are_told_by_all_their_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_trace: Path
) -> None:
    record = tmp_path / "record.jsonl"
    what = small(small_trace, "--policies", "continuum", "--replicas", "2", "--router", "round_robin", "--quiet")
    assert caesura(monkeypatch, *what, "--record", str(record)) == 0
    (run,) = read([record]).runs
    told = [[bool(turn.decision) for turn in program.turns] for program in run.programs]
    assert told and all(all(turns) for turns in told)
    assert json.loads(record.read_text().splitlines()[0])["router"] == "round_robin"
