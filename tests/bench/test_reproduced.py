"""Which figures and factors a run of all papers has."""

import pytest

from benchmarks.reproduced import chosen_figures, factors_of
from cluster.offline.reproduce.plan import PAPERS, paper_of


def test_all_figures_of_all_papers_are_run_unless_some_are_named_in_another_order() -> None:
    assert chosen_figures("") == [(paper, figure) for paper in PAPERS for figure in paper_of(paper).figures]
    some = chosen_figures("mars:figure5_gptj_multi,infercept")
    assert some[:2] == [("mars", "figure5_gptj_multi"), ("infercept", "figure2_6b")]
    assert {paper for paper, _ in some[1:]} == {"infercept"}


@pytest.mark.parametrize(("only", "complaint"), [("orca", "there are infercept"), ("mars:figure9", "figure5_gptj")])
def test_what_is_not_planned_is_named(only: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"--only {only}: .*{complaint}"):
        chosen_figures(only)


def test_a_figure_gets_the_factors_that_it_has() -> None:
    assert factors_of("augserve", "figure2", ["nohost", "host0"]) == "host0"
    assert factors_of("augserve", "figure2", ["all"]) == "bound,host13,host0"
    assert factors_of("augserve", "figure2", [""]) == ""
