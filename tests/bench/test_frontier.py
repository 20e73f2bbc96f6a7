"""`benchmarks.frontier`: ours against the best other policy, measure by measure."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frontier
from benchmarks.frontier import MARK, Measure, behind, cell, means_of

GOOD = Measure("goodput_programs", "good programs", most=True)
TTFT = Measure("ttft_all_s.p99", "TTFT p99")


def row(policy: str, seed: int, good: float, ttft_s: float, load: float = 0.9) -> dict[str, Any]:
    return {
        **{"policy": policy, "seed": seed, "goodput_programs": good, "ttft_all_s": {"p99": ttft_s}},
        **{"simulation": {"share_of_capacity": load}, "date": "2026-11-28", "commit": "1234567"},
        "command": f"caesura simulate --trace t.jsonl.gz --policies {policy} --seed {seed} --set a.b=1 --minutes 10",
    }


ROWS = [
    row("caesura", 0, 5.0, 1.0),
    row("caesura", 1, 5.0, 3.0),
    row("vllm", 0, 1.0, 1.0),
    row("vllm", 1, 1.0, 1.0),
    row("augserve", 0, 4.0, 4.0),
    row("augserve", 1, 8.0, 4.0),
]


def test_a_measure_is_compared_with_the_best_other_by_the_means_of_the_seeds() -> None:
    means = means_of(ROWS)
    assert cell(means, GOOD, 0.9) == "5 (`augserve` 6) *"
    assert cell(means, TTFT, 0.9) == "2 (`vllm` 1) *"
    near = means_of([row("caesura", 0, 5.0, 1.04), row("vllm", 0, 5.2, 1.0)])
    assert cell(near, GOOD, 0.9) == "5 (`vllm` 5.2)"
    assert cell(near, TTFT, 0.9) == "1.04 (`vllm` 1)"


def test_nothing_is_compared_with_nothing() -> None:
    assert behind(0.0, 2.0, most=True) is None and behind(2.0, 0.0, most=True) is None
    assert behind(2.0, 4.0, most=False) == 0.5 and behind(2.0, 4.0, most=True) == 2.0


def test_the_page_keeps_what_stands_before_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "DIRECTORY", tmp_path)
    monkeypatch.setattr(frontier, "IMAGES", tmp_path)
    monkeypatch.setattr(frontier, "PAGE", tmp_path / "policies.md")
    (tmp_path / "policies.md").write_text(f"# Policies\n\n{MARK}\nold")
    assert frontier.main() == 1, "no result is kept"
    (tmp_path / "simulate_merge.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in ROWS))
    assert frontier.main() == 0
    page = (tmp_path / "policies.md").read_text()
    assert page.startswith(f"# Policies\n\n{MARK}\n") and "old" not in page
    assert "| good programs, 1/s | 5 (`augserve` 6) * |" in page
    assert "Seeds 0, 1; 2026-11-28, commit 1234567; `caesura simulate --trace t.jsonl.gz --minutes 10 --set a.b=1`." in page
    assert (tmp_path / "frontier.svg").read_text().count("<svg") == 1
