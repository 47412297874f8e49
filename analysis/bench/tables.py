"""The tables of experiments: one way to make a table, a cell and a line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 210
"""Columns of the widest table; none is ever cut or wrapped, even if the terminal is narrower."""


def table(
    title: str | None, columns: Sequence[str], left: int = 1, *, boxed: bool = False
) -> Table:
    """Make an empty table; its first `left` columns are text, the others numbers."""
    box = HEAVY_HEAD if boxed else SIMPLE_HEAD
    made = Table(title=title, title_justify="left", box=box, pad_edge=boxed)
    for at, name in enumerate(columns):
        made.add_column(name, justify="left" if at < left else "right", no_wrap=True)
    return made


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """Write a figure: "-" where there is none, "inf" where a failure decides it."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value * factor:,.{digits}f}" if math.isfinite(value) else "inf"


def say(console: Console, text: str) -> None:
    """Print a line as it is, of any length."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
