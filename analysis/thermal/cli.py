"""`analyze thermal`: its options and its run."""

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.thermal import harness
from analysis.thermal.scenarios import SCENARIOS, SETTLED_CELSIUS, try_scenario
from analysis.thermal.tables import (
    Line,
    harness_lines,
    lines_of,
    print_harness,
    print_scenarios,
    write_figure,
)
from proxy.core.thermal.laws import LAWS
from proxy.core.thermal.options import ThermalOptions, from_mapping
from replayer.arguments import InputError, count, names, positive_count, write_json
from replayer.terminal import Terminal

TABLE_WIDTH = 140
LEAST_SECONDS = 30


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add(
        "--plant",
        choices=("first-order", "harness"),
        default="first-order",
        help="the plant: power to temperature, or the founding document's harness with its load",
    )
    add("--scenario", type=names, default="all", help=f"all, or names from {', '.join(SCENARIOS)}")
    add("--law", type=names, default="power", help=f"all, or names from {', '.join(LAWS)}")
    add("--thermal", type=Path, metavar="CONFIG", help="TOML file with options of thermal control")
    add("--seeds", type=positive_count, default=3, help="runs per scenario and law")
    add("--first-seed", type=count, default=0, help="lowest of the seeds, which are consecutive")
    add(
        "--seconds",
        type=positive_count,
        default=argparse.SUPPRESS,
        help=f"virtual seconds (default: 600, with --plant harness {harness.SECONDS})",
    )
    add("--json", type=Path, help="file for all rows")
    add("--figures", type=Path, help="folder for a figure per scenario")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run, print and write."""
    wide = Terminal(width=max(console.width, TABLE_WIDTH))
    laws = _known(options.law, tuple(LAWS), "--law")
    rows, written = (_harness if options.plant == "harness" else _scenarios)(options, laws, wide)
    if options.json is not None:
        write_json(options.json, rows)
        written.append(str(options.json))
    for one in written:
        console.print(f"written: {one}", soft_wrap=True, markup=False)
    return 0


Result = tuple[list[dict[str, Any]], list[str]]


def _scenarios(options: argparse.Namespace, laws: tuple[str, ...], console: Console) -> Result:
    chosen = _known(options.scenario, tuple(SCENARIOS), "--scenario")
    thermal = _options(options.thermal, ThermalOptions())
    rows, written = [], []
    for name in chosen:
        scenario = SCENARIOS[name]
        lines: dict[str, tuple[Line, Line]] = {}
        for law in (None, *laws):
            held = None if law is None else replace(thermal, law=law)
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                tried = try_scenario(scenario, held, seed, _seconds(options, 600))
                rows.append(
                    {"scenario": name, "what": scenario.what, "seed": seed, **tried.figures}
                )
                lines.setdefault("none" if law is None else law, lines_of(tried.run.seconds))
        if options.figures is not None:
            title = f"{name}: {scenario.what}"
            path = options.figures / f"thermal-{name}.html"
            written.append(
                write_figure(path, title, lines, thermal.target_celsius + SETTLED_CELSIUS)
            )
    print_scenarios(rows, thermal.target_celsius, console)
    return rows, written


def _harness(options: argparse.Namespace, laws: tuple[str, ...], console: Console) -> Result:
    if options.scenario != "all" and options.scenario != ("all",):
        raise InputError("--scenario is for --plant first-order; the harness has its own load")
    thermal = _options(options.thermal, harness.OURS)
    seconds = _seconds(options, harness.SECONDS)
    seed = options.first_seed or harness.SEED
    runs = {
        "none": harness.run_harness(harness.BASELINE, harness.no_control, seconds, seed),
        "harness": harness.run_harness(harness.CONTROLLED, harness.own_control(), seconds, seed),
    }
    for law in laws:
        rule, _controller = harness.our_control(replace(thermal, law=law))
        runs[law] = harness.run_harness(harness.CONTROLLED, rule, seconds, seed)
    rows = [harness.harness_figures(law, found) for law, found in runs.items()]
    print_harness(rows, seconds, console)
    written = []
    if options.figures is not None:
        lines = {law: harness_lines(found) for law, found in runs.items()}
        path = options.figures / "thermal-harness.html"
        written.append(write_figure(path, "The harness's plant", lines, harness.HOT_CELSIUS))
    return rows, written


def _seconds(options: argparse.Namespace, usual: int) -> int:
    seconds = int(getattr(options, "seconds", usual))
    if seconds < LEAST_SECONDS:
        raise InputError(f"--seconds must be at least {LEAST_SECONDS}, not {seconds}")
    return seconds


def _known(given: tuple[str, ...] | str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    chosen = names(given) if isinstance(given, str) else given
    if chosen == ("all",):
        return known
    wrong = [name for name in chosen if name not in known]
    if wrong or not chosen:
        raise InputError(
            f"{option} must be all, or names from {', '.join(known)}, not {', '.join(wrong)!r}"
        )
    return chosen


def _options(path: Path | None, usual: ThermalOptions) -> ThermalOptions:
    if path is None:
        return usual
    try:
        return from_mapping(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError) as error:
        raise InputError(f"--thermal {path}: {error}") from None
