"""The command `python -m bench.routing` (`make bench-routing`): routing quality beside others."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from bench.cost.cli import write_between_marks
from bench.measuring.peers import ROOT
from bench.routing import bound, environments
from bench.routing.environments import RoutingError
from bench.routing.load import SESSIONS_AT_A_TIME, SHAPES, TRACE, TURNS, Sessions, Shape, shape_of
from bench.routing.measured import BUSY_LIMIT, Result, Run
from bench.routing.report import chart, published, tables
from bench.routing.report.verdict import gross_faults
from bench.routing.runs import Cell, Runner
from bench.routing.systems import (
    BEFORE,
    GAUGES,
    INOTIFY_LIMIT,
    MODES,
    OURS,
    PLAIN,
    SYSTEMS,
    Site,
    environments_of,
    inotify_instances,
    inotify_limit,
    our_path,
)
from replayer.arguments import OneLineParser, names, positive, positive_count
from replayer.demo.processes import Stopped
from replayer.trace.rows import TraceError

WORK = Path(".cache/routing")
SEEDS = 3
QUICK_SYSTEMS, QUICK_TURNS = ("dynamo-kv", OURS), 4
WIDTH = 160
"""Of the tables where no terminal says how wide it is."""
EXIT_SIGNAL = 128  # plus the signal's number
CPUS_PER_ENGINE = 0.05
"""CPUs that an engine and its share of router and client keep busy at speedup 1."""
SPEEDUPS = (0.5, 1.0, 1.5, 2.0)
"""What is chosen from. Above 2 the routers' own ways weigh too much: they are in real time."""
QUICK_SPEEDUP = 4.0


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be run."""

    trace: Path
    shapes: tuple[Shape, ...]
    loads: tuple[str, ...]
    seeds: tuple[int, ...]
    turns: int
    runs: tuple[tuple[str, str], ...]
    """Systems with their modes."""
    speedup: float
    parallel: int
    work: Path
    out: Path | None
    before: Path | None
    proxy_options: tuple[str, ...]
    installs: bool
    checks: bool
    """Whether a run that is wrong by an order of magnitude fails the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a run failed or lost requests, 2 for bad input."""
    parser = _parser()
    given = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, _stop)
    try:
        return _command(given, console)
    except (RoutingError, TraceError) as error:
        print(f"bench-routing: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench-routing: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"bench-routing: stopped by {stop}, and so is all it had started", file=sys.stderr)
        return EXIT_SIGNAL + stop.number
    except KeyboardInterrupt:
        print("bench-routing: stopped", file=sys.stderr)
        return 130


def _command(given: argparse.Namespace, console: Console) -> int:
    if given.report:
        return _report(Result.merged([Result.load(path) for path in given.report]), console)
    if given.publish is not None:
        publish(given.publish)
        return 0
    if given.chart:
        path, *results = given.chart
        path.write_text(chart.svg(published.read(results or [published.FIGURES])))
        return 0
    return _compare(_options(given), console)


def publish(results: Sequence[Path]) -> None:
    """Add results to the published figures, and make page and chart from those anew."""
    made = published.read([published.FIGURES, *results])
    published.save(published.FIGURES, made)
    published.CHART.write_text(chart.svg(made))
    write_between_marks(published.PAGE, published.markdown(made))


def _stop(number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends what runs between the comparisons, such as an install; they see to their own."""
    raise Stopped(number)


