"""The plots of a run: distributions by route class, and the run over time.

Latencies are in milliseconds, times since the start in seconds; both in the target's time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from analysis.bench.phases import PHASES
from analysis.measures import METRICS

ALL = "all"
NO_CLASS = "no class"
NOT_OK = "not ok"
COLOURS = {
    ALL: "#444444",
    "WARM": "#2a9d8f",
    "MEDIUM": "#e9a23b",
    "HEAVY_P2P": "#7b4fd0",
    "HEAVY_COLO": "#d1495b",
    NOT_OK: "#111111",
}
OTHER_COLOUR = "#3a7ca5"
PHASE_COLOURS = {
    "decide": "#9aa5b1",
    "queue": "#d1495b",
    "prefill_leg": "#7b4fd0",
    "decode_wait": "#e76f51",
    "transfer": "#e9a23b",
    "first_token": "#3a7ca5",
    "stream": "#cfe3dd",
}
STEPS = (1, 2, 5)  # labelled ticks per decade
LOG_FROM_RATIO = 5  # largest to smallest value from which on an axis is logarithmic
LAYOUT = {
    "template": "plotly_white",
    "font": {"family": "system-ui,sans-serif", "size": 13, "color": "#222"},
    "margin": {"l": 64, "r": 20, "t": 48, "b": 52},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
    "title": {"x": 0, "xref": "paper", "font": {"size": 16}},
}


def figures(requests: pd.DataFrame) -> Iterator[go.Figure]:
    """Draw all plots of the page, in its order."""
    ok = requests[requests["outcome"] == "ok"]
    for tag in ("ttft_s", "tpot_s", "e2e_s"):
        yield cdf(ok, tag)
    yield timeline(requests)
    yield in_flight(requests)


def phase_bars(classes: Mapping[str, Any]) -> go.Figure:
    """Draw the mean time of each phase, a bar for each route class; `classes`: the summary's."""
    names = sorted(classes, key=_rank, reverse=True)
    figure = go.Figure()
    for phase in PHASES:
        spreads = [classes[name]["time_s"][phase] for name in names]
        _add_bars(
            figure,
            phase,
            [f"{name} ({classes[name]['requests']})" for name in names],
            [one["mean"] for one in spreads],
            [f"p90 {one['p90'] * 1e3:,.1f} ms" for one in spreads],
        )
    return _stacked(figure, "Where the time went: mean by route class", len(names))


