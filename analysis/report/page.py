"""The report page: one file with its own script, so it opens without a network."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

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

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.5em;margin:0 0 .6em}h2{font-size:1.1em;margin:1.6em 0 .4em}
dl{display:flex;flex-wrap:wrap;gap:.5em;margin:0}
dl div{background:#f3f5f7;border-radius:6px;padding:.3em .8em}
dt{font-size:.75em;color:#667}dd{margin:0;font-weight:600}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25em .9em;text-align:right;border-bottom:1px solid #e2e5e8}
th{font-weight:600;color:#556;font-size:.85em}td:first-child,th:first-child{text-align:left;padding-left:0}
ul{padding-left:1.1em;margin:.4em 0}pre{margin:0;font:inherit;white-space:pre-wrap}
.note{color:#667;font-size:.9em;max-width:52em}
.degraded{background:#fdf1f0;border-left:4px solid #c0392b;padding:.4em .9em;margin:.5em 0}
"""
HITS = (
    "Prefix cache hit, of all prompt tokens. Ideal: what one local cache without end would find of "
    "this run's own text. Predicted: what the proxy expected when it chose. Engines: what they "
    "counted, their own caches' hits and the KV that peers sent. A peer has just computed that KV, "
    "no cache had it: only the engines' own hits compare with the ideal."
)
DRAWING = {"displaylogo": False, "displayModeBar": False}


def page(summary: Mapping[str, Any], requests: pd.DataFrame) -> str:
    """Write the page of one run; `requests` in the target's own time, as `analysis.runs` gives."""
    title = escape(f"Replay of {setting(summary)['trace']}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{''.join(_body(summary))}"
        f"{''.join(_drawings(requests))}</body></html>\n"
    )


def _body(summary: Mapping[str, Any]) -> Iterator[str]:
    boxes = setting(summary).items()
    yield "<dl>"
    yield from (f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in boxes)
    yield "</dl>"
    if (scale := time_scale(summary)) != 1:
        yield _note(
            f"The target ran {scale:g} times faster than what it stands for. Every figure here is "
            f"in its own time: one second measured is {scale:g} seconds. Only schedule lag is real."
        )
    for warning in summary.get("degraded", ()):
        yield f"<p class='degraded'>degraded: {escape(warning)}</p>"
    yield f"<h2>Latency of ok requests, {escape(unit(summary))}</h2>"
    tags = (*METRICS, FAILURES_AS_INF)
    yield _table(("", "n", *COLUMNS), (latency_cells(summary, tag) for tag in tags))
    if summary.get("by_route_class"):
        yield f"<h2>By route class, {escape(unit(summary))}</h2>"
        yield _table(("", *class_columns()), class_cells(summary))
    yield "<h2>What else it shows</h2><ul>"
    yield from (f"<li><pre>{escape(line.strip())}</pre></li>" for line in findings(summary))
    yield f"</ul>{_note(HITS)}"


def _drawings(requests: pd.DataFrame) -> Iterator[str]:
    for index, figure in enumerate(figures(requests)):
        yield figure.to_html(full_html=False, include_plotlyjs=index == 0, config=DRAWING)


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f"<table><tr>{names}</tr>{rows}</table>"


def write_html(folder: Path, summary: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write `report.html`, a page that needs no network."""
    # Drawing libraries are loaded here and not above: printing a table must not wait for them.
    from analysis.runs import table

    text = page(summary, table(rows, time_scale(summary)))
    (folder / "report.html").write_text(text, encoding="utf-8")
