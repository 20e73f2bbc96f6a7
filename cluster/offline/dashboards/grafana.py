"""Turns a `Board` into Grafana's JSON, with Grafana's own SDK."""

import json
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as drawn
from grafana_foundation_sdk.models import dashboard as grafana
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as asked

from cluster.observing import catalogue as metrics
from cluster.offline.dashboards.board import HEIGHT, Board, Panel, Query, Shape, Variable
from cluster.offline.dashboards.foreign import VLLM_GENERATED
from cluster.offline.dashboards.promql import ENGINE_MODEL_MATCHER, MODEL_MATCHER, PROCESS, select

DATASOURCE = grafana.DataSourceRef("prometheus", "${datasource}")
TAG = "caesura"
ALL = ".*"
GREEN, RED, PLAIN = "green", "red", "text"

CHOICES: dict[Variable, tuple[str, str, str]] = {
    Variable.MODEL: ("Model", f"label_values({metrics.REQUESTS.exported}, model)", ""),
    Variable.TENANT: (
        "Tenant",
        f"label_values({select(metrics.REQUESTS, MODEL_MATCHER)}, tenant)",
        "",
    ),
    Variable.TOOL: ("Tool", f"label_values({metrics.TOOL_CALLS.exported}, tool)", ""),
    # The reader sees the replica's id. Queries match the process, the only label that all metrics of a replica have.
    Variable.REPLICA: (
        "Replica",
        f"query_result(count by (ReplicaId, {PROCESS}) ({select(VLLM_GENERATED, ENGINE_MODEL_MATCHER)}))",
        f'/ReplicaId="(?<text>[^"]+)",{PROCESS}="(?<value>[^"]+)"/',
    ),
}
"""Label of each variable, its query, and the regex for the used part of the result."""


def as_json(board: Board) -> str:
    """Return the text of the dashboard's file."""
    return json.dumps(_dashboard(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def as_data(board: Board) -> dict[str, Any]:
    """Return the parsed content of the dashboard's file."""
    data: dict[str, Any] = json.loads(as_json(board))
    return data


def _dashboard(board: Board) -> grafana.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags([TAG])
        .editable()
        .tooltip(grafana.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("Caesura")
            .type(grafana.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        built = built.with_variable(_choice(variable))
    identifier = 0
    for row in board.rows:
        identifier += 1
        built = built.with_row(dashboard.Row(row.title).id(identifier))
        for panel in row.panels:
            identifier += 1
            built = built.with_panel(_panel(panel).id(identifier))
    return built.build()


def _choice(variable: Variable) -> dashboard.QueryVariable:
    label, query, taken = CHOICES[variable]
    choice = (
        dashboard.QueryVariable(variable.value)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(grafana.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(grafana.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(ALL)
        .multi(True)
        .current(grafana.VariableOption(selected=True, text="All", value="$__all"))
    )
    return choice.regex(taken) if taken else choice


def _panel(panel: Panel) -> Any:
    builder = _shaped(panel)
    builder = (
        builder.title(panel.title)
        .description(panel.text)
        .unit(panel.unit.value)
        .datasource(DATASOURCE)
        .span(panel.width)
        .height(HEIGHT)
        .thresholds(_thresholds(panel))
    )
    for index, query in enumerate(panel.queries):
        builder = builder.with_target(_target(query, chr(ord("A") + index), panel.shape))
    return builder


def _shaped(panel: Panel) -> Any:
    match panel.shape:
        case Shape.NUMBER:
            bounded = panel.good_from is not None or panel.bad_from is not None
            return (
                stat.Panel()
                .reduce_options(_newest())
                .graph_mode(drawn.BigValueGraphMode.AREA)
                .color_mode(drawn.BigValueColorMode.VALUE if bounded else drawn.BigValueColorMode.NONE)
            )
        case Shape.BARS:
            return (
                bargauge.Panel()
                .reduce_options(_newest())
                .orientation(drawn.VizOrientation.HORIZONTAL)
                .display_mode(drawn.BarGaugeDisplayMode.BASIC)
                .min(0)
            )
        case Shape.HEAT:
            return (
                heatmap.Panel()
                .calculate(False)
                .y_axis(heatmap.YAxisConfig().unit(panel.unit.value))
                .color(heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
            )
        case Shape.LINES | Shape.STACKED:
            return _lines(stacked=panel.shape is Shape.STACKED)


def _lines(*, stacked: bool) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(60 if stacked else 8)
        .show_points(drawn.VisibilityMode.NEVER)
        .span_nulls(False)
        .tooltip(common.VizTooltipOptions().mode(drawn.TooltipDisplayMode.MULTI).sort(drawn.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(drawn.LegendDisplayMode.LIST)
            .placement(drawn.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    return panel.stacking(common.StackingConfig().mode(drawn.StackingMode.NORMAL)) if stacked else panel


def _newest() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [grafana.Threshold(None, PLAIN)]
    if panel.good_from is not None:
        steps = [grafana.Threshold(None, RED), grafana.Threshold(panel.good_from, GREEN)]
    if panel.bad_from is not None:
        steps = [grafana.Threshold(None, GREEN), grafana.Threshold(panel.bad_from, RED)]
    return dashboard.ThresholdsConfig().mode(grafana.ThresholdsMode.ABSOLUTE).steps(steps)


def _target(query: Query, ref_id: str, shape: Shape) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expression).ref_id(ref_id).datasource(DATASOURCE)
    if query.legend:
        target = target.legend_format(query.legend)
    if shape is Shape.HEAT:
        return target.range().format(asked.PromQueryFormat.HEATMAP)
    return target.range() if shape in (Shape.LINES, Shape.STACKED, Shape.NUMBER) else target.instant()
