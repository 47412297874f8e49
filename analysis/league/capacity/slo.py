"""`analyze slo`: the highest load at which a policy keeps an SLO, by search in virtual time.

A load holds where the share of requests that keep the SLO, in the mean over seeds, is as large as
asked for. The share is of the requests that are due after the first quarter of the horizon. One
that failed has not kept it. All policies and loads have the same seeds. The proxy aims at the same
targets (`--ttft-slo`, `--tpot-slo`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import Any

from rich.console import Console

from analysis.bench.options import flag, named, numbers
from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result, workers
from analysis.bench.tables import number, say, table
from analysis.league.capacity.search import UP, Point, Search
from analysis.league.capacity.setting import (
    CapacityError,
    CapacityOptions,
    Setting,
)
from analysis.league.scale import find_setting
from analysis.league.simulate import WARM_UP_RATIO, Task, run_task
from analysis.measures import grouped
from analysis.rivals.registry import BASELINE, DEFAULT, RIVALS
from proxy.core.latency.slo import Slo
from replayer.arguments import names, not_negative, positive, positive_count
from replayer.arguments import number as read_number
from replayer.virtual.arrivals import plan

MOST_NEEDED = 100
"""A run has as many requests that are judged as one late request needs to be within the share, but
never needs more than this."""
LEAST_LOAD, MOST_LOAD = 0.001, 100.0
LEAST_WIDTH, MOST_WIDTH = 0.001, 0.5
MOST_TRIES = 100


def _share(text: str) -> float:
    if not 0.0 < (found := read_number(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number > 0 and <= 1, not {text!r}")
    return found


def _width(text: str) -> float:
    if not LEAST_WIDTH <= (found := read_number(text)) <= MOST_WIDTH:
        raise argparse.ArgumentTypeError(f"must be {LEAST_WIDTH:g} to {MOST_WIDTH:g}, not {text!r}")
    return found


def _tries(text: str) -> int:
    if (found := positive_count(text)) > MOST_TRIES:
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST_TRIES}, not {text}")
    return found


def _within(text: str) -> tuple[float, ...]:
    found = numbers(text)
    if len(found) != 2 or not LEAST_LOAD <= found[0] < found[1] <= MOST_LOAD:
        raise argparse.ArgumentTypeError(
            f"must be LEAST,MOST, of {LEAST_LOAD:g} to {MOST_LOAD:g}, not {text!r}"
        )
    return found


@dataclass(frozen=True, slots=True)
class SloOptions(CapacityOptions):
    """The options."""

    seeds: int = flag(positive_count, "runs of each load and policy", 3)
    policies: tuple[str, ...] = flag(
        names, f"names from {', '.join(RIVALS)}, comma separated", (DEFAULT, BASELINE)
    )
    ttft_s: float = flag(positive, "TTFT target, seconds", 2.0)
    ttft_per_token_s: float = flag(
        not_negative, "seconds that the TTFT target is longer per new token of a prompt", 0.0
    )
    tpot_s: float = flag(positive, "TPOT target, seconds", 0.05)
    share: float = flag(_share, "share of requests that have to meet both targets", 0.95)
    within: tuple[float, ...] = flag(
        _within, "lowest and highest load to try, as parts of the saturation rate", (0.05, 4.0)
    )
    width: float = flag(_width, "how near to each other the search brings both sides", 0.02)
    tries: int = flag(_tries, f"most loads to try for each policy, 1 to {MOST_TRIES}", 20)

    def check(self) -> None:
        """Raise CapacityError for an unknown name, or none."""
        CapacityOptions.check(self)
        named("policies", self.policies, RIVALS, CapacityError)
        if not self.policies:
            raise CapacityError(f"--policies: must be of {', '.join(RIVALS)}")

    @property
    def slo(self) -> Slo:
        """The targets."""
        return Slo(self.ttft_s, self.ttft_per_token_s, self.tpot_s)

    @property
    def needed(self) -> int:
        """The least number of judged requests of a run."""
        missing = 1.0 - self.share
        return MOST_NEEDED if missing <= 1 / MOST_NEEDED else math.ceil(1 / missing - 1e-9)


@dataclass(frozen=True, slots=True)
class Limit:
    """What was found of a policy. `rates`: judged requests per second, by load."""

    policy: str
    search: Search
    rates: dict[float, float]

    @property
    def load(self) -> float | None:
        """The highest load that holds, if any does."""
        last, _first = self.search.bracket()
        return None if last is None else last.load

    @property
    def is_open(self) -> bool:
        """Whether every load holds that was tried."""
        return self.search.bracket()[1] is None

    def overlaps(self, other: Limit) -> bool:
        """Whether two brackets have loads in common, both having two sides."""
        sides = *self.search.bracket(), *other.search.bracket()
        low, high, other_low, other_high = (one.load for one in sides if one is not None)
        return low < other_high and other_low < high

    def document(self) -> dict[str, Any]:
        """Return the JSON form; null: none of the loads that were tried."""
        last, first = (None if one is None else self._point(one) for one in self.search.bracket())
        return {
            "policy": self.policy,
            "holds": last,
            "first_not": first,
            "load_by_seed": self.search.by_seed(),
            "is_cut": self.search.is_cut,
            "tried": [self._point(one) for one in self.search.points],
        }

    def _point(self, point: Point) -> dict[str, Any]:
        rate = self.rates[point.load]
        return {**asdict(point), "share": point.share, "requests_per_s": rate}


def run_slo(
    options: SloOptions, steps: Callable[[int, int], None], tell: Callable[[str], None]
) -> tuple[Setting, list[Limit], list[dict[str, Any]]]:
    """Find the scale, then search for every policy's limit; also returns the rows of all runs.

    The policies are searched side by side. `tell` is told what is done without rows.
    """
    setting = _aimed(find_setting(options, tell), options)
    least = least_load(setting, options)
    if least > options.within[0]:
        tell(
            f"lowest load {least:.3g}: at lower ones a run has less than {options.needed} requests"
        )
    searches = {
        policy: Search(options.share, least, options.within[1], options.width, options.tries)
        for policy in options.policies
    }
    rows: list[dict[str, Any]] = []
    with workers(options.jobs, SloOptions.load, options, setting.source) as compute:
        while tasks := _tasks(searches, setting, options):
            expected = len(rows) + sum(one.left() for one in searches.values()) * options.seeds
            for row in compute(partial(run_task, slo=options.slo), tasks):
                rows.append(row)
                steps(len(rows), expected)
            _tell(searches, rows[-len(tasks) :])
    judged_s = (1.0 - WARM_UP_RATIO) * setting.rules.horizon_s
    return setting, [_limit(name, one, rows, judged_s) for name, one in searches.items()], rows


def _aimed(setting: Setting, options: SloOptions) -> Setting:
    """Give the proxy the targets. The requests of a load do not depend on them."""
    aims = {"ttft_slo_s": options.ttft_s, "tpot_slo_s": options.tpot_s}
    fleet = replace(setting.fleet, options={**setting.fleet.options, **aims})
    return replace(setting, fleet=fleet)


def least_load(setting: Setting, options: SloOptions) -> float:
    """Return the lowest load to try: with enough requests in the run of every seed."""
    load, most = options.within
    while any(_judged(setting, load, seed) < options.needed for seed in options.drawn):
        load *= UP
        if load >= most:
            raise CapacityError(
                f"--horizon: must be longer than {setting.rules.horizon_s:.3g}, or --within end "
                f"above {most:g}: a run would have less than {options.needed} requests to judge"
            )
    return load


def _judged(setting: Setting, load: float, seed: int) -> int:
    """Count the requests of a run that will be judged."""
    rules = setting.at(load, seed)
    warm_s = WARM_UP_RATIO * rules.horizon_s
    return sum(one.due_s >= warm_s for one in plan(setting.source, rules))


def _tasks(searches: dict[str, Search], setting: Setting, options: SloOptions) -> list[Task]:
    """The runs of every policy's next load."""
    return [
        Task(policy, load, setting.scale.regime, "none", setting.at(load, seed), setting.fleet)
        for policy, search in searches.items()
        if (load := search.next_load()) is not None
        for seed in options.drawn
    ]


