"""The rigs' fixture, and the one line that says how many rows passed."""

from __future__ import annotations

import re
import tomllib
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import figures, invariants
from tests.chaos.rig import Floor
from tests.support import turns
from tests.support.fixtures import (  # noqa: F401
    a_hiccup_of_the_machine_is_no_timeout,
    blockbuster,
)

ROWS = tomllib.loads((Path(__file__).parent / "faults.toml").read_text())["rows"]
_OUTCOMES = ("passed", "failed", "error", "xfailed", "xpassed", "skipped")
_ROW = re.compile(r"::test_f(\d+)_")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": turns.new_loop}


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[turns.Turns]:
    """No turn of the loop computes for long in the proxy (I8)."""
    with turns.timed(monkeypatch) as seen:
        yield seen
    if seen.longest_s:
        too_long = seen.too_long()
        invariants.holds("I8", not too_long, too_long)
        where, longest_s = max(seen.longest_s.items(), key=lambda item: item[1])
        place = f"{where}, {request.node.name}"
        figures.turns_s.append((longest_s, seen.bound_s, seen.slowness, place))


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Floor]:
    """Builds rigs; a row that never left one in order has shown nothing."""
    floor = Floor(tmp_path)
    yield floor
    is_to_come = request.node.get_closest_marker("xfail") is not None
    assert floor.checked or floor.failed or is_to_come, "no invariant was checked"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process hands its figures to the one that prints."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["chaos"] = {
            "lines": figures.lines,
            "turns_s": figures.turns_s,
            "flow_s": figures.flow_s,
            "counted": dict(invariants.counted),
        }


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker process has ended; one that broke has no output."""
    found = getattr(node, "workeroutput", {}).get("chaos")
    if found is not None:
        figures.lines += found["lines"]
        figures.turns_s += [tuple(turn) for turn in found["turns_s"]]
        figures.flow_s += found["flow_s"]
        invariants.counted.update(found["counted"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`N/M fault rows, K invariant checks`, and what keeps the others."""
    found: dict[int, set[str]] = defaultdict(set)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            match = _ROW.search(getattr(report, "nodeid", ""))
            if match and outcome in _OUTCOMES:
                found[int(match[1])].add(outcome)
    passed = [row for row, outcomes in found.items() if outcomes == {"passed"}]
    for line in figures.lines + figures.turns() + figures.flow():
        terminalreporter.write_line(line)
    for row in sorted(set(found) - set(passed)):
        title = next(r["title"] for r in ROWS if r["id"] == row)
        terminalreporter.write_line(f"F{row} {'/'.join(sorted(found[row]))}: {title}")
    checks = sum(invariants.counted.values())
    terminalreporter.write_line(f"{len(passed)}/{len(ROWS)} fault rows, {checks} invariant checks")
