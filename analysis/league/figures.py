"""The league's figures, one per load: every policy's goodput and TTFT p90, a column per regime.

PNG needs kaleido, plotly's renderer, and a Chrome or Chromium; without them only HTML is written,
and the list of written files says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analysis.league.summary import summarise
from analysis.rivals.registry import DEFAULT


def write_figures(folder: Path, rows: Sequence[dict[str, Any]], title: str) -> list[str]:
    """Write the figures; returns the paths written, and a note for each PNG that was not."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = [one for one in summarise(rows) if one["perturb"] == "none"]
    written = []
    for load in sorted({one["load"] for one in summary}):
        figure = draw([one for one in summary if one["load"] == load], f"{title}, load {load:g}")
        path = folder / f"league-load-{load:g}.html"
        figure.write_html(path, include_plotlyjs=True)
        written += [str(path), _png(figure, path.with_suffix(".png"))]
    return written


def _png(figure: Any, path: Path) -> str:
    try:
        figure.write_image(path, width=1400, height=900)
    except (ValueError, RuntimeError) as error:
        # ValueError: plotly without kaleido; RuntimeError: kaleido without a browser.
        first = next((line for line in str(error).splitlines() if line), type(error).__name__)
        return f"(no {path.name}: {first})"
    return str(path)


def draw(summary: list[dict[str, Any]], title: str) -> Any:
    """Draw one load: bars of goodput and TTFT p90 with their intervals, a column per regime."""
    regimes = list(dict.fromkeys(one["regime"] for one in summary))
    names = [f"{regime}: {what}" for what in ("goodput", "TTFT p90, s") for regime in regimes]
    figure = make_subplots(rows=2, cols=len(regimes), subplot_titles=names)
    for column, regime in enumerate(regimes, start=1):
        part = [one for one in summary if one["regime"] == regime]
        figure.add_trace(_bars(part, "goodput_ratio"), row=1, col=column)
        figure.add_trace(_bars(part, "ttft_s.p90"), row=2, col=column)
    figure.update_yaxes(type="log", row=2)
    figure.update_layout(title=title, showlegend=False, template="plotly_white", height=900)
    return figure


def _bars(part: list[dict[str, Any]], name: str) -> Any:
    means = [one[name][0] for one in part]
    return go.Bar(
        x=[one["policy"] for one in part],
        y=means,
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [one[name][2] - mean for one, mean in zip(part, means, strict=True)],
            "arrayminus": [mean - one[name][1] for one, mean in zip(part, means, strict=True)],
        },
        marker_color=["#d62728" if one["policy"] == DEFAULT else "#7f7f7f" for one in part],
    )
