"""The command `replay`: read a trace, send it, write and print the results.

`analysis` is imported only after the run, for the report: the measuring process must not load a
table library first.
"""

import gc
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from replayer.replay.options import ReplayOptions, parse_options
from replayer.replay.output import rows_of, run_facts, write_rows
from replayer.replay.plan import Plan, make_plan
from replayer.replay.progress import Tally, shown
from replayer.replay.run import Run, TargetError, run_blocking
from replayer.trace.rows import TraceError

EXIT_FAILURES = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `replay`; returns the exit status, see `replay --help`."""
    options = parse_options(arguments)
    console = Console(stderr=True)
    try:
        plan = make_plan(options)
        options.out.mkdir(parents=True, exist_ok=True)
    except TraceError as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"replay: --out {options.out}: {error.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        return _replay(options, plan, console)
    except TargetError as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _replay(options: ReplayOptions, plan: Plan, console: Console) -> int:
    tally = Tally(options.time_scale)
    run = Run(options, plan.requests, uuid.uuid4().hex[:8], tally)
    # The trace lives as long as the run, so the garbage collector need not scan it.
    gc.collect()
    gc.freeze()
    started_unix_s = datetime.now(UTC).timestamp()
    live = options.progress and console.is_terminal
    with shown(console, tally, len(plan.requests), live=live):
        finished = run_blocking(run, uvloop.new_event_loop)
    # The run has ended, perhaps by Ctrl-C: a second one must not lose the results.
    with sigint_ignored():
        rows = rows_of(run.results, options)
        facts = run_facts(run, plan, started_unix_s, finished=finished)
        write_rows_and_report(options, facts, rows)
    if not finished:
        return EXIT_INTERRUPTED
    not_ok = sum(row["outcome"] != "ok" for row in rows)
    return EXIT_FAILURES if not tally.sent_count or not_ok > options.max_failures else 0


@contextmanager
def sigint_ignored() -> Iterator[None]:
    """Ignore Ctrl-C while the block runs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def write_rows_and_report(
    options: ReplayOptions, facts: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Join the proxy's log, then write the three files and print the tables."""
    from analysis.report.page import write_html
    from analysis.report.summary import summarise
    from analysis.report.tables import print_report
    from analysis.runs import join_proxy_log

    if options.proxy_log is not None:
        joined = join_proxy_log(rows, options.proxy_log, time.sleep)
        facts["proxy_log_missing"], facts["proxy_log_problem"] = joined
    summary = summarise(facts, rows)
    write_rows(options.out / "requests.jsonl", rows)
    write_summary(options.out / "summary.json", summary)
    if options.report:
        write_html(options.out / "report.html", summary, rows)
    print_report(summary, Console())


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`."""
    path.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    sys.exit(main())