def _compare(options: Options, console: Console) -> int:
    """Run every system on every cell."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    sessions = Sessions(options.trace)
    venvs = options.work.absolute() / "venvs"
    if options.installs:
        environments.make(environments_of([name for name, _ in options.runs]), venvs, say)
    ours = {OURS: our_path()} | ({BEFORE: options.before} if options.before else {})
    site = Site(venvs, options.speedup, ours, options.proxy_options)
    runner = Runner(sessions, site, options.work.absolute() / "runs")
    kind = "interpreted" if ours[OURS] == ROOT else "compiled"
    result = Result.begin(options.trace.name, options.speedup, kind)
    say(f"{result.machine}; speedup {options.speedup:g}; {OURS} {kind}")

    def done(run: Run) -> None:
        result.runs.append(run)
        say(tables.line(run))

    for cell in _cells(options):
        _run_cell(runner, cell, options, done)
        if options.out is not None:
            result.save(options.out)
    status = _report(result, console)
    return max(status, _checked(result)) if options.checks else status


def _cells(options: Options) -> list[Cell]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    return [
        Cell(shape, load, seed, options.turns)
        for seed in options.seeds
        for shape in options.shapes
        for load in options.loads
    ]


def _run_cell(runner: Runner, cell: Cell, options: Options, done: Callable[[Run], None]) -> None:
    for row in bound.bounds(cell, runner.work_of(cell)):
        done(row)
    for first in range(0, len(options.runs), options.parallel):
        for run in runner.run(cell, options.runs[first : first + options.parallel]):
            done(run)


def _report(result: Result, console: Console) -> int:
    """Print the tables; 1 where a run failed or lost requests."""
    console.print(f"{result.machine}; {result.trace}; speedup {result.speedup:g}", highlight=False)
    for grid in tables.grids(result):
        console.print(grid.rich())
    if any((run.busy_ratio or 0.0) > BUSY_LIMIT for run in result.runs):
        console.print(f"! over {BUSY_LIMIT:.0%} of the machine was busy: give a lower --speedup")
    found = tables.faults(result)
    for fault in found:
        print(f"bench-routing: FAILED: {fault}", file=sys.stderr)
    return 1 if found else 0


def _checked(result: Result) -> int:
    found = list(gross_faults(result))
    for fault in found:
        print(f"bench-routing: FAILED: {fault}", file=sys.stderr)
    return 1 if found else 0


def check_inotify(
    runs: Sequence[tuple[str, str]], engines: int, parallel: int, limit: int | None
) -> None:
    """Raise RoutingError where systems that run at the same time cannot all watch their engines."""
    batches = [runs[first : first + parallel] for first in range(0, len(runs), parallel)]
    needed = max(inotify_instances([name for name, _ in batch], engines) for batch in batches)
    if limit is not None and needed > limit:
        raise RoutingError(
            f"--parallel {parallel}: needs {needed} inotify instances, the kernel allows {limit}: "
            f"run fewer systems at a time, or sysctl -w {INOTIFY_LIMIT}={2 * needed}"
        )


def default_speedup(cpus: int, engines: int, parallel: int) -> float:
    """The fastest of SPEEDUPS at which the machine stays under its limit, or the slowest."""
    most = round(BUSY_LIMIT * cpus / (CPUS_PER_ENGINE * engines * parallel), 6)
    return max((one for one in SPEEDUPS if one <= most), default=SPEEDUPS[0])


def _options(given: argparse.Namespace) -> Options:
    quick = given.quick
    shapes = given.shapes or (tuple(SHAPES)[:1] if quick else tuple(SHAPES))
    systems = _chosen(given.systems, "--systems", SYSTEMS, QUICK_SYSTEMS if quick else SYSTEMS)
    modes = _chosen(given.modes, "--modes", MODES, (GAUGES,) if quick else (GAUGES, PLAIN))
    default_loads = ("low",) if quick else tuple(SESSIONS_AT_A_TIME)
    if given.before is not None:
        systems = (*systems, BEFORE)
    runs = [
        (name, mode) for name in systems for mode in (modes if name in (OURS, BEFORE) else ("",))
    ]
    fleets = tuple(map(shape_of, shapes))
    engines = max(fleet.engines for fleet in fleets)
    check_inotify(runs, engines, given.parallel, inotify_limit())
    speedup = default_speedup(len(os.sched_getaffinity(0)), engines, given.parallel)
    if given.before is not None and not (given.before / "proxy").is_dir():
        raise RoutingError(f"--before: {given.before} has no clone of the project")
    return Options(
        trace=given.trace,
        shapes=fleets,
        loads=_chosen(given.loads, "--loads", SESSIONS_AT_A_TIME, default_loads),
        seeds=given.seeds or ((1,) if quick else tuple(range(1, SEEDS + 1))),
        turns=given.turns or (QUICK_TURNS if quick else TURNS),
        runs=tuple(runs),
        speedup=given.speedup or (QUICK_SPEEDUP if quick else speedup),
        parallel=given.parallel,
        work=given.work,
        out=given.out,
        before=given.before and given.before.resolve(),
        proxy_options=tuple(given.proxy_options.split()),
        installs=given.installs,
        checks=quick,
    )


def _chosen(
    given: tuple[str, ...] | None, option: str, known: Collection[str], default: Sequence[str]
) -> tuple[str, ...]:
    """The names that were asked for; raises RoutingError for another one."""
    for name in given or ():
        if name not in known:
            raise RoutingError(f"{option}: must be of {', '.join(known)}, not {name!r}")
    return given or tuple(default)


def seeds(text: str) -> tuple[int, ...]:
    """Read a number of seeds, from 1 on, or a range such as 4-6."""
    first, dash, last = text.partition("-")
    start = positive_count(first) if dash else 1
    end = positive_count(last if dash else text)
    if end < start:
        raise argparse.ArgumentTypeError(f"must be a number, or FIRST-LAST, not {text!r}")
    return tuple(range(start, end + 1))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="bench-routing", description=__doc__)
    add = parser.add_argument
    modes = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    add("--systems", type=names, metavar="A,B", help=f"of {', '.join(SYSTEMS)}; default: all")
    add("--modes", type=names, metavar="A,B", help=f"of {OURS}: {modes}; default: {GAUGES},{PLAIN}")
    add("--shapes", type=names, metavar="A,B",
        help=f"engines x KV tokens of each: {', '.join(SHAPES)}, or such as 2x131072; default: "
        "both")  # fmt: skip
    add("--loads", type=names, metavar="A,B", help=f"of {', '.join(SESSIONS_AT_A_TIME)} (default)")
    add("--seeds", type=seeds, metavar="N|A-B", help=f"default: {SEEDS}")
    add("--turns", type=positive_count, help=f"first turns of each session; default: {TURNS}")
    add("--trace", type=Path, default=TRACE, help="sessions in any form that `replay` reads")
    add("--speedup", type=positive, metavar="S",
        help="engine time runs S times faster than real time; default: at most 2, by the "
        "numbers of CPUs, engines and systems at a time")  # fmt: skip
    add("--parallel", type=positive_count, default=1, help="systems at a time, default %(default)s")
    add("--before", type=Path, metavar="CLONE", help="another clone of the project, beside this")
    add("--proxy-options", default="", metavar="TEXT", help=f"more options for {OURS}")
    add("--quick", action="store_true",
        help="one run of dynamo-kv and of ours with few turns; fails where ours is wrong by an "
        "order of magnitude")  # fmt: skip
    add("--work", type=Path, default=WORK, metavar="DIR",
        help="environments, logs, traces; default: %(default)s")  # fmt: skip
    add("--out", type=Path, metavar="JSON", help="every request of every run, for --report")
    add("--report", type=Path, nargs="+", metavar="JSON",
        help="print the tables of earlier runs, taken together")  # fmt: skip
    add("--publish", type=Path, nargs="*", metavar="JSON",
        help=f"put earlier runs into {published.FIGURES}, and make {published.PAGE.name} and "
        f"{published.CHART.name} from it; without a file: only make them anew")  # fmt: skip
    add("--chart", type=Path, nargs="+", metavar=("SVG", "JSON"),
        help=f"write a bar chart of earlier runs; default: of {published.FIGURES}")  # fmt: skip
    add("--no-install", dest="installs", action="store_false", help="install nothing")
    return parser
