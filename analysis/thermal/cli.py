"""`analyze thermal`: its options and its run."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.options import UNSET, flag
from analysis.bench.runner import Experiment, Result
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
from replayer.arguments import InputError, count, names, positive_count
from replayer.terminal import Working

TABLE_WIDTH = 140
LEAST_SECONDS = 30


@dataclass(frozen=True, slots=True)
class ThermalRuns:
    """The options of the command; `scenario` and `law` are names, or all."""

    plant: str = flag(
        str,
        "the plant: power to temperature, or the founding document's harness with its load",
        "first-order",
        choices=("first-order", "harness"),
    )
    scenario: tuple[str, ...] = flag(names, f"all, or names from {', '.join(SCENARIOS)}", ("all",))
    law: tuple[str, ...] = flag(names, f"all, or names from {', '.join(LAWS)}", ("power",))
    thermal: Path | None = flag(
        Path, "TOML file with options of thermal control", None, metavar="CONFIG"
    )
    seeds: int = flag(positive_count, "runs per scenario and law", 3)
    first_seed: int = flag(count, "lowest of the seeds, which are consecutive", 0)
    seconds: int | None = flag(
        positive_count,
        f"virtual seconds (default: 600, with --plant harness {harness.SECONDS})",
        None,
        shown=UNSET,
    )
    json: Path | None = flag(Path, "file for all rows", None)
    figures: Path | None = flag(Path, "folder for a figure per scenario", None)


def _perform(options: ThermalRuns, console: Console) -> Result:
    laws = _known(options.law, tuple(LAWS), "--law")
    run_plant = _harness if options.plant == "harness" else _scenarios
    with Working("thermal", "plants in virtual time") as working:
        rows, written = run_plant(options, laws, console, working)
    return Result(rows, figures=lambda: written)


THERMAL = Experiment(ThermalRuns, _perform, width=TABLE_WIDTH)
declare, run = THERMAL.declare, THERMAL.run
Rows = tuple[list[dict[str, Any]], list[str]]


def _scenarios(
    options: ThermalRuns, laws: tuple[str, ...], console: Console, working: Working
) -> Rows:
    chosen = _known(options.scenario, tuple(SCENARIOS), "--scenario")
    thermal = _options(options.thermal, ThermalOptions())
    rows, written = [], []
    for name in chosen:
        scenario = SCENARIOS[name]
        lines: dict[str, tuple[Line, Line]] = {}
        for law in (None, *laws):
            held = None if law is None else replace(thermal, law=law)
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            for seed in working.over(seeds, f"{name}, law {law}, seeds", options.seeds):
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


def _harness(
    options: ThermalRuns, laws: tuple[str, ...], console: Console, working: Working
) -> Rows:
    if options.scenario != ("all",):
        raise InputError("--scenario is for --plant first-order; the harness has its own load")
    thermal = _options(options.thermal, harness.OURS)
    seconds = _seconds(options, harness.SECONDS)
    seed = options.first_seed or harness.SEED
    runs = {
        "none": harness.run_harness(harness.BASELINE, harness.no_control, seconds, seed),
        "harness": harness.run_harness(harness.CONTROLLED, harness.own_control(), seconds, seed),
    }
    for law in working.over(laws, "the harness's plant, laws", len(laws)):
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


def _seconds(options: ThermalRuns, usual: int) -> int:
    seconds = usual if options.seconds is None else options.seconds
    if seconds < LEAST_SECONDS:
        raise InputError(f"--seconds must be at least {LEAST_SECONDS}, not {seconds}")
    return seconds


def _known(chosen: tuple[str, ...], known: tuple[str, ...], option: str) -> tuple[str, ...]:
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
