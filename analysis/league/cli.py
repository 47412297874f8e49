"""`analyze league`: its options and its run."""

import argparse
import os
import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from analysis.league.figures import write_figures
from analysis.league.league import League, LeagueOptions, run_league
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.scale import REGIMES, given_scale
from analysis.league.summary import TABLE_WIDTH, print_league, summarise
from analysis.league.verdict import print_verdicts
from analysis.rivals.registry import RIVALS
from replayer.arguments import count, names, not_negative, positive, positive_count, write_json


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("trace", type=Path, help="trace file, as for replay")
    add("--instances", type=positive_count, default=8, help="engines")
    add(
        "--load",
        type=_numbers,
        default="0.5,0.8,1.0",
        help="loads, as parts of the saturation rate, by commas",
    )
    add("--policies", type=_policies, default="all", help=f"all, or names from {', '.join(RIVALS)}")
    add("--seeds", type=positive_count, default=3, help="runs per policy and load")
    add("--first-seed", type=count, default=0, help="lowest of the seeds, which are consecutive")
    add(
        "--regime",
        type=names,
        default=",".join(REGIMES),
        help="whether the working set fits the fleet's KV or exceeds it",
    )
    add(
        "--scale",
        type=given_scale,
        help="RATE:KV instead of --regime: load 1.0 and KV tokens per engine",
    )
    add(
        "--perturb",
        type=names,
        default="none",
        help=f"names from {', '.join(PERTURBATIONS)}, or all",
    )
    add("--horizon", type=positive, default=900.0, help="virtual seconds of load")
    add(
        "--think-cap",
        type=not_negative,
        default=60.0,
        help="longest pause between two turns, seconds",
    )
    add(
        "--timeout",
        type=positive,
        default=60.0,
        help="seconds to the first token after which a request fails",
    )
    add("--jobs", type=positive_count, default=os.cpu_count() or 1, help="worker processes")
    add("--json", type=Path, help="file for all rows")
    add("--figures", type=Path, help="folder for a figure per load")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the league, print and write the results."""
    perturb = tuple(PERTURBATIONS) if options.perturb == ("all",) else options.perturb
    # A worker outlives a parent that a signal kills, but not a parent that exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wanted = LeagueOptions(
        trace=options.trace,
        instances=options.instances,
        loads=options.load,
        policies=options.policies,
        seeds=options.seeds,
        first_seed=options.first_seed,
        regimes=options.regime,
        perturbations=perturb,
        horizon_s=options.horizon,
        think_cap_s=options.think_cap,
        timeout_s=options.timeout,
        jobs=options.jobs,
        given=options.scale,
    )
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        line = bar.add_task("league", total=None)
        league = run_league(wanted, lambda n, of: bar.update(line, completed=n, total=of))
    # Lines of the table are never cut or wrapped, even if the terminal is narrower.
    wide = Console(width=max(console.width, TABLE_WIDTH))
    print_league(league.scales, league.rows, wide)
    print_verdicts(summarise(league.rows), wide)
    _write(league, wanted, options, console)
    return 0


def _write(
    league: League, wanted: LeagueOptions, options: argparse.Namespace, console: Console
) -> None:
    written = []
    if options.json is not None:
        write_json(options.json, league.document(wanted))
        written.append(str(options.json))
    if options.figures is not None:
        written += write_figures(options.figures, league.rows, wanted.trace.name)
    for one in written:
        console.print(f"written: {one}", soft_wrap=True, markup=False)


def _policies(text: str) -> tuple[str, ...]:
    return tuple(RIVALS) if text == "all" else names(text)


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(positive(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be numbers > 0, comma separated")
    return values
