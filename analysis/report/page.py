"""The report page: `report.html`, one file with its own script, which needs no network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from analysis.bench.phases import PHASES
from analysis.measures import METRICS
from analysis.report.plots import figures, phase_bars, waterfall
from analysis.report.tables import (
    COLUMNS,
    FAILURES_AS_INF,
    PHASES_TITLE,
    PREDICTED_HEAD,
    PREDICTED_TITLE,
    class_cells,
    class_columns,
    findings,
    latency_cells,
    phase_cells,
    predicted_cells,
    setting,
    time_scale,
    title,
    unit,
)
from analysis.report.verdict import verdict
from analysis.runs import table
from replayer.arguments import replace_file

TEMPLATES = Environment(
    loader=PackageLoader("analysis", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
PLOTLY_CONFIG = {"displaylogo": False, "displayModeBar": False}


def write_html(path: Path, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the page of a run; `rows` are those of `requests.jsonl`. Raises OSError."""
    replace_file(path, page(summary, table(rows, time_scale(summary))).encode())


def page(summary: Mapping[str, Any], requests: pd.DataFrame) -> str:
    """Render the page of one run; `requests` as `analysis.runs.table` makes them."""
    phases = summary.get("phases")
    drawn = [phase_bars(phases), waterfall(summary["slowest"])] if phases else []
    drawings = [
        Markup(figure.to_html(full_html=False, include_plotlyjs=at == 0, config=PLOTLY_CONFIG))
        for at, figure in enumerate((*drawn, *figures(requests)))
    ]
    return TEMPLATES.get_template("page.html").render(
        title=title(summary),
        verdict=verdict(summary),
        setting=setting(summary),
        time_scale=time_scale(summary),
        unit=unit(summary),
        degraded=summary.get("degraded", ()),
        latency_head=("", "n", *COLUMNS),
        latency=[latency_cells(summary, tag) for tag in (*METRICS, FAILURES_AS_INF)],
        class_head=("", *class_columns()),
        classes=list(class_cells(summary)),
        phases_title=PHASES_TITLE,
        phases=phase_cells(summary) if phases else (),
        definitions={name.replace("_", " "): text for name, text in PHASES.items()},
        predicted_title=PREDICTED_TITLE,
        predicted_head=PREDICTED_HEAD,
        predicted=list(predicted_cells(summary)) if phases else (),
        findings=[line.strip() for line in findings(summary)],
        drawings=drawings,
    )
