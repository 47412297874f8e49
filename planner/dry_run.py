"""The command `dry-run`: what the predictor and the profile would have said on a trace."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
from rich.console import Console
from rich.table import Table

from planner.config.load import declare as declare_options
from planner.config.load import load
from planner.config.options import PlannerOptions
from planner.core.budget import OFF, Limits
from planner.core.perf.capacity import aggregated
from planner.core.perf.regression import Line
from planner.core.pipeline import Outcome, Pipeline
from planner.core.predict.plugin import LoadPredict
from planner.core.propose.throughput import demand_of
from planner.core.state import PlannerScalingState
from planner.core.types import (
    COMPONENT,
    Capabilities,
    Context,
    Kind,
    Prediction,
    Proposal,
    Replicas,
    Stage,
    Target,
    Traffic,
)
from planner.plugin_api.external import Externals
from planner.run import Learned, capabilities_of
from planner.service import StartError, connect_of, learned
from planner.sources.trace import files, windows
from planner.sources.workers.child import START_S, Child
from planner.sources.workers.forecasts import asking, child_of
from planner.telemetry.snapshot import heard_of
from replayer.arguments import InputError

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
    traffic, known = list(windows(files(given.trace), interval_s)), learned(options)
    child = child_of(options.load_predictor, time.monotonic, START_S)
    try:
        found = list(planned(traffic, options, known, child))
    finally:
        if child is not None:
            child.close()
    try:
        told = asyncio.run(with_plugins(found, options)) if options.plugin else []
    except StartError as error:
        raise InputError(str(error)) from error
    _audit(found, told, options)
    _print(found, told, console)
    return 0


class _Wanted:
    """The replicas for the prediction of an interval, as a builtin plugin would propose them."""

    name, stage, priority, interval_s, holds = "builtin_dry_run", Stage.PROPOSE, 100, 0.0, False

    def __init__(self) -> None:
        self.replicas: int | None = None

    def evaluate(self, context: Context) -> Proposal | None:
        """Nothing where they are not known."""
        del context
        if self.replicas is None:
            return None
        return Proposal(self.name, (Target(COMPONENT, Kind.SET, self.replicas),), self.priority)


async def with_plugins(found: Sequence[Interval], options: PlannerOptions) -> list[Outcome]:
    """What plugins of other processes make of each interval. Raises StartError."""
    gpus, least, wanted = options.gpus_per_replica, options.min_endpoint, _Wanted()
    most = options.max_gpu_budget if options.max_gpu_budget >= 0 else OFF
    pipeline = Pipeline([wanted], Limits({COMPONENT: gpus}, {COMPONENT: least}, most))
    outcomes: list[Outcome] = []
    seen: Traffic | None = None
    externals = Externals(pipeline, lambda: found[len(outcomes)].begin_s)
    externals.begin(options.plugins, connect_of(options))
    try:
        for n, one in enumerate(found):
            held = outcomes[-1].targets[COMPONENT] if outcomes else least
            context = Context(
                n,
                one.begin_s,
                {COMPONENT: Replicas(held, held)},
                {COMPONENT: capabilities_of(options)},
                seen,
                prediction=one.predicted,
                baseline={COMPONENT: held},
            )
            wanted.replicas, seen = one.replicas, one.traffic
            outcomes.append(await externals.decided(pipeline.steps(context)))
    finally:
        await externals.aclose()
    return outcomes


def _audit(found: Sequence[Interval], told: Sequence[Outcome], options: PlannerOptions) -> None:
    """Write what plugins have said. Raises InputError."""
    if not told or options.audit_log is None:
        return
    lines = [
        {
            "from_s": one.begin_s,
            "targets": outcome.targets,
            "plugins": [heard_of(heard) for heard in outcome.heard],
        }
        for one, outcome in zip(found, told, strict=True)
    ]
    try:
        with options.audit_log.open("ab") as file:
            file.writelines(orjson.dumps(line) + b"\n" for line in lines)
    except OSError as error:
        raise InputError(f"audit_log {options.audit_log}: {error.strerror}") from error


def planned(
    traffic: Sequence[Traffic], options: PlannerOptions, known: Learned, child: Child | None = None
) -> Iterator[Interval]:
    """Every interval, predicted from those before it alone. `child`: that of the predictor."""
    rules, of = options.rules, capabilities_of(options)
    state = PlannerScalingState(known.priors)
    predict = LoadPredict(rules, state) if child is None else asking(rules, child.ask)
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


def _print(found: Sequence[Interval], told: Sequence[Outcome], console: Console) -> None:
    table = Table(title="Intervals, predicted from those before")
    names = ("from, s", "requests", "predicted", "prompt", "answer", "replicas", "needed")
    for name in (*names, "plugins") if told else names:
        table.add_column(name, justify="right")
    for n in range(0, len(found), -(-len(found) // MOST_ROWS) or 1):
        one = found[n]
        seen = one.traffic
        table.add_row(
            f"{one.begin_s:,.0f}",
            f"{seen.requests:,.0f}",
            _shown(one.predicted.next_num_req),
            _shown(seen.isl_tokens),
            _shown(seen.osl_tokens),
            _shown(one.replicas),
            _shown(one.needed),
            *([_shown(told[n].targets[COMPONENT])] if told else []),
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
