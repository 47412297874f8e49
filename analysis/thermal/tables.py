"""The tables of `analyze thermal`, and a figure per scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.tables import table
from analysis.measures import grouped
from analysis.thermal.harness import HOT_CELSIUS, RECORDED, HarnessSecond
from analysis.thermal.scenarios import SETTLED_CELSIUS
from replayer.virtual.heated import HeatedSecond

NOT_VALIDATED = "A simulated plant: not hardware validated."
COLUMNS: tuple[tuple[str, str, float, int], ...] = (
    ("peak C", "peak_celsius", 1.0, 1),
    ("above s", "above_s", 1.0, 0),
    ("settled %", "settled_ratio", 100.0, 0),
    ("overshoots", "overshoots", 1.0, 0),
    ("directions", "directions", 1.0, 0),
    ("tok/s", "throughput_tps", 1.0, 0),
    ("TTFT p50 s", "ttft_p50_s", 1.0, 1),
    ("p99 s", "ttft_p99_s", 1.0, 1),
    ("ended", "ended", 1.0, 0),
    ("of", "requests", 1.0, 0),
    ("evicted", "evictions", 1.0, 0),
    ("W/seq", "watts_per_seq", 1.0, 2),
)
HARNESS_COLUMNS: tuple[tuple[str, str, float, int], ...] = (
    ("peak C", "peak_celsius", 1.0, 2),
    ("above s", "above_s", 1.0, 0),
    ("p99 ms", "p99_ms", 1.0, 0),
    ("batch", "batch", 1.0, 1),
    ("tok/s", "throughput_tps", 1.0, 0),
    ("directions", "directions", 1.0, 0),
)
HARNESS_NAMES = ("its baseline", "its own rule")


def print_scenarios(
    rows: Sequence[Mapping[str, Any]], target_celsius: float, console: Console
) -> None:
    """Print a table per scenario: the baseline and each law, means over seeds."""
    console.print(
        f"above: seconds at {target_celsius + SETTLED_CELSIUS:g} C or more. settled: share of the "
        f"settled time within {SETTLED_CELSIUS:g} C of the target of {target_celsius:g} C. "
        f"directions: direction changes of the cap. {NOT_VALIDATED}",
        soft_wrap=True,
    )
    for name, part in grouped(rows, itemgetter("scenario")).items():
        made = table(f"{name}: {part[0]['what']}", ["law", *(title for title, *_rest in COLUMNS)])
        for law, same in grouped(part, itemgetter("law")).items():
            made.add_row(law, *(_mean(same, *column[1:]) for column in COLUMNS))
        console.print(made)


def _mean(rows: Sequence[Mapping[str, Any]], name: str, factor: float, digits: int) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{sum(values) / len(values) * factor:,.{digits}f}" if values else "-"


def print_harness(rows: Sequence[Mapping[str, Any]], seconds: int, console: Console) -> None:
    """Print the harness's rows as it prints them, as computed here, and ours."""
    console.print(
        f"The harness's plant and load over {seconds} s. above: seconds at {HOT_CELSIUS:g} C or "
        f"more; 81 of them are its burst, whose heat no batch changes. Its p99 is a mean of "
        f"modelled values. {NOT_VALIDATED}",
        soft_wrap=True,
    )
    made = table(None, ["control", *(title for title, *_rest in HARNESS_COLUMNS)])
    for name, recorded in zip(HARNESS_NAMES, RECORDED, strict=True):
        shown = [_mean([recorded], *column[1:]) for column in HARNESS_COLUMNS]
        made.add_row(f"{name}, as it prints it (180 s)", *shown)
    for row in rows:
        name = {"none": HARNESS_NAMES[0], "harness": HARNESS_NAMES[1]}.get(
            row["law"], f"ours, law {row['law']}"
        )
        made.add_row(name, *(_mean([row], *column[1:]) for column in HARNESS_COLUMNS))
    console.print(made)


Line = Sequence[tuple[float, float]]


def lines_of(seconds: Sequence[HeatedSecond]) -> tuple[Line, Line]:
    """Temperature and running requests over time."""
    return (
        [(one.at_s, one.celsius) for one in seconds],
        [(one.at_s, float(one.running)) for one in seconds],
    )


def harness_lines(seconds: Sequence[HarnessSecond]) -> tuple[Line, Line]:
    """The lines of a run of the harness, for a figure."""
    return (
        [(float(one.at_s), one.celsius) for one in seconds],
        [(float(one.at_s), float(one.batch)) for one in seconds],
    )


def write_figure(
    path: Path, title: str, runs: Mapping[str, tuple[Line, Line]], limit_celsius: float
) -> str:
    """Write an HTML page with temperature and running requests of each run, and return its path."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=("hottest GPU, degrees Celsius", "running requests"),
    )
    colors = ("#999999", "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")
    for number, (name, lines) in enumerate(runs.items()):
        for row, line in enumerate(lines, 1):
            figure.add_trace(
                go.Scatter(
                    x=[at_s for at_s, _value in line],
                    y=[value for _at_s, value in line],
                    name=name,
                    legendgroup=name,
                    showlegend=row == 1,
                    line={"color": colors[number % len(colors)], "width": 1.5},
                ),
                row=row,
                col=1,
            )
    figure.add_hline(y=limit_celsius, line_dash="dot", row=1, col=1)
    figure.update_layout(title=f"{title}. {NOT_VALIDATED}", template="plotly_white", height=700)
    figure.update_xaxes(title="virtual seconds", row=2, col=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs="cdn")
    return str(path)
