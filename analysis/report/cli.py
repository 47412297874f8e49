"""`analyze report`: a run's tables again, and its report.html."""

import argparse
from pathlib import Path

from rich.console import Console

from analysis.report.page import write_html
from analysis.report.tables import print_report
from analysis.runs import read_rows, read_summary


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", type=Path, help="folder written by replay --out")


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the tables, write the page."""
    folder = options.run
    summary, rows = read_summary(folder / "summary.json"), read_rows(folder / "requests.jsonl")
    print_report(summary, console)
    write_html(folder, summary, rows)
    console.print(f"written: {folder / 'report.html'}", soft_wrap=True, markup=False)
    return 0
