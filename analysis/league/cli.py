"""`analyze league`: its options and its run."""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.league import closed
from analysis.league.figures import write_figures
from analysis.league.league import League, LeagueOptions, run_league
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.profiles import PROFILES
from analysis.league.scale import REGIMES, USUAL_HORIZON_S, given_scale
from analysis.league.summary import TABLE_WIDTH, print_league, summarise
from analysis.league.verdict import print_verdicts, sentence
from analysis.rivals.registry import RIVALS
from replayer.arguments import count, names, not_negative, positive, positive_count, write_json
from replayer.terminal import Terminal
from replayer.virtual.load import LeftOut

USUAL: dict[str, Any] = {"instances": 8, "think_cap": 60.0, "timeout": 60.0}
USUAL_CLOSED: dict[str, Any] = {"instances": 4, "think_cap": 10.0, "timeout": 300.0}
"""Defaults of options that differ with `--closed`."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("trace", type=Path, help="trace file, as for replay")
    add(
        "--profile",
        default="h100",
        help=f"engines and network: {', '.join(PROFILES)}",
    )
    add(
        "--instances",
        type=positive_count,
        default=argparse.SUPPRESS,
        help=f"engines {_usual('instances')}",
    )
    add(
        "--load",
        type=_numbers,
        default="0.5,0.8,1.0",
        help="loads, as parts of the saturation rate, comma separated",
    )
    add("--policies", type=_policies, default="all", help=f"all, or names from {', '.join(RIVALS)}")
    add("--seeds", type=positive_count, default=3, help="runs per policy and load")
    add("--first-seed", type=count, default=0, help="lowest of the seeds, which are consecutive")
    add(
        "--regime",
        type=names,
        default=",".join(REGIMES),
        help="working set: fits the fleet's KV, or exceeds it",
    )
    add(
        "--scale",
        type=given_scale,
        help="RATE:KV instead of --regime: load 1.0 and KV tokens per engine",
    )
    add(
        "--closed",
        type=closed.closed_loads,
        default=(),
        help="closed loop instead of --load, --regime and --perturb: "
        f"{', '.join(closed.LOADS)}, or SESSIONS/UNITS (at a time and in total), comma separated",
    )
    add(
        "--kv-tokens",
        type=positive_count,
        default=closed.KV_TOKENS,
        help="with --closed: KV of an engine",
    )
    add(
        "--perturb",
        type=names,
        default="none",
        help=f"names from {', '.join(PERTURBATIONS)}, or all",
    )
    add(
        "--migration-limit",
        type=count,
        default=0,
        help="as the proxy's --migration-limit: most migrations of a started stream",
    )
    add(
        "--horizon",
        type=positive,
        default=argparse.SUPPRESS,
        help=f"virtual seconds of load (default: {USUAL_HORIZON_S:g}, less for a short trace)",
    )
    add(
        "--think-cap",
        type=not_negative,
        default=argparse.SUPPRESS,
        help=f"longest pause between two turns, seconds {_usual('think_cap')}",
    )
    add(
        "--timeout",
        type=positive,
        default=argparse.SUPPRESS,
        help=f"seconds to the first token after which a request fails {_usual('timeout')}",
    )
    add("--jobs", type=positive_count, default=os.cpu_count() or 1, help="worker processes")
    add("--json", type=Path, help="file for all rows")
    add("--figures", type=Path, help="folder for a figure per load")


def _usual(name: str) -> str:
    return f"(default: {USUAL[name]:g}, with --closed {USUAL_CLOSED[name]:g})"


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the league, print and write the results."""
    perturb = tuple(PERTURBATIONS) if options.perturb == ("all",) else options.perturb
    # A worker outlives a parent that a signal kills, but not a parent that exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given = (USUAL_CLOSED if options.closed else USUAL) | vars(options)
    wanted = LeagueOptions(
        trace=options.trace,
        instances=given["instances"],
        loads=options.load,
        policies=options.policies,
        seeds=options.seeds,
        first_seed=options.first_seed,
        regimes=options.regime,
        perturbations=perturb,
        horizon_s=given.get("horizon"),
        think_cap_s=given["think_cap"],
        timeout_s=given["timeout"],
        jobs=options.jobs,
        given=options.scale,
        profile=options.profile,
        closed=options.closed,
        kv_tokens=options.kv_tokens,
        migration_limit=options.migration_limit,
    )
    steps = Steps("league")
    league = run_league(wanted, steps, steps.say)
    # Lines of the table are never cut or wrapped, even if the terminal is narrower.
    wide = Terminal(width=max(console.width, TABLE_WIDTH))
    if league.left_out.requests:
        wide.print(left_out(league.left_out), soft_wrap=True, markup=False)
    print_league(league.scales, league.rows, league.doubts, wide)
    print_verdicts(summarise(league.rows), wide, league.doubts)
    _write(league, options, console)
    if said := sentence(summarise(league.rows), wanted.policies):
        wide.print(said, soft_wrap=True, markup=False, highlight=False)
    return 0


def left_out(left: LeftOut) -> str:
    """Say in one line what of the trace is no part of the load."""
    return (
        f"left out: {left.requests:,} requests of {left.sessions:,} sessions, as no engine serves "
        f"a prompt of {left.shortest_tokens:,} tokens or more in time, or no KV holds it"
    )


def _write(league: League, options: argparse.Namespace, console: Console) -> None:
    written = []
    if options.json is not None:
        write_json(options.json, league.document())
        written.append(str(options.json))
    if options.figures is not None:
        written += write_figures(options.figures, league.rows, league.options.trace.name)
    for one in written:
        console.print(f"written: {one}", soft_wrap=True, markup=False)


def _policies(text: str) -> tuple[str, ...]:
    return tuple(RIVALS) if text == "all" else names(text)


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(positive(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be numbers > 0, comma separated")
    return values
