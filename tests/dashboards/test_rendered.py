"""The committed files are what the code writes, and ask only for what there is."""

import json
import re
from pathlib import Path

import pytest

from cluster.observing.catalogue import CATALOGUE, HELD_BLOCKS, PREFIX, REQUESTS, Dashboard, Kind
from cluster.offline.dashboards.board import WIDTH, Board, Variable
from cluster.offline.dashboards.boards import BOARDS, board
from cluster.offline.dashboards.grafana import as_data
from cluster.offline.dashboards.promql import rate, select, total
from cluster.offline.dashboards.render import rendered

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


def test_a_metric_without_a_panel_of_its_own_gets_one() -> None:
    """Its dashboard has another row, whose panels fill the width."""
    number = len([metric for metric in CATALOGUE if metric.dashboard is Dashboard.ROUTING])
    made = board(Dashboard.ROUTING, "Routing", "", (Variable.MODEL,))
    [row] = made.rows
    assert [panel.title for panel in row.panels][:2] == ["Routing decisions", "Requests rejected"]
    assert (len(row.panels), row.title) == (number, "More")
    assert sum(panel.width for panel in row.panels) % WIDTH == 0
    assert row.panels[0].queries[0].expression == (
        '(sum by (reason) (rate(caesura_routing_decisions_total{model=~"$model"}[$__rate_interval]))) or on() vector(0)'
    )


@pytest.mark.parametrize("each", BOARDS, ids=lambda each: each.uid)
def test_panels_fill_whole_rows_of_the_grid(each: Board) -> None:
    drawn = as_data(each)
    assert len({panel["id"] for panel in drawn["panels"]}) == len(drawn["panels"])
    for row in each.rows:
        assert sum(panel.width for panel in row.panels) % WIDTH == 0, row.title
    for panel in drawn["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= WIDTH


@pytest.mark.parametrize("each", BOARDS, ids=lambda each: each.uid)
def test_a_query_uses_only_variables_that_its_dashboard_has(each: Board) -> None:
    drawn = as_data(each)
    there = {variable["name"] for variable in drawn["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(drawn["panels"])))
    assert {name for name in used if not name.startswith("__")} <= there
    assert there - used == set(), "a variable that changes nothing"


def test_a_query_for_a_label_that_a_metric_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="has no label 'tool'"):
        rate(REQUESTS, 'tool="book"')
    with pytest.raises(ValueError, match="has no label 'outcome'"):
        total(HELD_BLOCKS, by=("outcome",))
    with pytest.raises(ValueError, match="is no matcher"):
        select(REQUESTS, "outcome=ok")
    with pytest.raises(ValueError, match="is a counter, not a gauge"):
        total(REQUESTS)
