"""`caesura top`, `caesura status` and a recorded `caesura bench` on a real cluster."""

import json
import sys
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.local.cluster import LocalCluster
from cluster.offline.report.page import render
from cluster.offline.report.reading import read

pytestmark = pytest.mark.cluster


def caesura(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["caesura", *arguments])
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_status_tells_every_part(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caesura(monkeypatch, "status", "--url", cluster.url, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert {part["name"]: part["state"] for part in told["parts"]} == dict.fromkeys(
        ("ingress", "replicas", "policy", "store", "predictor", "versions"), "ok"
    )
    details = {part["name"]: part["detail"] for part in told["parts"]}
    assert details["replicas"] == "2 answer"


def test_a_recorded_run_has_its_pauses_and_its_memory(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "run.jsonl"
    shape = ("--count", "4", "--rate", "4", "--max-turns", "3", "--max-context", "2000", "--scale-tools", "0.05")
    what = ("--url", cluster.url, "--policies", "continuum", *shape, "--quiet", "--record", str(record))
    assert caesura(monkeypatch, "bench", *what) == 0
    (run,) = read([record]).runs
    assert len(run.programs) == 4
    replica_tokens = {line.running + line.held + line.cached + line.empty for line in run.memory}
    assert replica_tokens == {run.head.capacity_tokens}
    pauses = [(program, pause) for program in run.programs for pause in program.pauses]
    assert pauses
    for program, pause in pauses:
        # On the client's clock: after the program came, and before a moment in which it was over.
        assert pause.from_s > program.arrival_s
        assert pause.phase in ("held", "released", "swapped", "fetching")
    assert any(turn.decision for program in run.programs for turn in program.turns)
    assert "continuum" in render(read([record]))
    # What was decided a moment ago is what `top` tells.
    capsys.readouterr()
    assert caesura(monkeypatch, "top", "--once", "--interval", "0.2", "--url", cluster.url) == 0
    frame = capsys.readouterr().out
    assert "policy continuum" in frame
    assert frame.count("█") + frame.count("▒") + frame.count("░") > 2 * 20
