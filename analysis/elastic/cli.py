"""`analyze elastic`: its options and its run."""

import argparse
import os
import signal
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.elastic.experiment import COMPARED, ElasticOptions, run_elastic
from analysis.elastic.interference import BATCHED_TOKENS, gaps_beside
from analysis.elastic.readings import READINGS
from analysis.elastic.real_runs import read_runs
from analysis.elastic.tables import print_experiment, print_interference, sentence
from analysis.league.profiles import PROFILES
from analysis.league.summary import TABLE_WIDTH
from replayer.arguments import count, names, not_negative, positive, positive_count, write_json
from replayer.engine.types import EngineOptions
from replayer.terminal import Terminal

SAMPLE = Path(str(files("replayer") / "data" / "agentic_sample.trace.jsonl.gz"))
DEFAULT = ElasticOptions(SAMPLE)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("trace", type=Path, nargs="?", default=SAMPLE, help="trace file with sessions")
    add("--profile", default="h100", help=f"one of the league's: {', '.join(PROFILES)}")
    add("--instances", type=positive_count, default=DEFAULT.instances, help="engines")
    add(
        "--sessions",
        type=_sessions,
        default=",".join(map(str, DEFAULT.sessions)),
        help="loads: sessions at a time, comma separated",
    )
    add(
        "--rules",
        type=names,
        default=",".join(COMPARED),
        help=f"names of the league's policies, or of {', '.join(READINGS)}, comma separated",
    )
    add("--seeds", type=positive_count, default=DEFAULT.seeds, help="runs per rule and load")
    add("--first-seed", type=count, default=0, help="lowest of the seeds, which are consecutive")
    add(
        "--think-cap",
        type=not_negative,
        default=DEFAULT.think_cap_s,
        help="longest pause between two turns, seconds",
    )
    add(
        "--timeout",
        type=positive,
        default=DEFAULT.timeout_s,
        help="seconds to the first token after which a request fails",
    )
    add(
        "--tpot-slo",
        type=positive,
        default=DEFAULT.tpot_slo_s,
        help="TPOT target of the router and of goodput, seconds",
    )
    add("--kv-tokens", type=positive_count, default=DEFAULT.kv_tokens, help="KV of an engine")
    add("--jobs", type=positive_count, default=os.cpu_count() or 1, help="worker processes")
    add(
        "--run",
        type=Path,
        action="append",
        metavar="DIR",
        help="a finished run of replay --mode sessions, instead of virtual ones; may be repeated",
    )
    add("--json", type=Path, help="file for all rows")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the experiment or read it, print and write the results."""
    wide = Terminal(width=max(console.width, TABLE_WIDTH))
    if options.run:
        rows = read_runs(options.run)
    else:
        rows = _simulated(options)
        engine = replace(EngineOptions(), max_num_batched_tokens=BATCHED_TOKENS)
        colocated, offloaded = (gaps_beside(engine, offloaded=one) for one in (False, True))
        print_interference(colocated, offloaded, wide)
    print_experiment(rows, wide)
    if options.json is not None:
        write_json(options.json, rows)
        console.print(f"written: {options.json}", soft_wrap=True, markup=False)
    if said := sentence(rows):
        wide.print(said, soft_wrap=True, markup=False, highlight=False)
    return 0


def _simulated(options: argparse.Namespace) -> list[dict[str, object]]:
    # A worker outlives a parent that a signal kills, but not a parent that exits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    wanted = ElasticOptions(
        trace=options.trace,
        instances=options.instances,
        sessions=options.sessions,
        rules=options.rules,
        seeds=options.seeds,
        first_seed=options.first_seed,
        think_cap_s=options.think_cap,
        timeout_s=options.timeout,
        tpot_slo_s=options.tpot_slo,
        kv_tokens=options.kv_tokens,
        jobs=options.jobs,
        profile=options.profile,
    )
    return run_elastic(wanted, Steps("elastic"))


def _sessions(text: str) -> tuple[int, ...]:
    values = tuple(positive_count(part) for part in names(text))
    if not values:
        raise argparse.ArgumentTypeError("must be integers >= 1, comma separated")
    return values
