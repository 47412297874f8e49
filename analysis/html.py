"""The report page: one file with its own script, so it opens without a network."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from analysis.metrics import METRICS
from analysis.report import COLUMNS, FAILURES_AS_INF, TITLE_AS_INF, facts, milliseconds

ALL = "all"
COLOURS = {
    "all": "#555555",
    "WARM": "#2a9d8f",
    "MEDIUM": "#e9a23b",
    "HEAVY_P2P": "#7b4fd0",
    "HEAVY_COLO": "#d1495b",
}
OTHER_COLOUR = "#3a7ca5"
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;"
    "color:#222}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child{text-align:left}.degraded{color:#a33}"
)


def page(summary: Mapping[str, Any], requests: pd.DataFrame) -> str:
    """Write the page of one run."""
    ok = requests[requests["outcome"] == "ok"]
    figures = [*(cdf(ok, tag) for tag in LATENCIES), timeline(requests), in_flight(requests)]
    parts = [
        figure.to_html(full_html=False, include_plotlyjs=index == 0)
        for index, figure in enumerate(figures)
    ]
    title = escape(f"replay of {summary.get('trace')}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{''.join(_facts(summary))}"
        f"{_table(summary)}{''.join(parts)}</body></html>\n"
    )


def by_class(requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield all requests, then those of each route class."""
    yield ALL, requests
    for name, members in requests.groupby("route_class"):
        yield str(name), members


def cdf(ok: pd.DataFrame, tag: str) -> go.Figure:
    """Draw the cumulative distribution of one metric, by route class."""
    metric = METRICS[tag]
    figure = go.Figure()
    for name, members in by_class(ok):
        values = members[tag].dropna().sort_values()
        if len(values):
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            colour = COLOURS.get(name, OTHER_COLOUR)
            label = f"{name} ({len(values)})"
            line = {"shape": "hv", "color": colour}
            figure.add_scatter(x=values.tolist(), y=shares, name=label, mode="lines", line=line)
    figure.update_layout(
        title=f"{metric.title}: {metric.formula}", template="plotly_white", height=380
    )
    figure.update_xaxes(title=f"{metric.title}, {metric.unit}", type="log")
    figure.update_yaxes(title="share of requests that ended ok", range=[0, 1])
    return figure


def timeline(requests: pd.DataFrame) -> go.Figure:
    """Draw each request's TTFT at the time it was sent; what failed stands at its end."""
    figure = go.Figure()
    classes = (
        requests["route_class"].fillna("no class").where(requests["outcome"] == "ok", "not ok")
    )
    for name, members in requests.groupby(classes):
        waits = members["ttft_s"].fillna(members["e2e_s"])
        figure.add_scatter(
            x=members["sent_s"].tolist(),
            y=waits.tolist(),
            mode="markers",
            name=str(name),
            text=members["request_id"].tolist(),
            marker={"color": COLOURS.get(str(name), OTHER_COLOUR), "size": 7, "opacity": 0.75},
        )
    figure.update_layout(title="TTFT over the run", template="plotly_white", height=420)
    figure.update_xaxes(title="sent, s from the start")
    figure.update_yaxes(title="TTFT, s", type="log")
    return figure


def in_flight(requests: pd.DataFrame) -> go.Figure:
    """Draw how many requests were open over time."""
    sent = requests.dropna(subset=["sent_s", "end_s"])
    steps = pd.concat([pd.Series(1, index=sent["sent_s"]), pd.Series(-1, index=sent["end_s"])])
    steps = steps.sort_index().cumsum()
    figure = go.Figure()
    figure.add_scatter(
        x=steps.index.tolist(), y=steps.tolist(), mode="lines", line={"shape": "hv"}, name="open"
    )
    figure.update_layout(title="Requests in flight", template="plotly_white", height=300)
    figure.update_xaxes(title="s from the start")
    return figure


def _facts(summary: Mapping[str, Any]) -> Iterator[str]:
    for line in facts(summary):
        yield f"<p>{escape(line)}</p>"
    for warning in summary.get("degraded", ()):
        yield f"<p class='degraded'>degraded: {escape(warning)}</p>"


def _table(summary: Mapping[str, Any]) -> str:
    names = {tag: metric.title for tag, metric in METRICS.items()}
    names[FAILURES_AS_INF] = TITLE_AS_INF
    head = "".join(f"<th>{column}</th>" for column in ("ms", "n", *COLUMNS))
    lines = []
    for tag, title in names.items():
        spread = summary.get(tag) or {}
        cells = [str(spread.get("count", 0)), *(milliseconds(spread.get(c)) for c in COLUMNS)]
        row = "".join(f"<td>{escape(cell)}</td>" for cell in (title, *cells))
        lines.append(f"<tr>{row}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
