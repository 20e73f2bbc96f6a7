"""Runs that are kept: what makes two runs the same."""

from pathlib import Path

from cluster.offline.reproduce import kept
from cluster.offline.reproduce.kept import KeptRuns, all_specs, named
from cluster.offline.reproduce.plan import Job

LATENCY = "latency_s.mean"


def job(**settings: object) -> Job:
    return Job("f", "vLLM", "1", 0, settings={"trace": "small", "rate": 1.0, **settings})


def test_a_run_is_found_by_settings_trace_and_code_whatever_figure_it_is_of(tmp_path: Path) -> None:
    (trace := tmp_path / "small.jsonl.gz").write_bytes(b"a")
    runs = KeptRuns(tmp_path / "runs", tmp_path, "code")
    content = {"values": {named(LATENCY): 3.0}, "offered": 1, "completed": 1}
    runs.keep(job(), content)
    assert runs.find(job(), {"latency": LATENCY}) == content
    assert runs.find(Job("g", "other", "2", 0, settings=job().settings), {"time": LATENCY}) == content
    assert runs.find(job(), {"latency": LATENCY, "ttft": "ttft_s.mean"}) is None  # was not measured then
    assert runs.find(job(minutes=3), {"latency": LATENCY}) is None
    assert runs.find(Job("f", "vLLM", "1", 1, settings=job().settings), {"latency": LATENCY}) is None
    assert KeptRuns(tmp_path / "runs", tmp_path, "newer").find(job(), {"latency": LATENCY}) is None
    trace.write_bytes(b"b")
    kept._digest.cache_clear()
    assert runs.find(job(), {"latency": LATENCY}) is None


def test_each_measure_of_all_papers_is_kept() -> None:
    assert named(LATENCY) in all_specs()
    assert named("wasted_memory") in all_specs()
