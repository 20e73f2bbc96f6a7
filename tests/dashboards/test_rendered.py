"""The committed files are what the code writes, and ask only for what there is."""

import json
import re
from pathlib import Path

import pytest

from cluster.dashboards.board import WIDTH
from cluster.dashboards.boards import BOARDS
from cluster.dashboards.drawing import as_data
from cluster.dashboards.promql import labelled, rate, select, total
from cluster.dashboards.rendering import rendered
from cluster.metrics import CATALOGUE, HELD_BLOCKS, PREFIX, REQUESTS, Kind

DEPLOY = Path(__file__).parents[2] / "deploy"
RENDERED = rendered()
SUFFIXES = ("_bucket", "_sum", "_count")


def test_the_committed_files_are_what_the_code_writes() -> None:
    committed = {
        str(path.relative_to(DEPLOY)): path.read_text()
        for folder in ("grafana", "prometheus")
        for path in (DEPLOY / folder).iterdir()
    }
    assert committed == dict(RENDERED), "run: caesura dashboards render"


def test_only_exported_metrics_are_asked_for() -> None:
    exported = {metric.exported for metric in CATALOGUE}
    exported |= {
        metric.exported + suffix for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM for suffix in SUFFIXES
    }
    asked = {name for text in RENDERED.values() for name in re.findall(rf"\b{PREFIX}[a-z0-9_]+", text)}
    assert asked - exported - {PREFIX} == set()


def test_most_of_the_catalogue_is_on_a_dashboard() -> None:
    shown = "".join(text for path, text in RENDERED.items() if path.startswith("grafana/"))
    unseen = {metric.name for metric in CATALOGUE if metric.exported not in shown}
    assert unseen <= UNSEEN, "show it, or name it here"


UNSEEN = {"concluded_programs", "held_tokens"}
"""Metrics that no panel shows: others say nearly the same, and these are for queries by hand."""


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_fill_whole_rows_of_the_grid(board) -> None:
    drawn = as_data(board)
    assert len({panel["id"] for panel in drawn["panels"]}) == len(drawn["panels"])
    for row in board.rows:
        assert sum(panel.width for panel in row.panels) % WIDTH == 0, row.title
    for panel in drawn["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= WIDTH


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_query_uses_only_variables_that_its_dashboard_has(board) -> None:
    drawn = as_data(board)
    there = {variable["name"] for variable in drawn["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(drawn["panels"])))
    assert {name for name in used if not name.startswith("__")} <= there
    assert there - used == set(), "a variable that changes nothing"


def test_a_query_for_a_label_that_a_metric_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="has no label 'tool'"):
        rate(REQUESTS, 'tool="book"')
    with pytest.raises(ValueError, match="has no label 'outcome'"):
        total(HELD_BLOCKS, by=("outcome",))
    with pytest.raises(ValueError, match="has no label 'reason'"):
        labelled(REQUESTS, "reason", "new")
    with pytest.raises(ValueError, match="is no matcher"):
        select(REQUESTS, "outcome=ok")
    with pytest.raises(ValueError, match="is a counter, not a gauge"):
        total(REQUESTS)
