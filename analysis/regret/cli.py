"""`analyze regret`: its options and its run."""

import argparse
import math
import os
from pathlib import Path

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.league.profiles import PROFILES
from analysis.league.scale import REGIMES, USUAL_HORIZON_S, given_scale
from analysis.league.summary import TABLE_WIDTH
from analysis.regret.regret import ORACLES, RegretOptions, compute_regret, document
from analysis.regret.summary import sentences, summarise_regret
from analysis.regret.tables import print_regret
from analysis.rivals.registry import BASELINE
from proxy.core.latency.slo import Slo
from replayer.arguments import names, positive, write_json
from replayer.terminal import Terminal


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    add = parser.add_argument
    add("trace", type=Path, help="trace file, as for replay")
    add(
        "--oracle",
        choices=ORACLES,
        default="rollout",
        help="rollout: every action; places: only actions without an offload",
    )
    add("--profile", default="h100", help=f"one of the league's: {', '.join(PROFILES)}")
    add("--instances", type=int, default=4, help="engines")
    add("--load", type=positive, default=0.8, help="load, as a part of the saturation rate")
    add(
        "--policies",
        type=names,
        default=f"cost,{BASELINE}",
        help="names of the league's policies, comma separated",
    )
    add("--seeds", type=int, default=3, help="runs per policy")
    add("--first-seed", type=int, default=0, help="lowest of the seeds, which are consecutive")
    add("--decisions", type=int, default=30, help="HEAVY decisions examined per seed")
    add("--repeats", type=int, default=8, help="repetitions of a policy's own run, with noise")
    add(
        "--futures",
        type=int,
        default=4,
        help="resampled futures per action; 1: the real one",
    )
    add("--horizon", type=_horizon, default=60.0, help="how far a future goes: end, or seconds")
    add("--regime", type=names, default=",".join(REGIMES), help="the working set fits or exceeds")
    add("--scale", type=given_scale, help="RATE:KV instead of --regime, as of the league")
    add(
        "--load-horizon",
        type=positive,
        default=argparse.SUPPRESS,
        help=f"virtual seconds of load (default: {USUAL_HORIZON_S:g}, less for a short trace)",
    )
    add("--think-cap", type=positive, default=60.0, help="longest pause between turns, seconds")
    add(
        "--timeout",
        type=positive,
        default=60.0,
        help="seconds to the first token after which a request fails",
    )
    add(
        "--tpot-slo",
        type=positive,
        default=Slo().tpot_s,
        help="TPOT target of the router and of J, seconds",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    add("--json", type=Path, help="file for summary, runs and decisions")


def run(options: argparse.Namespace, console: Console) -> int:
    """Compute the regret, print and write the results."""
    wanted = RegretOptions(
        trace=options.trace,
        oracle=options.oracle,
        instances=options.instances,
        load=options.load,
        policies=options.policies,
        seeds=options.seeds,
        first_seed=options.first_seed,
        regimes=options.regime,
        decisions=options.decisions,
        repeats=options.repeats,
        futures=options.futures,
        horizon_s=options.horizon,
        load_horizon_s=vars(options).get("load_horizon"),
        think_cap_s=options.think_cap,
        timeout_s=options.timeout,
        tpot_slo_s=options.tpot_slo,
        jobs=options.jobs,
        given=options.scale,
        profile=options.profile,
    )
    steps = Steps("regret")
    regret, wanted = compute_regret(wanted, steps, steps.say)
    print_regret(regret, wanted.policies, Terminal(width=max(console.width, TABLE_WIDTH)))
    if options.json is not None:
        write_json(options.json, document(regret, wanted))
        console.print(f"written: {options.json}", soft_wrap=True, markup=False)
    for said in sentences(summarise_regret(regret, wanted.policies)):
        console.print(said, soft_wrap=True, markup=False, highlight=False)
    return 0


def _horizon(text: str) -> float:
    return math.inf if text == "end" else positive(text.removesuffix("s"))
