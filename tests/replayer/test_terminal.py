"""What clients and servers wrote is text on a terminal, and nothing else."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from analysis.report.summary import summarise
from analysis.report.tables import print_report
from replayer.terminal import Terminal, printable
from tests.support.runs import failed, placed

EVIL = "\x1b]0;PWNED\x07\x1b[31m\x9b2J\u202e\u200b\r\x08[/nosuch][red]x[/red]"


def shown(*rows: dict[str, object]) -> str:
    out = io.StringIO()
    print_report(summarise({"notes": [EVIL]}, rows), Terminal(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize("name", ["error", "request_id", "route_class", "policy", "outcome"])
def test_a_report_of_rows_with_control_sequences(name: str) -> None:
    fields = {"outcome": "bad_request", "status": 404, "error": EVIL} | {name: EVIL}
    text = shown(placed("a", **{name: EVIL} if name == "request_id" else {}), failed("b", **fields))
    assert text.replace("\n", "").isprintable()
    assert "\\x1b]0;PWNED" in text
    assert "\\x1b[31m" in text
    assert "[/nosuch][red]x[/red]" in text, "no markup either"


def test_a_cell_of_a_table() -> None:
    out, table = io.StringIO(), Table()
    table.add_column(EVIL)
    table.add_row(EVIL)
    Terminal(file=out, width=200).print(table)
    assert out.getvalue().replace("\n", "").isprintable()


def test_its_own_colours_stay() -> None:
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, color_system="standard", highlight=False)
    console.print("x\x1b[31m", style="red")
    assert out.getvalue() == "\x1b[31mx\\x1b[31m\x1b[0m\n"


@given(st.text())
def test_all_is_printable_but_line_ends(text: str) -> None:
    assert printable(text).replace("\n", "").isprintable()
    assert printable(text) == text or not text.isprintable()
