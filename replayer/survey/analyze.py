"""`replay analyze-trace`: what a trace's load is like, before it is sent."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from replayer.arguments import InputError, positive, replace_file
from replayer.replay.options import slo
from replayer.replay.schedule import PaceRules
from replayer.survey.profile import concurrency, profile
from replayer.terminal import Working
from replayer.trace.loaders import TraceRequest, read_trace

COLUMNS = ("mean", "p10", "p50", "p90", "p99", "max")
SPREADS = {
    "input_tokens": "prompt, tokens",
    "new_tokens": "prompt, new tokens",
    "output_tokens": "output, tokens",
    "turns": "turns of a session",
    "think_s": "think time, s",
}
"""The rows of the table of lengths."""
BAR = 40
"""Characters of the highest rate."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own options."""
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures there; -: to standard output, alone")
    add("--speedup", type=positive, default=1.0, help="of the schedule, for --served")
    add("--served", type=slo, default={}, metavar="TIMES",
        help="count the requests under way if each took so long: ttft:2,tpot:0.05")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Read the trace, compute, print, write."""
    with Working("analyze-trace") as working:
        found = _figures(options, working)
    document = orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n"
    if options.json == "-":
        sys.stdout.write(document.decode())
        return 0
    _print(found, console)
    if options.json:
        try:
            replace_file(Path(options.json), document)
        except OSError as error:
            raise InputError(f"--json {options.json}: {error.strerror}") from None
        console.print(f"written: {options.json}", soft_wrap=True, highlight=False)
    return 0


def _figures(options: argparse.Namespace, working: Working) -> dict[str, Any]:
    read = read_trace(options.trace, options.format)
    requests = list(working.over(read, "requests read"))
    found: dict[str, Any] = {"trace": str(options.trace), **profile(requests, working)}
    if options.served:
        working.at("counting requests under way")
        rules = PaceRules(speedup=options.speedup)
        found["concurrency"] = concurrency(
            requests, rules, lambda one: _time_s(one, options.served)
        )
    return found


def _time_s(request: TraceRequest, served: dict[str, float]) -> float:
    """Seconds from a request's sending to its end."""
    decode_s = served.get("tpot", 0.0) * (request.output_tokens - 1)
    return served.get("e2e", served.get("ttft", 0.0) + decode_s)


def _print(found: dict[str, Any], console: Console) -> None:
    table = Table("", *COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in SPREADS.items():
        if found[name]:
            table.add_row(title, *(_short(found[name][column]) for column in COLUMNS))
    console.print(table)
    for line in (*_arrivals(found), *_sessions(found), *_prefixes(found["prefixes"])):
        console.print(line, soft_wrap=True, highlight=False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _arrivals(found: dict[str, Any]) -> Iterator[str]:
    seen = found["arrivals"]
    if seen is None:
        yield f"requests: {found['requests']:,}; arrivals: no timestamps that differ"
        return
    dated = "all" if seen["requests"] == found["requests"] else f"{seen['requests']:,}"
    yield f"requests: {found['requests']:,}, {dated} with a timestamp"
    yield (
        f"arrivals: {seen['rate_rps']:.2f} per second over {seen['span_s']:,.0f} s; variation of "
        f"gaps {seen['gap_cv']:.2f} (Poisson: 1); at the same time as the one before "
        f"{seen['tied_ratio']:.1%}; busiest second {seen['busiest_second']:,}"
    )
    most = max(seen["rates_rps"])
    for part, rate in enumerate(seen["rates_rps"]):
        from_s = seen["first_s"] + part * seen["part_s"]
        yield f"{from_s:>10,.0f} s {rate:>10.3f}/s {'#' * round(BAR * rate / most)}".rstrip()


def _sessions(found: dict[str, Any]) -> Iterator[str]:
    yield f"sessions: {found['sessions'] if found['turns'] else 'none of several turns'}"
    if "concurrency" in found:
        peak, mean = found["concurrency"]["peak"], found["concurrency"]["mean"]
        yield f"under way, served as --served says: {peak:,} at most, {mean:.1f} in the mean"


def _prefixes(seen: dict[str, Any] | None) -> Iterator[str]:
    if seen is None:
        yield "prefixes: no block ids or text with a length, so nothing is known of what is shared"
        return
    yield (
        f"prefixes: an endless cache hits {seen['ideal_hit_ratio']:.1%} of prompt tokens, "
        f"{seen['within_sessions_ratio']:.1%} within a session, "
        f"{seen['across_sessions_ratio']:.1%} across sessions; {seen['mean_hit_ratio']:.1%} of a "
        "prompt in the mean"
    )
    if "by_cache" in seen:
        yield (
            f"{seen['shared_blocks']:,} blocks of {seen['block_tokens']} tokens have ids; "
            f"all prompts fill {seen['working_set_tokens']:,} tokens of cache"
        )
        for one in seen["by_cache"]:
            yield f"{one['cache_tokens']:>14,} tokens of cache hit {one['hit_ratio']:>6.1%}"
