"""Grafana boards from lists of panels: layout, variables, matchers, links."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as forms
from grafana_foundation_sdk.models import heatmap as heat_forms
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Labels = Mapping[str, set[str]]
"""The labels of each sample name."""
Words = Mapping[str, tuple[str, str]]
"""What a value is called, and the colour of the word."""
WIDTH = 24
SOURCE = forms.DataSourceRef(type_val="prometheus", uid="${datasource}")
FROM_LABEL = {
    "upstream": "instance",
    "prefill": "instance",
    "decode": "instance",
    "model": "model",
    "model_name": "model",
}
"""The variable that picks the values of a label."""
VARIABLES = {
    "job": ("Job", "label_values(cache_proxy_instance_healthy, job)"),
    "proxy": ("Proxy", "label_values(cache_proxy_instance_healthy, instance)"),
    "model": ("Model", "label_values(cache_proxy_backlog_seconds, model)"),
    "instance": ("Instance", "label_values(cache_proxy_instance_healthy, upstream)"),
}
EVENTS = {
    "Reloads": ("blue", "sum by (result) (increase(cache_proxy_config_reloads_total[1m])) > 0"),
    "Ejections": ("red", "cache_proxy_breaker_state == 2"),
    "Drains": ("purple", "cache_proxy_breaker_state == 5"),
}
"""Annotations of the proxy's boards: colour and expression."""


