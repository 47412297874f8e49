"""The league: every policy on the same trace, fleet, loads and seeds, in virtual time.

Rows are computed by worker processes that share nothing; each row depends on its task alone, so
the result does not depend on their number.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.options import UNSET, flag, named, numbers
from analysis.bench.progress import Steps
from analysis.bench.runner import Compute, Experiment, Result, rows_of, workers
from analysis.league.closed import (
    HORIZON_S,
    KV_TOKENS,
    LOADS,
    OUTPUT_TOKENS,
    REGIME,
    ClosedLoad,
    closed_loads,
    closed_source,
)
from analysis.league.figures import write_figures
from analysis.league.fleet import EngineFleet, Scale, given_scale
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.profiles import PROFILES, left_out
from analysis.league.scale import (
    REGIMES,
    USUAL_HORIZON_S,
    Bench,
    cell_doubt,
    scale_work_tokens,
)
from analysis.league.simulate import Task, run_task
from analysis.league.summary import CELL, print_league, summarise
from analysis.league.verdict import print_verdicts, sentence
from analysis.measures import grouped
from analysis.rivals.registry import BASELINE, RIVALS
from proxy.core.sharing.apply import SILENT_S
from replayer.arguments import (
    InputError,
    count,
    names,
    not_negative,
    positive,
    positive_count,
)
from replayer.virtual.arrivals import LoadRules, SlotRules
from replayer.virtual.load import LeftOut, Source
from replayer.virtual.requests import BALANCES, ReplicaOptions

MOST_REPLICAS = 64
USUAL_TICK_S = 0.025
Cell = tuple[str, str, float]
"""Regime, perturbation, load."""


class LeagueError(InputError):
    """The league cannot be run as asked; the text is one line for the user."""


USUAL_CLOSED: dict[str, Any] = {"instances": 4, "think_cap_s": 10.0, "timeout_s": 300.0}
"""Defaults of options that differ with `--closed`."""


def _policies(text: str) -> tuple[str, ...]:
    return tuple(RIVALS) if text == "all" else names(text)


def _replicas(text: str) -> int:
    if not 1 <= (found := positive_count(text)) <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"must be 1 to {MOST_REPLICAS}, not {text}")
    return found


def _tick_s(text: str) -> float | None:
    if text == "none":
        return None
    if (tick_ms := positive(text)) > SILENT_S * 1e3:
        raise argparse.ArgumentTypeError(
            f"must be none, or milliseconds up to {SILENT_S * 1e3:g}, not {text}"
        )
    return tick_ms / 1e3


def _perturbations(text: str) -> tuple[str, ...]:
    return tuple(PERTURBATIONS) if names(text) == ("all",) else names(text)


@dataclass(frozen=True, slots=True)
class LeagueOptions:
    """The options of a league; times in virtual seconds.

    `horizon_s` None: by the trace. `given`: a scale of an earlier run, instead of a search for the
    scales of `regimes`. `closed`: closed loops instead of loads at a rate.
    """

    trace: Path = flag(Path, "trace file, as for replay", name="")
    profile: str = flag(str, f"engines and network: {', '.join(PROFILES)}", "h100")
    instances: int = flag(positive_count, "engines (default: 8, with --closed 4)", 8, shown=UNSET)
    loads: tuple[float, ...] = flag(
        numbers,
        "loads, as parts of the saturation rate, comma separated",
        (0.5, 0.8, 1.0),
        name="load",
    )
    policies: tuple[str, ...] = flag(
        _policies, f"all, or names from {', '.join(RIVALS)}", tuple(RIVALS), shown="all"
    )
    seeds: int = flag(positive_count, "runs per policy and load", 3)
    first_seed: int = flag(count, "lowest of the seeds, which are consecutive", 0)
    regimes: tuple[str, ...] = flag(
        names, "working set: fits the fleet's KV, or exceeds it", tuple(REGIMES), name="regime"
    )
    given: Scale | None = flag(
        given_scale,
        "RATE:KV instead of --regime: load 1.0 and KV tokens per engine",
        None,
        name="scale",
    )
    closed: tuple[ClosedLoad, ...] = flag(
        closed_loads,
        "closed loop instead of --load, --regime and --perturb: "
        f"{', '.join(LOADS)}, or SESSIONS/UNITS (at a time and in total), comma separated",
        (),
    )
    kv_tokens: int = flag(positive_count, "with --closed: KV of an engine", KV_TOKENS)
    perturbations: tuple[str, ...] = flag(
        _perturbations,
        f"names from {', '.join(PERTURBATIONS)}, or all",
        ("none",),
        name="perturb",
    )
    migration_limit: int = flag(
        count, "as the proxy's --migration-limit: most migrations of a started stream", 0
    )
    replicas: int = flag(
        _replicas,
        f"routers that requests are balanced over, 1 to {MOST_REPLICAS}",
        1,
    )
    balance: str = flag(
        str, f"each request, or all of a session to one router: {' or '.join(BALANCES)}", "random"
    )
    share_tick_s: float | None = flag(
        _tick_s,
        "milliseconds between two exchanges of what routers know, or none: they share nothing",
        USUAL_TICK_S,
        shown=f"{USUAL_TICK_S * 1e3:g}",
    )
    horizon_s: float | None = flag(
        positive,
        f"virtual seconds of load (default: {USUAL_HORIZON_S:g}, less for a short trace)",
        None,
        shown=UNSET,
    )
    think_cap_s: float = flag(
        not_negative,
        "longest pause between two turns, seconds (default: 60, with --closed 10)",
        60.0,
        shown=UNSET,
    )
    timeout_s: float = flag(
        positive,
        "seconds to the first token after which a request fails (default: 60, with --closed 300)",
        60.0,
        shown=UNSET,
    )
    jobs: int = flag(positive_count, "worker processes", 1, shown=os.cpu_count() or 1)
    json: Path | None = flag(Path, "file for all rows", None)
    figures: Path | None = flag(Path, "folder for a figure per load", None)

    def check(self) -> None:
        """Raise LeagueError for an unknown name, or engines too small for any request."""
        named("policies", self.policies, RIVALS, LeagueError)
        named("regime", self.regimes, REGIMES, LeagueError)
        named("perturb", self.perturbations, PERTURBATIONS, LeagueError)
        named("profile", (self.profile,), PROFILES, LeagueError)
        named("balance", (self.balance,), BALANCES, LeagueError)
        if self.replicas > 1 and "hot-engine" in self.perturbations:
            raise LeagueError("--perturb: hot-engine must be with --replicas 1")
        if self.closed and self.kv_tokens <= OUTPUT_TOKENS:
            raise LeagueError(
                f"--kv-tokens: must be more than an answer's {OUTPUT_TOKENS}, not {self.kv_tokens}"
            )

    def shared(self) -> dict[str, Any]:
        """Return what is said of the replicas, where there are several."""
        if self.replicas == 1:
            return {}
        tick_s = self.share_tick_s
        return {"replicas": self.replicas, "balance": self.balance, "share_tick_s": tick_s}

    def load(self) -> Source:
        """Read the trace, as far as it is this league's load."""
        if self.closed:
            return closed_source(self.trace, PROFILES[self.profile].block_tokens, self.kv_tokens)
        kv_tokens = self.given.kv_tokens if self.given is not None else None
        return PROFILES[self.profile].read(self.trace, self.timeout_s, kv_tokens)


