"""`benchmarks.frontier`: ours against the best other policy, measure by measure."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import frontier
from benchmarks.frontier import (
    ADMITTED,
    GOOD,
    MARK,
    MEASURES,
    OFFERED,
    PATIENT,
    REJECTED,
    WORKLOADS,
    Measure,
    behind,
    cell,
    means_of,
    rejections,
    rows_of,
    where_behind,
)

TTFT = Measure("ttft_all_s.p99", "TTFT p99")
README = Path(__file__).parents[2] / "README.md"


def row(policy: str, seed: int, good: float, ttft_s: float, load: float = 0.9, **more: Any) -> dict[str, Any]:
    command = f"caesura simulate --trace t.jsonl.gz --policies {policy} --seed {seed} --set {policy}.b=1 --minutes 10"
    return {
        **{"policy": policy, "seed": seed, "goodput_programs": good, "ttft_all_s": {"p99": ttft_s}},
        **{"simulation": {"share_of_capacity": load}, "date": "2026-11-28", "commit": "1234567"},
        "command": command,
        **more,
    }


def served(policy: str, refused: int, offered_s: float, admitted_s: float, load: float = 1.2) -> dict[str, Any]:
    completion = {"completion_offered_s": {"mean": offered_s}, "completion_all_s": {"mean": admitted_s}}
    return row(policy, 0, 5.0, 1.0, load, offered=100, refused=refused, **completion)


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
    near = means_of([row("caesura", 0, 5.0, 1.04), row("vllm", 0, 5.2, 1.0)])
    assert cell(near, GOOD, 0.9) == "5 (`vllm` 5.2)"


def test_a_lower_completion_that_comes_with_rejections_is_not_comparable() -> None:
    means = means_of([served("caesura", 12, 77.0, 11.0), served("augserve", 0, 53.0, 53.0)])
    assert cell(means, ADMITTED, 1.2) == "11 (`augserve` 53) †"
    assert cell(means, OFFERED, 1.2) == "77 (`augserve` 53) *"
    assert cell(means, REJECTED, 1.2) == "0.12 (`augserve` 0) *"
    slower = means_of([served("caesura", 12, 77.0, 60.0), served("augserve", 0, 53.0, 53.0)])
    assert cell(slower, ADMITTED, 1.2) == "60 (`augserve` 53) *", "behind, even of the easier programs"
    alike = means_of([served("caesura", 0, 11.0, 11.0), served("augserve", 0, 53.0, 53.0)])
    assert cell(alike, ADMITTED, 1.2) == "11 (`augserve` 53)"
    unknown = means_of([served("caesura", 0, 11.0, 11.0) | {"refused": None}, served("augserve", 0, 53.0, 53.0)])
    assert cell(unknown, ADMITTED, 1.2) == "11 (`augserve` 53) †"
    assert cell(unknown, REJECTED, 1.2) == "-", "what a file does not say is not 0"


def test_every_measure_of_admitted_programs_stands_beside_the_rejected_and_all_offered() -> None:
    admitted = [one for one in MEASURES if one.field.startswith(("completion_all_s", "ttft_all_s"))]
    assert all(one.admitted for one in admitted)
    assert {REJECTED, OFFERED} <= set(MEASURES)
    assert MEASURES.index(OFFERED) < MEASURES.index(ADMITTED), "the weaker reading comes first"
    assert [one.plotted for one in (REJECTED, OFFERED, ADMITTED)] == [True] * 3


def test_where_ours_is_behind_is_named_with_the_loads() -> None:
    rows = [served("caesura", 12, 77.0, 11.0, load) for load in (1.2, 1.5)]
    rows += [served("augserve", 0, 53.0, 53.0, 1.2), served("augserve", 0, 90.0, 90.0, 1.5)]
    lines = list(where_behind({"Merge": means_of(rows)}))
    assert lines[2] == "- Merge: rejected at 1.2, 1.5; completion mean of all offered at 1.2."


def test_rejections_have_both_completion_times_beside_the_policy_that_rejects_nobody() -> None:
    rows = [served("caesura", 0, 8.0, 8.0, 0.9), served("augserve", 0, 12.0, 12.0, 0.9)]
    assert list(rejections({"Merge": means_of(rows)})) == []
    rows += [served("caesura", 12, 77.0, 11.0), served("augserve", 0, 50.0, 50.0)]
    lines = list(rejections({"Merge": means_of(rows)}))
    assert lines[4].startswith("| Merge | 1.2 | 12.0% | 77 / 50 = 1.54 | 11 / 50 = 0.22 | ")
    assert "completion mean of all offered, s | completion mean of the admitted, s" in lines[2]


def test_nothing_is_compared_with_nothing() -> None:
    assert behind(0.0, 2.0, most=True) == inf and behind(2.0, 0.0, most=True) is None
    assert behind(0.0, 2.0, most=False) == 0.0 and behind(2.0, 0.0, most=False) is None
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
    made = "caesura simulate --trace t.jsonl.gz --minutes 10 --set caesura.b=1 --set vllm.b=1 --set augserve.b=1"
    assert f"Seeds 0, 1; 2026-11-28, commit 1234567; `{made}`." in page
    assert (tmp_path / "frontier.svg").read_text().count("<svg") == 1


def test_the_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = frontier.PAGE.read_text()
    monkeypatch.setattr(frontier, "IMAGES", tmp_path)
    monkeypatch.setattr(frontier, "PAGE", tmp_path / "policies.md")
    frontier.PAGE.write_text(written)
    assert frontier.main() == 0
    assert frontier.PAGE.read_text() == written, "run `python -m benchmarks.frontier`"


def test_the_readme_states_good_programs_rejections_and_both_completion_times_above_the_capacity() -> None:
    means, text = means_of(rows_of(WORKLOADS[0], "")), README.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("| the same at 1.2")]
    ours, patient, other = (means[policy, 1.2] for policy in ("caesura", PATIENT, "infercept"))
    assert f"| {ours[GOOD.field]:.2f} ({ours[REJECTED.field]:.1%} of the programs rejected) |" in line
    assert f"| {patient[GOOD.field]:.2f} `{PATIENT}`, {other[GOOD.field]:.2f} `infercept` (none rejected) |" in line
    assert patient[REJECTED.field] == other[REJECTED.field] == 0.0
    assert f"{ours[OFFERED.field]:.3g} s against {patient[OFFERED.field]:.3g} s" in text
    assert f"Of the admitted it is {ours[ADMITTED.field]:.3g} s" in text


def test_the_tables_one_by_one_have_the_rejected_and_all_offered_before_the_admitted() -> None:
    kept = yaml.safe_load((Path(frontier.__file__).parent / "kept.yaml").read_text())
    merge = [entry for entry in kept["tables"] if entry["file"].startswith("simulate_merge")]
    assert len(merge) == 3
    for entry in merge:
        fields = list(entry["columns"])
        assert fields[2:5] == [REJECTED.field, OFFERED.field, ADMITTED.field]
