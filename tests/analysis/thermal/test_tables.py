"""Tables and figures of thermal control."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from analysis.thermal.harness import BASELINE, no_control, run_harness
from analysis.thermal.tables import (
    NOT_VALIDATED,
    harness_lines,
    lines_of,
    print_scenarios,
    write_figure,
)
from replayer.virtual.heated import HeatedSecond


def test_a_figure_says_that_it_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.html"
    runs = {"none": harness_lines(run_harness(BASELINE, no_control, 40))}
    assert write_figure(path, "A run", runs, 85.0) == str(path)
    page = path.read_text("utf-8")
    assert NOT_VALIDATED in page
    assert "running requests" in page


def test_lines_are_temperature_and_running_requests() -> None:
    seconds = [HeatedSecond(1.0, 70.5, 300.0, 12, 3, None, "NORMAL", 100)]
    assert lines_of(seconds) == ([(1.0, 70.5)], [(1.0, 12.0)])


def test_means_over_seeds_and_a_dash_for_what_is_unknown() -> None:
    out = StringIO()
    rows = [
        {"scenario": "x", "what": "why", "law": "none", "peak_celsius": peak, "settled_ratio": None}
        for peak in (80.0, 90.0)
    ]
    print_scenarios(rows, 82.0, Console(file=out, width=140))
    assert "85.0" in out.getvalue()
    assert NOT_VALIDATED in out.getvalue()
    assert "x: why" in out.getvalue()
