"""Offered load beyond what a fleet can carry, in virtual time: what is still served well.

A rule is a policy of the league, alone, with busy thresholds, or with `--late refuse`:
`cost+0.7/5000` refuses where an instance has 70 % of its KV in use, or 5,000 tokens of prefills.
With `+now` nobody waits in the queue, as the founding thresholds were meant. With `+fixed` nobody
waits either, and each instance has the limit of requests in flight that does best in that cell,
found in hindsight: no rule that could be set beforehand. `bound_ratio`: good answers by the horizon
over the most that any admission could get (`bound`).
Clients that are refused come again in one of four ways. Goodput is of answers that ended between
the warm-up and the horizon, per second, and kept the SLO. Their TTFT counts from the try that was
served, as a proxy sees it: who was refused and told when to come again is not late. It holds where
it stays at its best: `held_ratio` is the goodput over the most that the rule has at any load.

The loop is open as far as sessions let it: a session's next turn waits for the one before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console

from analysis.bench.finished import of_virtual, times
from analysis.bench.options import flag, named, numbers
from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result, rows_of, workers
from analysis.bench.tables import number, say, table
from analysis.league.capacity.bound import most_answers
from analysis.league.capacity.setting import (
    CapacityError,
    CapacityOptions,
    Setting,
)
from analysis.league.fleet import EngineFleet, Scale
from analysis.league.scale import find_setting
from analysis.league.simulate import WARM_UP_RATIO, run_rival
from analysis.measures import grouped
from analysis.rivals.registry import RIVALS, Rival
from proxy.core.admission.queue import QueueLimits
from proxy.core.latency.slo import Slo
from proxy.core.types import Thresholds
from replayer.arguments import names
from replayer.virtual.arrivals import LoadRules, Planned, plan
from replayer.virtual.load import Source
from replayer.virtual.requests import Retry, VirtualRow, VirtualRun, keeps_slo

CLIENTS: Mapping[str, Retry] = {
    "patient": Retry(),
    "sdk": Retry(most=2),
    "hasty": Retry(pause_s=0.5),
    "gone": Retry(most=0),
}
"""Clients that are refused: come again as Retry-After says; the same, twice at most; come again
after half a second whatever is said; do not come again."""
USUAL_RULES = (
    "cost",
    "cost+late",
    "cost+fixed",
    "cost+0.7/5000",
    "cost+0.95/20000",
    "cost+0.7/5000+now",
    "cost+0.95/20000+now",
    "threshold",
    "cache-aware",
    "session-sticky",
)
"""The default, with `--late refuse`, with the best fixed limit, with the founding thresholds for
latency and for throughput, these without a queue, and other rules."""
NOW, FIXED = "now", "fixed"
NO_QUEUE = QueueLimits(0, 0, 0.0)
LIMITS = (2, 4, 8, 16, 32, 64, 128)
"""Limits that are tried first; then those beside the best one."""
BETWEEN = (0.75, 1.5)
FULL = 1.5
"""From this load on a fleet is taken to be offered more than it can carry."""


def rule(text: str) -> tuple[str, dict[str, Any]]:
    """Read POLICY, and what may follow: +BLOCKS/TOKENS, either of them `-`; +late; +now or +fixed.

    Returns the policy, and the fields of RouterConfig that it is to have.
    """
    policy, *more = text.split("+")
    if more and more[-1] in (NOW, FIXED):
        del more[-1]
    if policy not in RIVALS:
        raise argparse.ArgumentTypeError(f"{policy!r} is no policy: {', '.join(RIVALS)}")
    options: dict[str, Any] = {}
    if more and more[-1] == "late":
        options["late"] = "refuse"
        del more[-1]
    if more:
        options["thresholds"] = _thresholds(text, "+".join(more))
    return policy, options


def _thresholds(text: str, given: str) -> Thresholds:
    blocks, slash, tokens = given.partition("/")
    try:
        if not slash:
            raise ValueError
        ratio = None if blocks == "-" else float(blocks)
        most = None if tokens == "-" else int(tokens)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be POLICY or POLICY+BLOCKS/TOKENS as cost+0.7/5000, "
            "then +late, then +now or +fixed"
        ) from None
    if not (ratio is None or 0.0 <= ratio <= 1.0) or not (most is None or most >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: BLOCKS must be 0 to 1, TOKENS 0 or more")
    return Thresholds(ratio, most)


def _rules(text: str) -> tuple[str, ...]:
    found = names(text)
    for one in found:
        rule(one)
    return found


@dataclass(frozen=True, slots=True)
class OverloadOptions(CapacityOptions):
    """The options."""

    loads: tuple[float, ...] = flag(
        numbers,
        "loads, as parts of the saturation rate, comma separated",
        (0.8, 1.0, 1.5, 2.0, 5.0),
        name="load",
    )
    rules: tuple[str, ...] = flag(
        _rules,
        "POLICY or POLICY+BLOCKS/TOKENS, then +late, then +now or +fixed, comma separated",
        USUAL_RULES,
    )
    clients: tuple[str, ...] = flag(
        names, f"who is refused: {', '.join(CLIENTS)}", ("patient", "hasty")
    )

    def check(self) -> None:
        """Raise CapacityError for an unknown name."""
        CapacityOptions.check(self)
        named("clients", self.clients, CLIENTS, CapacityError)


@dataclass(frozen=True, slots=True)
class Task:
    """One row to compute."""

    rule: str
    clients: str
    load: float
    rules: LoadRules
    fleet: EngineFleet


def run_task(source: Source, task: Task) -> dict[str, Any]:
    """Simulate a task and return its row."""
    policy, options = rule(task.rule)
    rival = RIVALS[policy]
    with_options = Rival(rival.source, rival.make, {**rival.options, **options})
    fleet = replace(task.fleet, retry=CLIENTS[task.clients])
    ending = task.rule.rpartition("+")[2]
    if ending in (NOW, FIXED):
        fleet = replace(fleet, queue=NO_QUEUE)
    planned = plan(source, task.rules)

    def row(limit: int | None) -> dict[str, Any]:
        run = run_rival(with_options, planned, replace(fleet, cap=limit), source.block_tokens)
        return {"limit": limit, **figures(run, planned, task.rules)}

    found = best_limit(row) if ending == FIXED else row(None)
    told = {"rule": task.rule, "clients": task.clients, "load": task.load, "seed": task.rules.seed}
    bound = most_answers(planned, fleet, task.rules.horizon_s)
    return {**told, **found, "bound": bound, "bound_ratio": found["good"] / max(1, bound)}


def best_limit(row: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Return the row with most goodput over LIMITS, and those beside the best; the lowest limit."""

    def goodput(one: Mapping[str, Any]) -> float:
        return float(one["goodput_per_s"])

    best = max([row(limit) for limit in LIMITS], key=goodput)
    beside = [row(round(best["limit"] * factor)) for factor in BETWEEN]
    return max([best, *beside], key=goodput)


