"""The report page: `report.html`, one file with its own script, which needs no network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.measures import METRICS
from analysis.report.plots import figures
from analysis.report.tables import (
    COLUMNS,
    FAILURES_AS_INF,
    class_cells,
    class_columns,
    findings,
    latency_cells,
    setting,
    time_scale,
    unit,
)
from analysis.runs import table

TEMPLATES = Environment(
    loader=PackageLoader("analysis", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
PLOTLY_CONFIG = {"displaylogo": False, "displayModeBar": False}


def write_html(folder: Path, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write `report.html` into a run's folder; `rows` are those of `requests.jsonl`."""
    text = page(summary, table(rows, time_scale(summary)))
    (folder / "report.html").write_text(text, encoding="utf-8")


def page(summary: Mapping[str, Any], requests: pd.DataFrame) -> str:
    """Render the page of one run; `requests` as `analysis.runs.table` makes them."""
    drawings = [
        Markup(figure.to_html(full_html=False, include_plotlyjs=at == 0, config=PLOTLY_CONFIG))
        for at, figure in enumerate(figures(requests))
    ]
    return TEMPLATES.get_template("page.html").render(
        title=f"Replay of {setting(summary)['trace']}",
        setting=setting(summary),
        time_scale=time_scale(summary),
        unit=unit(summary),
        degraded=summary.get("degraded", ()),
        latency_head=("", "n", *COLUMNS),
        latency=[latency_cells(summary, tag) for tag in (*METRICS, FAILURES_AS_INF)],
        class_head=("", *class_columns()),
        classes=list(class_cells(summary)),
        findings=[line.strip() for line in findings(summary)],
        drawings=drawings,
    )