def waterfall(slowest: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Draw the phases of the requests that waited longest, the slowest on top."""
    shown = slowest[::-1]
    # Numbered, as an id may occur twice, and bars of one name would be one bar.
    names = [f"{one['request_id']} #{len(shown) - at}" for at, one in enumerate(shown)]
    notes = [f"{one['route_class'] or NO_CLASS}, {one['outcome']}" for one in shown]
    figure = go.Figure()
    for phase in PHASES:
        times_s = [one["phases_s"].get(phase, 0.0) for one in shown]
        _add_bars(figure, phase, names, times_s, notes)
    title = f"The {len(shown)} requests that waited longest for a first token"
    return _stacked(figure, title, len(names))


def _add_bars(
    figure: go.Figure, phase: str, names: list[str], times_s: list[float], notes: list[str]
) -> None:
    figure.add_bar(
        orientation="h",
        name=phase.replace("_", " "),
        y=names,
        x=[seconds * 1e3 for seconds in times_s],
        customdata=notes,
        marker={"color": PHASE_COLOURS[phase]},
        hovertemplate="%{y}: %{x:,.1f} ms, %{customdata}",
    )


def _stacked(figure: go.Figure, title: str, bars: int) -> go.Figure:
    """Lay out stacked horizontal bars, with the legend between title and bars."""
    figure.update_layout(LAYOUT, title_text=title, barmode="stack", height=150 + 26 * bars)
    figure.update_layout(title={"yref": "container", "y": 0.97}, margin={"t": 84})
    figure.update_layout(legend={"traceorder": "normal"})
    figure.update_xaxes(title="ms from the proxy's receipt")
    figure.update_yaxes(automargin=True)
    return figure


def by_class(requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield all requests, then those of each route class, in the order of COLOURS."""
    yield ALL, requests
    classes = dict(iter(requests.groupby("route_class")))
    for name in sorted(classes, key=_rank):
        yield str(name), classes[name]


def cdf(ok: pd.DataFrame, tag: str) -> go.Figure:
    """Draw the cumulative distribution of one metric, by route class."""
    metric = METRICS[tag]
    figure = go.Figure()
    for name, members in by_class(ok):
        values = (members[tag].dropna() * 1e3).sort_values().tolist()
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        figure.add_scatter(
            x=values,
            y=shares,
            name=f"{name} ({len(values)})",
            mode="lines",
            line={"shape": "hv", "color": COLOURS.get(name, OTHER_COLOUR), "width": 2},
            hovertemplate="%{y:.0%} up to %{x:.1f} ms",
        )
    figure.update_layout(LAYOUT, title_text=metric.title, height=360)
    figure.update_xaxes(title=f"{metric.title}, ms: {metric.formula}", **axis(ok[tag] * 1e3))
    figure.update_yaxes(title="share of ok requests", range=[0, 1.02], tickformat=".0%")
    return figure


def timeline(requests: pd.DataFrame) -> go.Figure:
    """Draw each request's TTFT over the time it was sent; of a failed request its duration."""
    figure = go.Figure()
    waits = requests["ttft_s"].fillna(requests["e2e_s"]) * 1e3
    classes = requests["route_class"].fillna(NO_CLASS).where(requests["outcome"] == "ok", NOT_OK)
    for name in sorted(classes.unique(), key=_rank):
        members = requests[classes == name]
        figure.add_scatter(
            x=members["sent_s"].tolist(),
            y=waits[classes == name].tolist(),
            mode="markers",
            name=str(name),
            text=members["request_id"].tolist(),
            hovertemplate="%{text}: %{y:.1f} ms, sent at %{x:.1f} s",
            marker={
                "color": COLOURS.get(str(name), OTHER_COLOUR),
                "size": 8,
                "opacity": 0.75,
                "symbol": "x" if name == NOT_OK else "circle",
            },
        )
    figure.update_layout(LAYOUT, title_text="TTFT over the run", height=400)
    figure.update_xaxes(title="sent, s from the start")
    figure.update_yaxes(title="TTFT, ms", **axis(waits))
    return figure


def in_flight(requests: pd.DataFrame) -> go.Figure:
    """Draw the number of open requests over time."""
    sent = requests.dropna(subset=["sent_s", "end_s"])
    steps = pd.concat([pd.Series(1, index=sent["sent_s"]), pd.Series(-1, index=sent["end_s"])])
    steps = steps.sort_index().cumsum()
    figure = go.Figure()
    figure.add_scatter(
        x=steps.index.tolist(),
        y=steps.tolist(),
        mode="lines",
        line={"shape": "hv", "color": OTHER_COLOUR, "width": 1.5},
        name="open",
        hovertemplate="%{y} open at %{x:.1f} s",
    )
    figure.update_layout(LAYOUT, title_text="Requests in flight", height=280)
    figure.update_xaxes(title="s from the start")
    figure.update_yaxes(title="requests", rangemode="tozero")
    return figure


def axis(values: pd.Series) -> dict[str, object]:
    """Return the axis' layout: logarithmic with numbered ticks for a wide range of values."""
    seen = values[values > 0].dropna()
    if not len(seen) or seen.max() < LOG_FROM_RATIO * seen.min():
        return {}
    low, high = float(seen.min()) / 1.1, float(seen.max()) * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [t for decade in decades for step in STEPS if low <= (t := step * 10.0**decade) <= high]
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,.10g}" for tick in ticks],
    }


def _rank(name: object) -> tuple[int, str]:
    order = list(COLOURS)
    return (order.index(str(name)) if name in order else len(order), str(name))