def figures(run: VirtualRun, planned: Sequence[Planned], rules: LoadRules) -> dict[str, Any]:
    """Compute a row's figures; times in seconds.

    Of the answers that ended between the warm-up and the horizon: `goodput_per_s`, `late_per_s`,
    and the times. The others are of the requests that were due then. `first_ratio`: the share that
    kept the SLO at the first try. `unserved_ratio`: the share that was refused or timed out in the
    end. `refusals`: each try counts. `streak`: the most refusals in a row of any session. `good`:
    answers that kept the SLO by the horizon, from its start.
    """
    from_s, to_s = WARM_UP_RATIO * rules.horizon_s, rules.horizon_s
    due = [row for row, one in zip(run.rows, planned, strict=True) if one.due_s >= from_s]
    ended = [row for row in run.rows if row.end_s is not None and from_s <= row.end_s <= to_s]
    answers = [of_virtual(_from_last_try(row), rules.slo) for row in ended]
    good = sum(bool(one.keeps_slo) for one in answers)
    first = sum(not row.rejects and keeps_slo(row, rules.slo) for row in due)
    by_horizon = [row for row in run.rows if row.end_s is not None and row.end_s <= to_s]
    refused = [row for row in due if row.rejects]
    return {
        "requests": len(due),
        "good": sum(keeps_slo(_from_last_try(row), rules.slo) for row in by_horizon),
        "back_ratio": _back_ratio(refused, rules.slo),
        "long_ratio": _long_ratio(due),
        "goodput_per_s": good / (to_s - from_s),
        "late_per_s": (len(answers) - good) / (to_s - from_s),
        "first_ratio": first / max(1, len(due)),
        "unserved_ratio": sum(row.outcome != "ok" for row in due) / max(1, len(due)),
        "refusals": sum(row.rejects for row in due),
        "streak": longest_streak(due),
        "ttft_s": times(answers, "ttft_s", "p50", "p90", answered=True),
        "tpot_s": times(answers, "tpot_s", "p50", "p90", answered=True),
        "drift": run.drift,
    }


def _back_ratio(refused: Sequence[VirtualRow], slo: Slo) -> float | None:
    """The share of the requests that were refused that kept the SLO at their second try."""
    if not refused:
        return None
    good = [row.rejects == 1 and keeps_slo(_from_last_try(row), slo) for row in refused]
    return sum(good) / len(good)


def _long_ratio(due: Sequence[VirtualRow]) -> float | None:
    """How many prompts of the longest quarter are served, over the share of the others.

    None where none of the others is served.
    """
    by_length = sorted(due, key=lambda row: row.prompt_tokens)
    at = len(by_length) * 3 // 4
    short, long = [
        sum(row.outcome == "ok" for row in part) / max(1, len(part))
        for part in (by_length[:at], by_length[at:])
    ]
    return long / short if short else None


def _from_last_try(row: VirtualRow) -> VirtualRow:
    """The row as if the client had sent it once only, when it did last."""
    if row.sent_s is None or row.ttft_s is None:
        return row
    return replace(row, arrival_s=row.sent_s, ttft_s=row.ttft_s - row.waited_s)


