"""Two runs of one trace side by side, request by request.

Requests are paired by the trace's request id, and only pairs that are ok in both runs enter the
differences. Percentiles alone would hide that a run lost its slow requests. Times are each target's
own. The interval is a percentile bootstrap over pairs: seeded, so the same files give the same
answer.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from analysis.measures import METRICS, percentile
from analysis.report.confounders import KINDS, confounders, has_same_text
from analysis.report.summary import summarise
from analysis.report.tables import milliseconds, print_table, time_scale
from analysis.runs import LoadedRun, load_run
from replayer.arguments import InputError, names
from replayer.terminal import Working

RESAMPLES = 2000
INTERVAL_PERCENT = 95
COMPARED = ("ttft_s", "tpot_s", "e2e_s")
SHOWN_IDS = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric over the pairs: medians, and the mean of B - A with its interval, in seconds."""

    tag: str
    pairs: int
    a_p50_s: float
    b_p50_s: float
    a_p90_s: float
    b_p90_s: float
    mean_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The paired requests of two runs; `different` lists the ids whose outputs differ.

    Outputs are compared only where both runs sent the same words (`has_same_text`).
    """

    common: int
    only_a: int
    only_b: int
    comparable: int
    different: tuple[str, ...]
    differences: tuple[Difference, ...]
    has_same_text: bool = True

    @property
    def identical(self) -> int:
        """Count the requests that are ok in both runs with the same output."""
        return self.comparable - len(self.different)


def compare(a: LoadedRun, b: LoadedRun) -> Comparison:
    """Pair two runs by request id."""
    pairs = a.requests.merge(b.requests, on="request_id", suffixes=("_a", "_b"))
    ok = pairs[(pairs["outcome_a"] == "ok") & (pairs["outcome_b"] == "ok")]
    alike = has_same_text(a.summary, b.summary)
    same = (ok["output_digest_a"] == ok["output_digest_b"]) | (
        ok["output_digest_a"].isna() & ok["output_digest_b"].isna()
    )
    found = (difference(ok, tag) for tag in COMPARED)
    return Comparison(
        common=len(pairs),
        only_a=len(a.requests) - len(pairs),
        only_b=len(b.requests) - len(pairs),
        comparable=len(ok),
        different=tuple(ok.loc[~same, "request_id"].astype(str)) if alike else (),
        differences=tuple(one for one in found if one is not None),
        has_same_text=alike,
    )


def difference(ok: pd.DataFrame, tag: str) -> Difference | None:
    """Compare one metric over pairs (None: no pair has it on both sides)."""
    both = ok[[f"{tag}_a", f"{tag}_b"]].dropna().to_numpy(dtype=float)
    if not len(both):
        return None
    low_s, high_s = _interval(both[:, 1] - both[:, 0])
    a, b = sorted(both[:, 0].tolist()), sorted(both[:, 1].tolist())
    return Difference(
        tag=tag,
        pairs=len(both),
        a_p50_s=percentile(a, 50),
        b_p50_s=percentile(b, 50),
        a_p90_s=percentile(a, 90),
        b_p90_s=percentile(b, 90),
        mean_s=float((both[:, 1] - both[:, 0]).mean()),
        low_s=low_s,
        high_s=high_s,
    )


def _interval(differences: np.ndarray) -> tuple[float, float]:
    source = np.random.default_rng(0)
    # One resample at a time: all at once would need RESAMPLES x pairs numbers.
    means = sorted(
        float(source.choice(differences, size=len(differences)).mean()) for _ in range(RESAMPLES)
    )
    tail = (100 - INTERVAL_PERCENT) / 2
    return percentile(means, tail), percentile(means, 100 - tail)


def described(run: LoadedRun) -> str:
    """Name a run: its folder, and policy and time scale if its summary has them."""
    policies = ", ".join(run.summary.get("offload_policies") or ())
    scale = time_scale(run.summary)
    details = [f"offload policy {policies}"] if policies else []
    details += [f"measured x {scale:g}"] if scale != 1 else []
    return f"{run.name} ({'; '.join(details)})" if details else run.name


def print_comparison(result: Comparison, a: LoadedRun, b: LoadedRun, console: Console) -> None:
    """Print the table of differences and the count of equal outputs."""
    title = f"A = {described(a)}\nB = {described(b)}\nms; mean B-A, negative: B is faster"
    shown = Table()
    shown.add_column("", no_wrap=True)
    for column in ("pairs", "A p50", "B p50", "A p90", "B p90", "mean B-A", "95 % interval"):
        shown.add_column(column, justify="right")
    for one in result.differences:
        values = (one.a_p50_s, one.b_p50_s, one.a_p90_s, one.b_p90_s, one.mean_s)
        interval = f"{milliseconds(one.low_s)} .. {milliseconds(one.high_s)}"
        shown.add_row(
            METRICS[one.tag].title, str(one.pairs), *(milliseconds(v) for v in values), interval
        )
    print_table(console, title, shown)
    console.print(
        f"requests: {result.common} in both, {result.only_a} only in A, {result.only_b} only in B; "
        f"{result.comparable} ok in both",
        soft_wrap=True,
    )
    if not result.has_same_text:
        console.print("outputs are not compared: each run had its own words", soft_wrap=True)
        return
    console.print(
        f"identical output: {result.identical} of {result.comparable} requests", soft_wrap=True
    )
    if result.different:
        first = ", ".join(result.different[:SHOWN_IDS])
        more = len(result.different) - SHOWN_IDS
        rest = f" and {more} more" if more > 0 else ""
        console.print(f"different output: {first}{rest}", soft_wrap=True, markup=False)


def kinds(text: str) -> tuple[str, ...]:
    """Read kinds of differences, joined by commas."""
    for kind in (found := names(text)):
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(KINDS)}, not {kind!r}")
    return found


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("a", type=Path, help="folder of run A")
    parser.add_argument("b", type=Path, help="folder of run B")
    parser.add_argument(
        "--require-identical",
        action="store_true",
        help="exit status 1 unless both runs are ok on the same requests with the same output",
    )
    parser.add_argument(
        "--allow",
        type=kinds,
        default=(),
        metavar="KIND,KIND",
        help=f"compare runs that also differ in these: {', '.join(KINDS)}",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the comparison; returns 1 where equal outputs are required and differ.

    Raises InputError where the runs are not a pair.
    """
    with Working("compare", "reading rows"):
        a, b = load_run(options.a, summarise), load_run(options.b, summarise)
    found = confounders(a.summary, b.summary, (a.name, b.name))
    if unallowed := [kind for kind in found if kind not in options.allow]:
        said = "; ".join(one for kind in unallowed for one in found[kind])
        raise InputError(f"no pair: {said} (--allow {','.join(found)} compares all the same)")
    if options.require_identical and not has_same_text(a.summary, b.summary):
        raise InputError("--require-identical: each run had its own words; give replay --seed N")
    with Working("compare", "pairing requests"):
        result = compare(a, b)
    print_comparison(result, a, b, console)
    equal = result.comparable == len(a.requests) == len(b.requests) and not result.different
    return 1 if options.require_identical and not equal else 0
