"""AIPerf's own sessions as a trace of ours and back: AIPerf accepts what came back."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aiperf import BLOCK_TOKENS, INSTALL, INSTALLED, SESSIONS, synthesize
from cluster.core.recorded_turn import recorded_programs
from cluster.offline.traces.conversion import convert
from cluster.offline.traces.format import Options
from tests.traces.programs import contexts

WITHIN_S = 240.0
pytestmark = pytest.mark.skipif(not INSTALLED.exists(), reason=f"AIPerf is not installed: {INSTALL}")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(tmp_path_factory.mktemp("sessions"), sessions=30, seed=3, timeout_s=WITHIN_S)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def shape(file: Path) -> list[tuple[Any, ...]]:
    """What AIPerf sends of each turn, and when; delays in tenths of a millisecond."""
    keys = ("session_id", "input_length", "output_length", "timestamp")
    return sorted((*(str(row.get(key)) for key in keys), round(10 * row.get("delay", 0))) for row in rows(file))


def test_sessions_come_back_and_aiperf_accepts_them(dataset: Path, tmp_path: Path) -> None:
    options = Options(block_tokens=BLOCK_TOKENS)
    ours, back = tmp_path / "ours.jsonl", tmp_path / "back.jsonl"
    counts, losses = convert(dataset, "aiperf", ours, "caesura", options)
    assert counts.turns == len(rows(dataset))
    assert set(losses.counts()) == {"another prefix that some sessions share (sessions)"}
    trace = [program for _, program in recorded_programs(ours)]
    assert {program.shared_prefix and program.shared_prefix.tokens for program in trace} == {
        SESSIONS["cache"]["layer1_tokens"]
    }
    assert max(max(of_one) for of_one in contexts(trace)) <= SESSIONS["max_prompt_tokens"]
    convert(ours, "caesura", back, "aiperf", options)
    assert shape(back) == shape(dataset)
    command = [str(INSTALLED), "validate", "mooncake-trace", "--input", str(back)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{counts.turns} rows" in " ".join(checked.stdout.split())