def longest_streak(rows: Sequence[VirtualRow]) -> int:
    """Return the most refusals in a row that any session had, over all its requests."""
    streaks: dict[str, int] = {}
    longest = 0
    for row in sorted(rows, key=lambda one: one.arrival_s):
        streak = streaks.get(row.session_id, 0) + row.rejects
        longest = max(longest, streak)
        streaks[row.session_id] = 0 if row.outcome == "ok" else streak
    return longest


def run_overload(
    options: OverloadOptions, steps: Callable[[int, int], None], tell: Callable[[str], None]
) -> tuple[Scale, list[dict[str, Any]]]:
    """Find the scale, then compute every row; `tell` is told what is done without rows."""
    setting = find_setting(options, tell)
    tasks = list(_tasks(options, setting))
    with workers(options.jobs, OverloadOptions.load, options, setting.source) as compute:
        return setting.scale, rows_of(compute(run_task, tasks), len(tasks), steps)


def _tasks(options: OverloadOptions, setting: Setting) -> Iterator[Task]:
    for clients in options.clients:
        for load in options.loads:
            for seed in options.drawn:
                for one in options.rules:
                    yield Task(one, clients, load, setting.at(load, seed), setting.fleet)


MEANS = ("bound_ratio", "goodput_per_s", "late_per_s", "first_ratio", "unserved_ratio", "refusals")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per rule, clients and load: means over seeds, and the worst streak."""
    found: list[dict[str, Any]] = []
    for key, part in grouped(rows, lambda row: (row["clients"], row["rule"], row["load"])).items():
        means = {name: fmean([row[name] for row in part]) for name in MEANS}
        tails = {name: _mean([row[name]["p90"] for row in part]) for name in ("ttft_s", "tpot_s")}
        told = dict(zip(("clients", "rule", "load"), key, strict=True))
        streak = max(row["streak"] for row in part)
        some = {name: _mean([row[name] for row in part]) for name in ("back_ratio", "long_ratio")}
        limits = sorted({row["limit"] for row in part} - {None})
        found.append({**told, **means, **some, "p90": tails, "streak": streak, "limits": limits})
    best: dict[tuple[str, str], float] = {}
    for row in found:
        whose = row["clients"], row["rule"]
        best[whose] = max(best.get(whose, 0.0), row["goodput_per_s"])
    for row in found:
        most = best[row["clients"], row["rule"]]
        row["held_ratio"] = row["goodput_per_s"] / most if most else 0.0
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if known else None


def sentences(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say per kind of clients what the first rule keeps past saturation, and who keeps most."""
    said = []
    for clients, part in grouped(summary, lambda row: row["clients"]).items():
        over = [row for row in part if row["load"] >= FULL]
        if not over:
            continue
        first = part[0]["rule"]
        are_several = len({row["load"] for row in part}) > 1
        own = min([row for row in over if row["rule"] == first], key=lambda row: row["held_ratio"])
        beside = [row for row in over if row["load"] == own["load"]]
        most = max(beside, key=lambda row: row["goodput_per_s"])
        keeps = f"keeps {own['held_ratio']:.0%} of its best goodput" if are_several else "serves"
        said.append(
            f"{clients} clients: at load {own['load']:g} {first} {keeps}, "
            f"{own['goodput_per_s']:.3g} a second; "
            f"{most['rule']} has most, {most['goodput_per_s']:.3g}"
        )
    return said


COLUMNS = (
    "clients",
    "rule",
    "load",
    "good/s",
    "held %",
    "of the bound %",
    "limit",
    "late/s",
    "first %",
    "unserved %",
    "refusals",
    "streak",
    "back %",
    "long/short",
    "TTFT p90 s",
    "TPOT p90 ms",
)


def print_overload(summary: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a line per rule, clients and load."""
    made = table("past saturation", COLUMNS, left=2)
    for row in summary:
        made.add_row(
            row["clients"],
            row["rule"],
            f"{row['load']:g}",
            number(row["goodput_per_s"], 2),
            number(row["held_ratio"], 0, 100.0),
            number(row["bound_ratio"], 0, 100.0),
            "/".join(map(str, row["limits"])) or "-",
            number(row["late_per_s"], 2),
            *[number(row[name], 0, 100.0) for name in ("first_ratio", "unserved_ratio")],
            number(row["refusals"], 0),
            str(row["streak"]),
            number(row["back_ratio"], 0, 100.0),
            number(row["long_ratio"], 2),
            number(row["p90"]["ttft_s"], 2),
            number(row["p90"]["tpot_s"], 0, 1e3),
        )
    console.print(made)


def _perform(options: OverloadOptions, console: Console) -> Result:
    steps = Steps("overload")
    scale, rows = run_overload(options, steps, steps.say)
    summary = summarise(rows)
    print_overload(summary, console)
    say(console, "TTFT counts from the try that was served, with its wait in the queue.")
    document = {
        "trace": options.trace.name,
        "profile": options.profile,
        "instances": options.instances,
        "saturation_rate": scale.rate,
        "kv_tokens_per_engine": round(scale.kv_tokens),
        "timeout_s": options.timeout_s,
        "rows": rows,
    }
    return Result(document, sentences(summary))


OVERLOAD = Experiment(OverloadOptions, _perform)
declare, run = OVERLOAD.declare, OVERLOAD.run
