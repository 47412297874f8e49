"""The command `dry-run`: what the predictor and the profile would have said on a trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from planner.config.load import declare as declare_options
from planner.config.load import load
from planner.config.options import PlannerOptions
from planner.core.perf.capacity import aggregated
from planner.core.perf.regression import Line
from planner.core.predict.plugin import LoadPredict
from planner.core.propose.throughput import demand_of
from planner.core.state import PlannerScalingState
from planner.core.types import Capabilities, Context, Prediction, Traffic
from planner.run import Learned, capabilities_of
from planner.service import learned
from planner.sources.trace import files, windows

MOST_ROWS = 60
"""Of the table; a longer trace shows every so many of its intervals."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One interval: its traffic, what was predicted of it, and the replicas that follow.

    `replicas`: for the prediction; `needed`: for the traffic itself. None without a profile.
    """

    begin_s: float
    traffic: Traffic
    predicted: Prediction
    replicas: int | None
    needed: int | None


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: a trace, then those of `run`."""
    parser.add_argument(
        "trace",
        help="trace file, folder or glob, as `replay` reads them, or Dynamo's request traces",
    )
    declare_options(parser)


def run(given: argparse.Namespace, console: Console) -> int:
    """Print the table; no fleet is asked."""
    options = load({"proxies": ("none",), **vars(given)}).options
    interval_s = options.throughput_adjustment_interval_seconds
    found = list(planned(list(windows(files(given.trace), interval_s)), options, learned(options)))
    _print(found, console)
    return 0


def planned(
    traffic: Sequence[Traffic], options: PlannerOptions, known: Learned
) -> Iterator[Interval]:
    """Every interval, predicted from those before it alone."""
    rules, of = options.rules, capabilities_of(options)
    state = PlannerScalingState(known.priors)
    predict = LoadPredict(rules, state)
    predict.warm_up(known.windows)
    model = state.fresh(rules.min_observations) if known.priors else None
    said = Prediction()

    def replicas(told: Prediction, window_s: float) -> int | None:
        return None if model is None else _replicas(model, told, window_s, options, of)

    for n, one in enumerate(traffic):
        begin_s = n * one.window_s
        seen = Prediction(one.requests, one.isl_tokens, one.osl_tokens)
        yield Interval(
            begin_s,
            one,
            said,
            None if said.next_num_req is None else replicas(said, one.window_s),
            replicas(seen, one.window_s),
        )
        said = predict.evaluate(Context(n, begin_s, {}, {}, one)) or Prediction()


def _replicas(
    model: Line, told: Prediction, window_s: float, options: PlannerOptions, of: Capabilities
) -> int:
    demand, rules = demand_of(told, window_s), options.rules
    return aggregated(model, demand, rules.slo, of).replicas(demand, rules.min_endpoint)


def _print(found: Sequence[Interval], console: Console) -> None:
    table = Table(title="Intervals, predicted from those before")
    for name in ("from, s", "requests", "predicted", "prompt", "answer", "replicas", "needed"):
        table.add_column(name, justify="right")
    for one in found[:: -(-len(found) // MOST_ROWS)]:
        told = one.traffic
        table.add_row(
            f"{one.begin_s:,.0f}",
            f"{told.requests:,.0f}",
            _shown(one.predicted.next_num_req),
            _shown(told.isl_tokens),
            _shown(told.osl_tokens),
            _shown(one.replicas),
            _shown(one.needed),
        )
    console.print(table)
    errors = [
        abs(one.traffic.requests - one.predicted.next_num_req)
        for one in found
        if one.predicted.next_num_req is not None
    ]
    total = sum(one.traffic.requests for one in found)
    if errors and total:
        share = sum(errors) / len(errors) / (total / len(found))
        console.print(f"mean error of requests: {100 * share:.0f} % of the mean interval")
    if any(one.needed is None for one in found):
        console.print("replicas are not known: they need --profile-results-dir")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