def _tell(searches: dict[str, Search], rows: Sequence[dict[str, Any]]) -> None:
    for policy, search in searches.items():
        found = [row for row in rows if row["policy"] == policy]
        if found:
            search.told(found[0]["load"], [row["goodput_ratio"] for row in found])


def _limit(policy: str, search: Search, rows: Sequence[dict[str, Any]], judged_s: float) -> Limit:
    rates = {
        load: fmean(row["requests"] for row in part) / judged_s
        for load, part in grouped(rows, itemgetter("load")).items()
    }
    return Limit(policy, search, rates)


def sentences(limits: Sequence[Limit], options: SloOptions) -> list[str]:
    """Say how far the default policy, or the first one, keeps the SLO, beside the baseline.

    Another sentence says where the search was cut.
    """
    by = {one.policy: one for one in limits}
    ours = by.get(DEFAULT, limits[0])
    others = [one for one in limits if one is not ours]
    said = f"{ours.policy} keeps {targets(options)} for {100 * options.share:g} % of requests "
    said += _how_far(ours)
    if others:
        said += _beside(ours, by[BASELINE] if by.get(BASELINE) in others else others[0])
    cut = [one.policy for one in limits if one.search.is_cut]
    if not cut:
        return [f"{said}."]
    return [f"{said}.", f"not searched to the end, by --tries {options.tries}: {', '.join(cut)}"]


