"""The command `analyze`: reports and comparisons of replayed runs; league, regret, check."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from analysis.check.cli import add_check, run_check_command
from analysis.league.cli import add_league, run_command
from analysis.league.league import LeagueError
from analysis.regret.cli import add_regret, run_regret_command
from analysis.regret.regret import RegretError
from analysis.report.compare import compare, print_comparison
from analysis.report.page import write_html
from analysis.report.tables import print_report
from analysis.runs import RunError, load_run, read_rows, read_summary
from replayer.arguments import OneLineParser
from replayer.trace.rows import TraceError


def build_parser() -> argparse.ArgumentParser:
    """Declare the subcommands."""
    parser: argparse.ArgumentParser = OneLineParser(prog="analyze", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="print a run and write its report.html again")
    report.add_argument("run", type=Path, help="folder written by replay --out")
    versus = commands.add_parser("compare", help="compare two runs of one trace, pair by pair")
    versus.add_argument("a", type=Path, help="folder of run A")
    versus.add_argument("b", type=Path, help="folder of run B")
    versus.add_argument(
        "--require-identical",
        action="store_true",
        help="exit status 1 unless both runs are ok on the same requests with the same output",
    )
    add_league(commands)
    add_regret(commands)
    add_check(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `analyze`: 0 done, 1 outputs differ (--require-identical) or check fails, 2 bad input."""
    options = build_parser().parse_args(arguments)
    console = Console()
    try:
        if options.command == "report":
            return _report(options.run, console)
        if options.command == "league":
            return run_command(options, console)
        if options.command == "regret":
            return run_regret_command(options, console)
        if options.command == "check":
            return run_check_command(options, console)
        return _compare(options, console)
    except (RunError, LeagueError, RegretError, TraceError) as error:
        print(f"analyze: {error}", file=sys.stderr)
        return 2


def _report(folder: Path, console: Console) -> int:
    summary, rows = read_summary(folder / "summary.json"), read_rows(folder / "requests.jsonl")
    print_report(summary, console)
    write_html(folder, summary, rows)
    console.print(f"written: {folder / 'report.html'}", soft_wrap=True, markup=False)
    return 0


def _compare(options: argparse.Namespace, console: Console) -> int:
    a, b = load_run(options.a), load_run(options.b)
    result = compare(a, b)
    print_comparison(result, a, b, console)
    equal = result.comparable == len(a.requests) == len(b.requests) and not result.different
    return 1 if options.require_identical and not equal else 0


if __name__ == "__main__":
    sys.exit(main())