def _scale(source: Source, job: tuple[str, LeagueOptions]) -> Scale:
    regime, options = job
    # In a worker, which writes a line on stderr as this process does.
    return REGIMES[regime](replace(_bench(source, options), say=Steps(f"league: {regime}").say))


def _bench(source: Source, options: LeagueOptions) -> Bench:
    rules = LoadRules(1.0, options.horizon_s or 0.0, think_cap_s=options.think_cap_s)
    return Bench(source, options.instances, rules, options.timeout_s, PROFILES[options.profile])


@dataclass(frozen=True, slots=True)
class League:
    """The results: one scale per regime, none of a closed loop; one row of figures per task.

    `doubts`: what speaks against the load of a cell, by cell. `options`: those it was run with,
    the horizon included.
    """

    scales: list[Scale]
    rows: list[dict[str, Any]]
    left_out: LeftOut
    doubts: dict[Cell, str]
    options: LeagueOptions

    def document(self) -> dict[str, Any]:
        """Return the JSON form; null is infinite or absent."""
        options = self.options
        return {
            "trace": options.trace.name,
            "profile": options.profile,
            "instances": options.instances,
            "horizon_s": options.horizon_s,
            "think_cap_s": options.think_cap_s,
            "timeout_s": options.timeout_s,
            "migration_limit": options.migration_limit,
            **options.shared(),
            "baseline": BASELINE,
            "left_out": asdict(self.left_out),
            "regimes": [
                {
                    "regime": one.regime,
                    "saturation_rate": one.rate,
                    "kv_tokens_per_engine": round(one.kv_tokens),
                    "working_set_tokens": round(one.working_set_tokens),
                    "doubt": one.doubt or None,
                }
                for one in self.scales
            ],
            "doubts": [
                {"regime": regime, "perturb": perturb, "load": load, "doubt": doubt}
                for (regime, perturb, load), doubt in self.doubts.items()
            ],
            "rows": self.rows,
        }


