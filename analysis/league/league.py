"""The league: every policy on the same trace, fleet, loads and seeds, in virtual time.

Rows are computed by worker processes that share nothing; each row depends on its task alone, so
the result does not depend on their number.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from analysis.league.closed import (
    HORIZON_S,
    KV_TOKENS,
    OUTPUT_TOKENS,
    REGIME,
    ClosedLoad,
    closed_source,
)
from analysis.league.fleet import EngineFleet, Scale
from analysis.league.perturbations import PERTURBATIONS
from analysis.league.profiles import PROFILES
from analysis.league.scale import (
    REGIMES,
    USUAL_HORIZON_S,
    Bench,
    cell_doubt,
    scale_work_tokens,
)
from analysis.league.simulate import Task, run_task
from analysis.rivals.registry import BASELINE, RIVALS
from replayer.arguments import InputError
from replayer.virtual.arrivals import LoadRules, SlotRules
from replayer.virtual.load import LeftOut, Source

GC_OBJECTS = 200_000
Cell = tuple[str, str, float]
"""Regime, perturbation, load."""


class LeagueError(InputError):
    """The league cannot be run as asked; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class LeagueOptions:
    """The options of a league; times in virtual seconds."""

    trace: Path
    instances: int = 8
    loads: tuple[float, ...] = (0.5, 0.8, 1.0)
    policies: tuple[str, ...] = tuple(RIVALS)
    seeds: int = 3
    first_seed: int = 0
    regimes: tuple[str, ...] = tuple(REGIMES)
    perturbations: tuple[str, ...] = ("none",)
    horizon_s: float | None = USUAL_HORIZON_S
    """None: by the trace."""
    think_cap_s: float = 60.0
    timeout_s: float = 60.0
    jobs: int = 1
    given: Scale | None = None
    """A scale of an earlier run, instead of a search for the scales of `regimes`."""
    profile: str = "h100"
    closed: tuple[ClosedLoad, ...] = ()
    """Closed loops instead of loads at a rate, on engines with `kv_tokens` of KV."""
    kv_tokens: int = KV_TOKENS
    migration_limit: int = 0
    """The proxy's `--migration-limit`."""

    def check(self) -> None:
        """Raise LeagueError for an unknown name, or engines too small for any request."""
        for option, names, known in (
            ("policies", self.policies, RIVALS.keys()),
            ("regime", self.regimes, REGIMES.keys()),
            ("perturb", self.perturbations, PERTURBATIONS.keys()),
            ("profile", (self.profile,), PROFILES.keys()),
        ):
            wrong = [name for name in names if name not in known]
            if wrong:
                raise LeagueError(f"--{option}: must be of {', '.join(known)}, not {wrong[0]}")
        if self.closed and self.kv_tokens <= OUTPUT_TOKENS:
            raise LeagueError(
                f"--kv-tokens: must be more than an answer's {OUTPUT_TOKENS}, not {self.kv_tokens}"
            )

    def load(self) -> Source:
        """Read the trace, as far as it is this league's load."""
        if self.closed:
            return closed_source(self.trace, PROFILES[self.profile].block_tokens, self.kv_tokens)
        kv_tokens = self.given.kv_tokens if self.given is not None else None
        return PROFILES[self.profile].read(self.trace, self.timeout_s, kv_tokens)


_source: Source | None = None


def _start_worker(options: LeagueOptions) -> None:
    global _source  # noqa: PLW0603 - a worker process reads its trace once
    _source = options.load()
    # A run makes few cycles, and many objects that live to its end: saves a tenth of the time.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 50, 100)


def _scale(job: tuple[str, LeagueOptions]) -> Scale:
    regime, options = job
    return REGIMES[regime](_bench(options))


def _bench(options: LeagueOptions) -> Bench:
    rules = LoadRules(1.0, options.horizon_s or 0.0, think_cap_s=options.think_cap_s)
    profile = PROFILES[options.profile]
    return Bench(_read(), options.instances, rules, options.timeout_s, profile)


def _row(task: Task) -> dict[str, Any]:
    return run_task(_read(), task)


def _read() -> Source:
    if _source is None:
        raise RuntimeError("no trace was read")
    return _source


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
    _start_worker(options)
    if options.horizon_s is None:
        horizon_s = _bench(options).usual_horizon_s()
        if horizon_s < USUAL_HORIZON_S and not options.closed:
            say(f"--horizon {horizon_s:.3g}: the trace is short")
        options = replace(options, horizon_s=horizon_s)
    # Spawned, not forked: workers share nothing of this process but the arguments.
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, _start_worker, (options,)) as pool:
        scales: list[Scale] = []
        if options.closed:
            tasks = list(_closed_tasks(options))
        else:
            scales = list(_scales(options, pool, say))
            tasks = [task for scale in scales for task in _tasks(options, scale)]
        rows = []
        for row in pool.imap(_row, tasks, 1):
            rows.append(row)
            progress(len(rows), len(tasks))
    return League(scales, rows, _read().left_out, _doubts(options, scales, rows), options)


def _scales(options: LeagueOptions, pool: Pool, say: Callable[[str], None]) -> Iterator[Scale]:
    """Yield the scale that was given, or one for each regime, searched for side by side."""
    if options.given is not None:
        yield options.given
        return
    say(f"looking for the load that {options.instances} engines take: {', '.join(options.regimes)}")
    for scale in pool.imap(_scale, [(regime, options) for regime in options.regimes], 1):
        say(f"load 1.0 of {scale.regime} is {scale.rate:.3g} session starts per second")
        yield scale


def _doubts(
    options: LeagueOptions, scales: list[Scale], rows: list[dict[str, Any]]
) -> dict[Cell, str]:
    """Doubts about each cell; perturbed cells and closed loops make no claim."""
    tokens = {}
    for one in scales:
        rules = LoadRules(one.rate, options.horizon_s or 0.0, think_cap_s=options.think_cap_s)
        tokens[one.regime] = scale_work_tokens(_read(), rules)
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        if row["perturb"] == "none" and row["regime"] in tokens:
            cells.setdefault((row["regime"], row["perturb"], row["load"]), []).append(row)
    found = {}
    for (regime, perturb, load), part in cells.items():
        if doubt := cell_doubt(regime, load, part, tokens[regime]):
            found[regime, perturb, load] = doubt
    return found


def _seeds(options: LeagueOptions) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _fleet(options: LeagueOptions, kv_tokens: float, horizon_s: float) -> EngineFleet:
    profile = PROFILES[options.profile]
    made = profile.fleet(_read(), options.instances, kv_tokens, options.timeout_s, horizon_s)
    return replace(made, migration_limit=options.migration_limit)


def _tasks(options: LeagueOptions, scale: Scale) -> Iterator[Task]:
    horizon_s = options.horizon_s or 0.0
    usual = _fleet(options, scale.kv_tokens, horizon_s)
    for load in options.loads:
        for seed in _seeds(options):
            rules = LoadRules(load * scale.rate, horizon_s, seed, options.think_cap_s)
            for perturb in options.perturbations:
                changed, fleet = PERTURBATIONS[perturb](rules, usual)
                for policy in options.policies:
                    yield Task(policy, load, scale.regime, perturb, changed, fleet)


def _closed_tasks(options: LeagueOptions) -> Iterator[Task]:
    fleet = _fleet(options, options.kv_tokens, HORIZON_S)
    for load in options.closed:
        for seed in _seeds(options):
            rules = SlotRules(load.sessions, load.units, seed, options.think_cap_s)
            for policy in options.policies:
                yield Task(policy, load.sessions, REGIME, "none", rules, fleet)
