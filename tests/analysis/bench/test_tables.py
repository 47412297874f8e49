"""Tables, cells and lines."""

import io
import math

from rich.console import Console

from analysis.bench.tables import number, say, table


def test_a_figure_is_written_as_it_is_known() -> None:
    assert number(1234.56, 1) == "1,234.6"
    assert number(0.5, 0, 100.0) == "50"
    assert [number(one, 2) for one in (None, math.nan, math.inf)] == ["-", "-", "inf"]


def test_names_are_on_the_left_and_figures_on_the_right() -> None:
    made = table("what", ["name", "one", "two"])
    assert [column.justify for column in made.columns] == ["left", "right", "right"]
    assert all(column.no_wrap for column in made.columns)


def test_a_line_is_neither_wrapped_nor_markup() -> None:
    out = io.StringIO()
    say(Console(file=out, width=10), "[bold] " + "x" * 30)
    assert out.getvalue() == "[bold] " + "x" * 30 + "\n"