def run_league(
    options: LeagueOptions,
    progress: Callable[[int, int], None],
    say: Callable[[str], None] = lambda _what: None,
) -> League:
    """Find the scales, then compute every row; `say` is told what is done without rows."""
    options.check()
    source = options.load()
    if options.horizon_s is None:
        horizon_s = _bench(source, options).usual_horizon_s()
        if horizon_s < USUAL_HORIZON_S and not options.closed:
            say(f"--horizon {horizon_s:.3g}: the trace is short")
        options = replace(options, horizon_s=horizon_s)
    with workers(options.jobs, LeagueOptions.load, options, source) as compute:
        scales: list[Scale] = []
        if options.closed:
            tasks = list(_closed_tasks(source, options))
        else:
            scales = list(_scales(options, compute, say))
            tasks = [task for scale in scales for task in _tasks(source, options, scale)]
        rows = rows_of(compute(run_task, tasks), len(tasks), progress)
    doubts = _doubts(source, options, scales, rows)
    return League(scales, rows, source.left_out, doubts, options)


def _scales(
    options: LeagueOptions, compute: Compute, say: Callable[[str], None]
) -> Iterator[Scale]:
    """Yield the scale that was given, or one for each regime, searched for side by side."""
    if options.given is not None:
        yield options.given
        return
    say(f"looking for the load that {options.instances} engines take: {', '.join(options.regimes)}")
    for scale in compute(_scale, [(regime, options) for regime in options.regimes]):
        say(f"load 1.0 of {scale.regime} is {scale.rate:.3g} session starts per second")
        yield scale


def _doubts(
    source: Source, options: LeagueOptions, scales: list[Scale], rows: list[dict[str, Any]]
) -> dict[Cell, str]:
    """Doubts about each cell; perturbed cells and closed loops make no claim."""
    tokens = {}
    for one in scales:
        rules = LoadRules(one.rate, options.horizon_s or 0.0, think_cap_s=options.think_cap_s)
        tokens[one.regime] = scale_work_tokens(source, rules)
    claiming = [row for row in rows if row["perturb"] == "none" and row["regime"] in tokens]
    found = {}
    for (regime, perturb, load), part in grouped(claiming, itemgetter(*CELL)).items():
        if doubt := cell_doubt(regime, load, part, tokens[regime]):
            found[regime, perturb, load] = doubt
    return found


def _seeds(options: LeagueOptions) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _fleet(
    source: Source, options: LeagueOptions, kv_tokens: float, horizon_s: float
) -> EngineFleet:
    profile = PROFILES[options.profile]
    made = profile.fleet(source, options.instances, kv_tokens, options.timeout_s, horizon_s)
    replicas = ReplicaOptions(options.replicas, options.balance, options.share_tick_s)
    return replace(made, migration_limit=options.migration_limit, replicas=replicas)


def _tasks(source: Source, options: LeagueOptions, scale: Scale) -> Iterator[Task]:
    horizon_s = options.horizon_s or 0.0
    usual = _fleet(source, options, scale.kv_tokens, horizon_s)
    for load in options.loads:
        for seed in _seeds(options):
            rules = LoadRules(load * scale.rate, horizon_s, seed, options.think_cap_s)
            for perturb in options.perturbations:
                changed, fleet = PERTURBATIONS[perturb](rules, usual)
                for policy in options.policies:
                    yield Task(policy, load, scale.regime, perturb, changed, fleet)


def _closed_tasks(source: Source, options: LeagueOptions) -> Iterator[Task]:
    fleet = _fleet(source, options, options.kv_tokens, HORIZON_S)
    for load in options.closed:
        for seed in _seeds(options):
            rules = SlotRules(load.sessions, load.units, seed, options.think_cap_s)
            for policy in options.policies:
                yield Task(policy, load.sessions, REGIME, "none", rules, fleet)


def _perform(options: LeagueOptions, console: Console) -> Result:
    steps = Steps("league")
    league = run_league(options, steps, steps.say)
    if league.left_out.requests:
        console.print(left_out(league.left_out), soft_wrap=True, markup=False)
    print_league(league.scales, league.rows, league.doubts, console)
    summary = summarise(league.rows)
    print_verdicts(summary, console, league.doubts)

    def figures() -> Sequence[str]:
        if options.figures is None:
            return ()
        return write_figures(options.figures, league.rows, options.trace.name)

    said = sentence(summary, options.policies)
    return Result(league.document(), (said,) if said else (), figures)


LEAGUE = Experiment(
    LeagueOptions, _perform, usual=lambda given: USUAL_CLOSED if vars(given).get("closed") else {}
)
declare, run = LEAGUE.declare, LEAGUE.run
