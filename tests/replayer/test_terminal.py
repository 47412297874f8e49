"""What clients and servers wrote is text on a terminal, and nothing else; long work speaks."""

from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from analysis.report.summary import summarise
from analysis.report.tables import print_report
from replayer.terminal import IDLE, Terminal, Working, printable
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


class Heard(io.StringIO):
    """A file that knows when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def flush(self) -> None:
        self.heard.set()


def test_long_work_says_what_it_does_and_how_much_is_done() -> None:
    file = Heard()
    with Working("validate", "reading", file, first_s=0.001) as working:
        assert file.heard.wait(60)
        for number in working.over(range(1234), "rows\x1b", 5000):
            if number == 1200:
                file.heard.clear()
                assert file.heard.wait(60)
    said = [line.rpartition(", ")[0] for line in file.getvalue().splitlines()]
    assert said[0] == "validate: reading"
    assert "validate: rows\\x1b, 1,200 of 5,000" in said


def test_work_of_an_unknown_number_and_none_at_all() -> None:
    working = Working("export")
    assert list(working.over("abc", "rows")) == ["a", "b", "c"]
    assert working.line(75.2) == "export: rows, 3, 75 s"
    working.at("the page")
    assert working.line(1.0) == "export: the page, 1 s"


def test_short_work_and_work_that_nobody_waits_for_are_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Working("export"):
        pass
    assert list(IDLE.over([1], "rows")) == [1]
    assert capsys.readouterr().err == ""


def test_a_closed_standard_error_ends_no_work() -> None:
    class Closed(Heard):
        def write(self, _text: str) -> int:
            self.heard.set()
            raise BrokenPipeError

    file = Closed()
    with Working("export", "rows", file, first_s=0.001) as working:
        assert file.heard.wait(60)
    assert working.line(0.0) == "export: rows, 0 s"
