"""The command `replay`: read a trace, send it, write and print the results.

`analysis` is imported only after the run, for the report: the measuring process must not load a
table library first.
"""

import gc
import os
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
import uvloop
from rich.console import Console

from replayer.arguments import replace_file
from replayer.replay.options import ReplayOptions, parse_options
from replayer.replay.output import (
    OutputError,
    RunFolder,
    rows_of,
    run_facts,
    write_rows,
)
from replayer.replay.plan import Plan, make_plan
from replayer.replay.progress import Tally, shown
from replayer.replay.run import Run, TargetError, run_blocking
from replayer.terminal import Terminal, Working, printable
from replayer.trace.rows import TraceError

EXIT_FAILURES = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
NEW_SEEDS = 1 << 31


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `replay`; returns the exit status, see `replay --help`."""
    options = parse_options(arguments)
    console = Terminal(stderr=True)
    try:
        with Working("replay", "reading the trace"):
            plan = make_plan(options)
        options.out.mkdir(parents=True, exist_ok=True)
    except TraceError as error:
        print(f"replay: {printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"replay: --out {options.out}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return _replay(options, plan, console)
    except (TargetError, OutputError) as error:
        print(f"replay: {printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _replay(options: ReplayOptions, plan: Plan, console: Console) -> int:
    tally = Tally(options.time_scale, options.max_failures)
    started_unix_s = datetime.now(UTC).timestamp()
    folder = RunFolder(options, plan, started_unix_s, tally)
    seed = secrets.randbelow(NEW_SEEDS) if options.seed is None else options.seed
    run = Run(options, plan.requests, uuid.uuid4().hex[:8], folder, seed)
    # The trace lives as long as the run, so the garbage collector need not scan it.
    gc.collect()
    gc.freeze()
    live = options.progress and console.is_terminal
    with shown(console, tally, len(plan.requests), live=live):
        finished = run_blocking(run, uvloop.new_event_loop)
    # The run has ended, perhaps by Ctrl-C: a second one must not lose the results.
    with sigint_ignored():
        folder.close()
        rows = rows_of(run.results, options)
        facts = run_facts(run, plan, started_unix_s, finished=finished)
        with Working("replay", "writing the results"):
            report(options, facts, rows, folder)
    if not finished:
        return EXIT_INTERRUPTED
    not_ok = sum(row["outcome"] != "ok" for row in rows)
    bad = not tally.sent_count or not_ok > options.max_failures or run.stopped or folder.is_full
    return EXIT_FAILURES if bad else 0


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while the block runs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def report(
    options: ReplayOptions, facts: dict[str, Any], rows: list[dict[str, Any]], folder: RunFolder
) -> None:
    """Join the proxy's log, print the tables, then write the three files."""
    from analysis.report.page import write_html
    from analysis.report.summary import summarise
    from analysis.report.tables import print_report
    from analysis.runs import join_proxy_log

    if options.proxy_log is not None:
        joined = join_proxy_log(rows, options.proxy_log, time.sleep)
        facts["proxy_log_missing"], facts["proxy_log_problem"] = joined
    summary = summarise(facts, rows)
    console, out = Terminal(), options.out
    _print(folder, lambda: print_report(summary, console))
    document = orjson.dumps(summary, option=orjson.OPT_INDENT_2)
    writes: dict[str, Callable[[], None]] = {
        "requests.jsonl": lambda: write_rows(out / "requests.jsonl", rows),
        "summary.json": lambda: replace_file(out / "summary.json", document),
    }
    if options.report:
        writes["report.html"] = lambda: write_html(out / "report.html", summary, rows)
    for name, write in writes.items():
        told = "written"
        try:
            write()
        except OSError as error:
            folder.failed(str(out / name), error)
            told = f"not written whole ({error.strerror or error})"
        line = f"{told}: {out / name}"
        _print(folder, partial(console.print, line, soft_wrap=True, markup=False, highlight=False))


def _print(folder: RunFolder, write: Callable[[], None]) -> None:
    """Write to standard output; where that is full, the files are written all the same."""
    try:
        write()
    except OSError as error:
        folder.failed("standard output", error)
        # Or what is left in its buffer fails again at the end of the process.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