@dataclass(frozen=True)
class Panel:
    """One question and what answers it: expressions by legend, `[]` for the window of a rate."""

    title: str
    text: str
    unit: str
    page: str
    """Page of docs/, with or without a section, that says what to do."""
    queries: Mapping[str, str]
    kind: str = "lines"
    width: int = 8
    least: float | None = 0
    most: float | None = None
    steps: Sequence[tuple[float | None, str]] = ()
    """Colours from a value on; None: from the start."""
    words: Words = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Panels under one title; a closed row is for what a fleet may not have."""

    title: str
    panels: Sequence[Panel]
    is_closed: bool = False


@dataclass(frozen=True)
class Board:
    """One file of configs/grafana."""

    name: str
    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[str] = tuple(VARIABLES)
    events: Sequence[str] = tuple(EVENTS)


def rate(selector: str, by: str = "") -> str:
    """How much a counter grows per second, summed but for the labels `by`."""
    return f"sum by ({by}) (rate({selector}[]))" if by else f"sum(rate({selector}[]))"


def quantiles(name: str, by: str = "", of: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, str]:
    """Percentiles of a histogram, a legend for each."""
    kept = f"le, {by}" if by else "le"
    words = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return {
        f"{words} p{100 * part:g}".strip(): (
            f"histogram_quantile({part}, sum by ({kept}) (rate({name}_bucket[])))"
        )
        for part in of
    }


def matched(expression: str, labels: Labels) -> str:
    """The expression with a matcher for each variable that one of its series has a label for."""

    def with_matchers(found: re.Match[str]) -> str:
        name, given = found[1], found[3]
        own = ['job=~"$job"', 'instance=~"$proxy"'] if name.startswith("cache_proxy_") else []
        own += [
            f'{label}=~"${variable}"'
            for label, variable in FROM_LABEL.items()
            if label in labels.get(name, ()) and f"{label}=" not in (given or "")
        ]
        both = ", ".join([*([given] if given else []), *own])
        return f"{name}{{{both}}}" if both else name

    return re.sub(r"\b((?:cache_proxy_|vllm:)\w+)(\{([^}]*)\})?", with_matchers, expression)


def drawn(expression: str, labels: Labels) -> str:
    """The expression as Grafana gets it."""
    return matched(expression, labels).replace("[]", "[$__rate_interval]")


def _words(words: Words) -> list[forms.ValueMapping]:
    results = {
        value: forms.ValueMappingResult(text=text, color=color, index=at)
        for at, (value, (text, color)) in enumerate(words.items())
    }
    return [forms.ValueMap(options=results)]


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = looks.StackingMode.NORMAL if panel.kind == "stack" else looks.StackingMode.NONE
    return (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if panel.kind == "stack" else 5)
        .show_points(looks.VisibilityMode.NEVER)
        .stacking(common.StackingConfig().mode(stacked))
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(looks.TooltipDisplayMode.MULTI)
            .sort(looks.SortOrder.DESCENDING)
        )
    )


def _stat(_: Panel) -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return (
        stat.Panel()
        .reduce_options(last)
        .color_mode(looks.BigValueColorMode.VALUE)
        .graph_mode(looks.BigValueGraphMode.AREA)
    )


def _heat(panel: Panel) -> heatmap.Panel:
    colour = heatmap.HeatmapColorOptions().mode(heat_forms.HeatmapColorMode.SCHEME)
    axis = heatmap.YAxisConfig().unit(panel.unit)
    return heatmap.Panel().color(colour.scheme("Oranges").steps(64)).y_axis(axis)


def _timeline(_: Panel) -> statetimeline.Panel:
    return statetimeline.Panel().merge_values(True).row_height(0.8).fill_opacity(70)


def _table(panel: Panel) -> table.Panel:
    """A row for each set of labels, a column for each query, named by its legend."""
    names = {f"Value #{_ref(at)}": legend for at, legend in enumerate(panel.queries)}
    changes = {"renameByName": names | {"upstream": "instance"}, "excludeByName": {"Time": True}}
    made = table.Panel().filterable(True)
    for change, options in (("merge", {}), ("organize", changes)):
        made.with_transformation(forms.DataTransformerConfig(id_val=change, options=options))
    state = [forms.DynamicConfigValue("mappings", _words(panel.words))]
    state.append(forms.DynamicConfigValue("custom.cellOptions", {"type": "color-background"}))
    return made.override_by_name(next(iter(panel.queries)), state)


Drawn = timeseries.Panel | stat.Panel | heatmap.Panel | statetimeline.Panel | table.Panel
KINDS: Mapping[str, tuple[Callable[[Panel], Drawn], int]] = {
    "lines": (_lines, 7),
    "stack": (_lines, 7),
    "stat": (_stat, 4),
    "heat": (_heat, 7),
    "timeline": (_timeline, 7),
    "table": (_table, 9),
}
"""How each kind of panel is made, and its height."""


def _ref(at: int) -> str:
    return chr(ord("A") + at)


def _query(panel: Panel, at: int, legend: str, expression: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(_ref(at))
    if panel.kind == "heat":
        made.format(PromQueryFormat.HEATMAP)
    if panel.kind == "table":
        made.format(PromQueryFormat.TABLE).instant()
    return made.datasource(SOURCE)


def _panel(panel: Panel, number: int, labels: Labels) -> Drawn:
    make, height = KINDS[panel.kind]
    made = make(panel)
    made.id(number).title(panel.title).unit(panel.unit).datasource(SOURCE)
    made.description(f"{panel.text}\n\nWhat to do: docs/{panel.page}")
    made.height(height).span(panel.width)
    if panel.least is not None:
        made.min(panel.least)
    if panel.most is not None:
        made.max(panel.most)
    if panel.steps:
        colours = [forms.Threshold(value=value, color=color) for value, color in panel.steps]
        made.thresholds(
            dashboard.ThresholdsConfig().mode(forms.ThresholdsMode.ABSOLUTE).steps(colours)
        )
    if panel.words and panel.kind != "table":
        made.mappings(_words(panel.words))
    for at, (legend, expression) in enumerate(panel.queries.items()):
        made.with_target(_query(panel, at, legend, drawn(expression, labels)))
    return made


def _variables(board: Board) -> list[Builder[forms.VariableModel]]:
    found: list[Builder[forms.VariableModel]] = [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    ]
    for name in board.variables:
        label, query = VARIABLES[name]
        found.append(
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query({"query": query, "refId": name})
            .refresh(forms.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(forms.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    return found


def board_json(board: Board, labels: Labels) -> bytes:
    """The file's bytes; raises ValueError for lines of panels that leave a gap."""
    made = dashboard.Dashboard(board.title).uid(board.uid).description(board.text)
    made.tags(["cache-proxy", "vllm"]).refresh("10s").time("now-30m", "now").timezone("browser")
    made.editable().tooltip(forms.DashboardCursorSync.CROSSHAIR)
    made.link(
        dashboard.DashboardLink("Boards")
        .type(forms.DashboardLinkType.DASHBOARDS)
        .tags(["cache-proxy"])
        .as_dropdown(True)
        .keep_time(True)
        .include_vars(True)
    )
    for variable in _variables(board):
        made.with_variable(variable)
    for name in board.events:
        color, expression = EVENTS[name]
        made.annotation(
            dashboard.AnnotationQuery()
            .name(name)
            .datasource(SOURCE)
            .enable(True)
            .icon_color(color)
            .expr(matched(expression, labels))
        )
    number = 0
    for row in board.rows:
        if sum(panel.width for panel in row.panels) % WIDTH:
            raise ValueError(f"{board.name}: the row {row.title} leaves a gap")
        number += 1
        line = dashboard.Row(row.title).id(number).collapsed(row.is_closed)
        panels = [_panel(one, number + at, labels) for at, one in enumerate(row.panels, 1)]
        number += len(panels)
        for one in panels if row.is_closed else ():
            line.with_panel(one)
        made.with_row(line)
        for one in () if row.is_closed else panels:
            made.with_panel(one)
    text = JSONEncoder(sort_keys=True, indent=1).encode(made.build())
    return orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2) + b"\n"