def targets(options: SloOptions) -> str:
    """Write the targets."""
    per_token = options.ttft_per_token_s
    longer = f" + {1e3 * per_token:g} ms per new token" if per_token else ""
    return f"TTFT <= {options.ttft_s:g} s{longer} and TPOT <= {1e3 * options.tpot_s:g} ms"


def _how_far(one: Limit) -> str:
    if one.load is None:
        lowest = one.search.points[0]
        return (
            f"at no load that was tried: at load {lowest.load:.3g}, the lowest "
            f"({one.rates[lowest.load]:.3g} requests/s), {100 * lowest.share:.1f} % have it"
        )
    least, most = min(one.search.by_seed()), max(one.search.by_seed())
    spread = f", by seed {least:.3g} to {most:.3g}" if least < most else ""
    highest = ", the highest that was tried" if one.is_open else ""
    return f"up to {one.rates[one.load]:.3g} requests/s (load {one.load:.3g}{spread}{highest})"


def _beside(ours: Limit, other: Limit) -> str:
    """Compare two limits; the ratio is of loads, as the requests of two loads are not the same."""
    if ours.load is None or other.load is None:
        both = ours.load is None and other.load is None
        return f"; {other.policy} {'at none either' if both else _how_far(other)}"
    if ours.is_open or other.is_open:
        both = ours.is_open and other.is_open
        return f", as does {other.policy}" if both else f"; {other.policy} {_how_far(other)}"
    if ours.overlaps(other):
        return f", as far as {other.policy}: their brackets overlap"
    ratio = ours.load / other.load - 1.0
    more = "more" if ratio > 0 else "less"
    pairs = list(zip(ours.search.by_seed(), other.search.by_seed(), strict=True))
    agree = sum(mine > theirs if ratio > 0 else mine < theirs for mine, theirs in pairs)
    seeds = f" ({more} in {agree} of {len(pairs)} seeds)" if len(pairs) > 1 else ""
    return f", {100 * abs(ratio):.0f} % {more} than {other.policy}{seeds}"


COLUMNS = (
    "policy",
    "requests/s",
    "holds at load",
    "share %",
    "not at load",
    "share %",
    "load by seed",
    "loads",
    "runs",
)


def print_slo(limits: Sequence[Limit], console: Console) -> None:
    """Print a line per policy."""
    made = table("the highest load that holds", COLUMNS)
    for one in limits:
        points, by_seed = one.search.points, one.search.by_seed()
        made.add_row(
            one.policy,
            "-" if one.load is None else f"{one.rates[one.load]:.3g}",
            *chain.from_iterable(map(_side, one.search.bracket())),
            "-".join(dict.fromkeys(f"{one:.3g}" for one in (min(by_seed), max(by_seed)))),
            str(len(points)),
            str(sum(len(point.shares) for point in points)),
        )
    console.print(made)


def _side(point: Point | None) -> tuple[str, str]:
    if point is None:
        return "-", "-"
    shares = [number(share, 1, 100.0) for share in (min(point.shares), max(point.shares))]
    spread = f" [{'-'.join(shares)}]" if len(point.shares) > 1 else ""
    return f"{point.load:.3g}", number(point.share, 1, 100.0) + spread


def _perform(options: SloOptions, console: Console) -> Result:
    steps = Steps("slo", of="of about")
    setting, limits, rows = run_slo(options, steps, steps.say)
    for line in sentences(limits, options):
        say(console, line)
    print_slo(limits, console)
    say(console, "share: mean over seeds [of the seeds]; a failed request has not met its targets")
    document = {
        "trace": options.trace.name,
        "profile": options.profile,
        "instances": options.instances,
        "saturation_rate": setting.scale.rate,
        "kv_tokens_per_engine": round(setting.scale.kv_tokens),
        "horizon_s": setting.rules.horizon_s,
        "think_cap_s": options.think_cap_s,
        "timeout_s": options.timeout_s,
        "slo": {**asdict(options.slo), "share": options.share},
        "policies": [one.document() for one in limits],
        "rows": rows,
    }
    return Result(document)


SLO = Experiment(SloOptions, _perform)
declare, run = SLO.declare, SLO.run
