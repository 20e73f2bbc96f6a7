"""The pages of the papers have the kept results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from cluster.offline.reproduce.plan import PAPERS

RESULT: dict[str, Any] = {
    "paper": "lamps",
    "seeds": [0, 1],
    "date": "2026-01-02",
    "command": "caesura reproduce lamps --traces /some/where/data/programs --json /tmp/x.json",
    "curves": {"figure6_gptj_multi": {}},
    "rows": [
        {
            "figure": "figure6_gptj_multi",
            "what": "TTFT below, %",
            "headline": True,
            "published": 90.0,
            "here": here,
            "spread": None,
            "with_factors": {},
            "ratio": 0,
            "near": False,
        }
        for here in (80.0, 20.0)
    ],
}


@pytest.mark.parametrize("name", PAPERS)
def test_every_page_is_current(name: str) -> None:
    page = (papers.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert papers.with_results(name, page) == page


def test_results_replace_the_ones_before_and_come_after_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    text = "# LAMPS\n\nText.\n"
    page = papers.with_results("lamps", text)
    assert page.startswith(text)
    assert "Planned, and not run yet" in page
    assert "- Figure 6: GPT-J-6B, all programs: 2 numbers (TTFT below InferCept's at 3/s, %;" in page
    made = tmp_path / "made.json"
    made.write_text(json.dumps(RESULT))
    kept = papers.keep(made)
    assert kept.name == "reproduce_lamps_figure6_gptj_multi.json"
    assert json.loads(kept.read_text())["command"] == "caesura reproduce lamps --traces programs --json x.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"commit": "abc"}))
    page = papers.with_results("lamps", text)
    assert page.startswith(text)
    assert "1 of 2 numbers" in page
    assert "| TTFT below, % | 90 | 80 | 0.889 |" in page
    assert "| TTFT below, % | 90 | 20 | 0.222 * |" in page
    assert "Seeds 0, 1; 2026-01-02, commit abc." in page
    assert papers.with_results("lamps", page) == page


def test_figures_of_other_runs_have_their_own_seeds_and_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    figures = ("figure6_gptj_multi", "figure6_gptj_single")
    for number, figure in enumerate(figures):
        rows = [row | {"figure": figure} for row in RESULT["rows"]]
        one = RESULT | {"rows": rows, "curves": {figure: {}}, "seeds": [number], "commit": f"c{number}"}
        (tmp_path / f"reproduce_lamps_{figure}.json").write_text(json.dumps(one))
    page = papers.with_results("lamps", "# LAMPS\n")
    single, multi = page.index("Seeds 1; 2026-01-02, commit c1."), page.index("Seeds 0; 2026-01-02, commit c0.")
    assert page.index("2 of 4 numbers") < single < multi, "each after its table, in the order of the figures"
