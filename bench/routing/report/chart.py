"""The bar chart of mean TTFT, as SVG: light or dark as the reader's browser is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from analysis.measures import grouped
from bench.routing.report.published import DEFAULT, NAMES, Comparison, seconds

TITLE = (
    "Mean time to first token, recorded coding sessions on simulated engines, in s: "
    "shorter is better"
)
LABELS_WIDTH, PANEL_WIDTH, BAR_WIDTH = 176, 224, 170
"""Of the systems' names, of a panel, and of its longest bar."""
TOP, PANEL_TOP, ROW_HEIGHT, BAR_HEIGHT, GAP = 40, 30, 22, 14, 18
"""Heights: of the title, of a panel's head, of a system's row, of its bar, between rows of panels.
"""
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .head { font-weight: 600 }
  .bar { fill: #8c959f }
  .ours { fill: #1a7f5a }
  text.ours { fill: #1f2328; font-weight: 600 }
  line { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    text, text.ours { fill: #e6edf3 }
    .bar { fill: #6e7681 }
    .ours { fill: #3fb68b }
    line { stroke: #3d444d }
  }
"""


def svg(made: Sequence[Comparison]) -> str:
    """A panel per comparison that has every system, a row of panels per fleet."""
    whole = [one for one in made if one.is_whole]
    fleets = grouped(whole, lambda one: one.shape)
    longest_s = max((_mean(one, name) for one in whole for name in NAMES), default=1.0)
    height = PANEL_TOP + ROW_HEIGHT * len(NAMES) + GAP
    parts = [_fleet(row, TOP + height * at, longest_s) for at, row in enumerate(fleets.values())]
    width = LABELS_WIDTH + PANEL_WIDTH * max(map(len, fleets.values()), default=1)
    return _document(width, TOP + height * len(fleets), parts)


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(TITLE)}">',
            f"<title>{escape(TITLE)}</title>",
            f"<style>{STYLE}</style>",
            f'<text class="title" x="0" y="18">{escape(TITLE)}</text>',
            *parts,
            "</svg>\n",
        )
    )


def _fleet(row: Sequence[Comparison], top: int, longest_s: float) -> str:
    """The names of the systems, and a panel per load."""
    lines = []
    for at, (system, name) in enumerate(NAMES.items()):
        y = top + PANEL_TOP + ROW_HEIGHT * at + BAR_HEIGHT - 3
        ours = ' class="ours"' if system == DEFAULT else ""
        lines.append(f'<text{ours} x="{LABELS_WIDTH - 12}" y="{y}" text-anchor="end">{name}</text>')
    lines += [
        _panel(one, LABELS_WIDTH + PANEL_WIDTH * at, top, longest_s) for at, one in enumerate(row)
    ]
    return "\n".join(lines)


def _panel(one: Comparison, left: int, top: int, longest_s: float) -> str:
    foot = top + PANEL_TOP + ROW_HEIGHT * len(NAMES)
    lines = [
        f'<text class="head" x="{left}" y="{top + 16}">{one.fleet}, {one.load} load</text>',
        f'<line x1="{left}" x2="{left}" y1="{top + PANEL_TOP - 4}" y2="{foot}"/>',
    ]
    for at, system in enumerate(NAMES):
        value = _mean(one, system)
        y = top + PANEL_TOP + ROW_HEIGHT * at
        bar = round(BAR_WIDTH * value / longest_s, 1)
        kind = "ours" if system == DEFAULT else "bar"
        ours = ' class="ours"' if system == DEFAULT else ""
        lines.append(
            f'<rect class="{kind}" x="{left}" y="{y}" width="{bar}" height="{BAR_HEIGHT}"/>'
        )
        lines.append(
            f'<text{ours} x="{round(left + bar + 6, 1)}" y="{y + BAR_HEIGHT - 3}">'
            f"{seconds(value)}</text>"
        )
    return "\n".join(lines)


def _mean(one: Comparison, system: str) -> float:
    return one.systems[system]["ttft_mean_s"]
