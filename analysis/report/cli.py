"""`analyze report`: a run's tables again, and its page; or those of a proxy's log alone."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.report.page import write_html
from analysis.report.summary import summarise
from analysis.report.tables import print_report
from analysis.runs import read_run, rows_of_log
from replayer.arguments import InputError
from replayer.terminal import Working


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "run", type=Path, help="folder written by replay --out, or a proxy's --request-log"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="page to write (default: report.html in the folder, LOG.report.html beside a log)",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the tables, write the page."""
    with Working("report", "reading rows") as working:
        return _report(options, console, working)


def _report(options: argparse.Namespace, console: Console, working: Working) -> int:
    read: Path = options.run
    if read.is_file():
        summary, rows = _log_alone(read)
        html = options.html or read.with_name(f"{read.name}.report.html")
    elif not read.exists():
        raise InputError(f"{read}: neither the folder of a run nor a proxy's request log")
    else:
        summary, rows = read_run(read, summarise)
        html = options.html or read / "report.html"
    print_report(summary, console)
    working.at("drawing the page")
    try:
        write_html(html, summary, rows)
    except OSError as error:
        raise InputError(f"{html}: cannot be written: {error.strerror}") from None
    console.print(f"written: {html}", soft_wrap=True, markup=False)
    return 0


def _log_alone(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows, skipped = rows_of_log(path)
    notes = ["times are the proxy's own, from the receipt of a request to its last byte"]
    facts = {"request_log": str(path), "log_lines_skipped": skipped, "notes": notes}
    return summarise(facts, rows), rows
