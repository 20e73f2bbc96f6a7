"""The pages of the papers have the kept results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from cluster.offline.reproduce.plan import PAPERS, Row, paper_of

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


@pytest.mark.parametrize("name", PAPERS)
def test_rows_of_a_figure_can_be_told_apart(name: str) -> None:
    for figure in paper_of(name).figures.values():
        places = [tuple(getattr(row, part) for part in papers.PLACE) for row in figure.rows]
        assert len(set(places)) == len(places) == len({row.what for row in figure.rows})


def planned(what: str, published: float, measure: str = "ttft") -> dict[str, Any]:
    place = {"kind": "less", "system": "LAMPS", "against": "vLLM", "measure": measure}
    return {"what": what, "published": published, **place}


def test_a_renamed_label_is_not_also_in_the_list_of_what_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = paper_of("lamps")
    rows = [planned("TTFT below, at most (all settings)", 90.0), planned("latency below", 60.0, "latency")]
    figure = plan.figures["figure6_gptj_multi"].model_copy(update={"rows": [Row.model_validate(row) for row in rows]})
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    monkeypatch.setattr(papers, "paper_of", lambda name: plan.model_copy(update={"figures": {"f": figure}}))
    older = RESULT["rows"][0] | {"figure": "f", "what": "TTFT below, at most", "here": 95.0}
    newer = older | {"what": "another label", "published": 91.0} | {key: rows[0].get(key) for key in papers.PLACE}
    for row in (older, newer):
        one = RESULT | {"rows": [row], "curves": {"f": {}}, "commit": "abc"}
        (tmp_path / "reproduce_lamps_f.json").write_text(json.dumps(one))
        page = papers.with_results("lamps", "# LAMPS\n")
        assert page.count("TTFT below, at most (all settings)") == 1 and row["what"] + " |" not in page
        assert "1 of 1 numbers" in page and "by what it leaves, 0 are" in page, "its kind is the plan's: less"
        assert "1 numbers (latency below)" in page


def test_the_page_of_evidence_has_both_counts_with_the_smaller_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = papers.EVIDENCE.read_text(encoding="utf-8")
    assert papers.with_counts(text) == text, "run `python -m benchmarks.papers`"
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    row = RESULT["rows"][0] | {"what": "TTFT below InferCept's at 3/s, %"}
    one = RESULT | {"rows": [row], "commit": "abc"}
    (tmp_path / "reproduce_lamps_figure6_gptj_multi.json").write_text(json.dumps(one))
    counted = "of 1 published numbers, within 25 %: 0 if a reduction in percent is compared by what it leaves, 1 if"
    assert f"a {papers.COUNTED[0]}{counted}" in papers.with_counts("a {}old{} b".format(*papers.COUNTED))
    with pytest.raises(ValueError, match="no place for the counts"):
        papers.with_counts("nothing")
