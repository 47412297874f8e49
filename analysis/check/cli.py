"""`analyze check`: its options, tables and verdict."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from analysis.bench.options import flag
from analysis.bench.runner import Experiment, Result
from analysis.bench.tables import table as make_table
from analysis.check.check import Check, Compared, check_run
from analysis.check.fit import NAMES
from replayer.terminal import Working

KS_BOUND = 0.1
"""A simulator's figures are credible up to this KS distance, which is printed beside it."""
WIDTH = 110
UNITS = {
    "a0": ("fixed part of a step", 1e3, "ms"),
    "a1": ("step, per prefill token", 1e6, "µs"),
    "a2": ("step, per decoding sequence", 1e6, "µs"),
    "a3": ("step, per KV token decoded over", 1e9, "ns"),
    "a4": ("step, per prefill token and context", 1e9, "ns"),
    "x0": ("transfer, fixed part", 1e3, "ms"),
    "x1": ("transfer, per token", 1e6, "µs"),
    "intake": ("leg, before the queue", 1e3, "ms"),
    "intake_per_token": ("the same, per prompt token", 1e6, "µs"),
}


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 10.0:
        raise argparse.ArgumentTypeError(f"must be a ratio > 0, such as 0.15, not {text!r}")
    return value


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of a check."""

    run: Path = flag(Path, "folder written by the demo: run.json and both request logs", name="")
    within: float = flag(_ratio, "bound on |realised - predicted| / predicted TTFT", 0.15)
    json: Path | None = flag(Path, "file to write all figures to", None)


def _perform(options: CheckOptions, console: Console) -> Result:
    """Check and print; the status is 0 if TTFT is within the bound."""
    with Working("check", "fitting the engines' constants, then predicting the run"):
        result = check_run(options.run)
    print_check(result, options.within, console)
    status = 0 if result.within(options.within) else 1
    return Result(result.document(options.within), status=status)


CHECK = Experiment(
    CheckOptions,
    _perform,
    width=WIDTH,
    text="Fits the engine model to a run's own log, replays the run in virtual time with the same "
    "router, and compares. Exit status: 0 TTFT p50 and p90 are within the bound, 1 they are "
    "not, 2 bad input.",
)
declare, run = CHECK.declare, CHECK.run


def print_check(result: Check, within: float, console: Console) -> None:
    """Print the comparison, the constants and the verdict."""
    head = f"{result.requests} requests, policy {result.policy}, times in engine seconds"
    if result.time_scale != 1.0:
        head += f" (measured x {result.time_scale:g})"
    console.print(head, highlight=False)
    table = make_table(
        None,
        ["", "realised", "predicted", "predicted / realised", "range of predictions"],
        boxed=True,
    )
    for name, rows in (("", result.times), (" as placed", result.as_placed)):
        for one in rows:
            table.add_row(_title(one) + name, *_cells(one, 1e3, ",.1f", " ms"))
    for one in result.counts:
        table.add_row(one.name, *_cells(one, 1.0, ",.0f", ""))
    console.print(table)
    console.print(_constants(result))
    spread = ", ".join(f"{kind} {value:.1%}" for kind, value in result.fitted.spread.items())
    lines = (
        f"residuals of the fit, 1.48 x median size: {spread}",
        f"KS distance of TTFT: {result.ks_ratio:.3f}, as placed {result.ks_as_placed:.3f} "
        f"(credible below {KS_BOUND:g})",
        f"{'ok    ' if result.within(within) else 'FAILED'} realised TTFT within {within:.0%} of "
        "the prediction at p50 and p90",
        *_schedule_lag(result),
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _schedule_lag(result: Check) -> list[str]:
    """Text on how late the client sent, which shows a busy machine; empty without a schedule."""
    lag = result.lag
    if not lag["count"]:
        return []
    parts = ", ".join(f"{name} {lag[name] * 1e3:,.1f} ms" for name in ("p50", "p99", "max"))
    return [f"schedule lag of the run: {parts} (real time; on a busy machine it fails by that)"]


def _constants(result: Check) -> Table:
    table = make_table(None, ["constant", "fitted", "engine-sim has", ""], boxed=True)
    for name in NAMES:
        title, factor, unit = UNITS[name]
        fitted, true = (getattr(of, name) * factor for of in (result.fitted.constants, result.true))
        real = f"{true:.3g} {unit}" if true else "real sockets"
        note = "" if name in result.fitted.seen else "not measured: engine-sim's value"
        table.add_row(f"{name}: {title}", f"{fitted:.3g} {unit}", real, note)
    proxy = result.proxy
    for title, text in (
        ("client and proxy, per request", f"{proxy.fixed_s * 1e3:.3g} ms"),
        ("the same, per prompt token", f"{proxy.per_token_s * 1e6:.3g} µs"),
    ):
        table.add_row(title, text, "real sockets", "")
    return table


def _title(one: Compared) -> str:
    name, _, percent = one.name.partition(" ")
    return f"{name.removesuffix('_s').upper()} {percent}"


def _cells(one: Compared, factor: float, form: str, unit: str) -> list[str]:
    values = (one.realised, one.predicted, one.low, one.high)
    realised, predicted, low, high = (format(value * factor, form) + unit for value in values)
    ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
    return [realised, predicted, ratio, "" if one.low == one.high else f"{low} to {high}"]
