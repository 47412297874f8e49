"""The regret of a policy against an oracle that tries every action at every HEAVY decision.

This module runs the policies and their oracles, each run in a process of its own; `summary`
computes the figures. Each seed is run three times:

- watch: the policy's own run; at a sample of its HEAVY decisions every other action is tried too.
  It is repeated with a millisecond of noise on the way to the engines: a fleet is chaotic, so one
  run is a draw. Every policy meets the same noise (common random numbers);
- rollout: the oracle-controlled run, which at each HEAVY decision takes the action that turned out
  best;
- placebo: as many tries that only postpone by milliseconds, the noise floor of the rollout.

J = mean e2e + 10 s * (share of requests that miss the SLO), over all requests of the run.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.options import UNSET, flag, named
from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result, rows_of, workers
from analysis.league.fleet import EngineFleet, Scale, given_scale
from analysis.league.profiles import PROFILES
from analysis.league.scale import REGIMES, USUAL_HORIZON_S, Bench
from analysis.league.simulate import figures, make_rule, run_policy, setting
from analysis.regret.branching import BranchingFleet, Terms, objective_s
from analysis.regret.oracle import Mode, Probe
from analysis.regret.outcomes import RegretRun
from analysis.regret.summary import Regret, sentences, summarise_regret
from analysis.regret.tables import print_regret
from analysis.rivals.registry import BASELINE, RIVALS
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.slo import Slo
from proxy.core.placement.policies import POLICIES
from proxy.core.routing.router import Router
from replayer.arguments import InputError, names, positive
from replayer.virtual.arrivals import LoadRules, Planned, plan
from replayer.virtual.load import Source
from replayer.virtual.requests import VirtualRun, WayNoise

ORACLES = ("rollout", "places")
"""`places` tries no offloads: beside `rollout` it says what offloads are worth."""
MODES = ("watch", "rollout", "placebo")
REPEAT_NOISE_S = 0.001


class RegretError(InputError):
    """The regret cannot be computed as asked; the text is one line for the user."""


def _horizon(text: str) -> float:
    return math.inf if text == "end" else positive(text.removesuffix("s"))


@dataclass(frozen=True, slots=True)
class RegretOptions:
    """The options of a regret; times in virtual seconds. `load_horizon_s` None: by the trace."""

    trace: Path = flag(Path, "trace file, as for replay", name="")
    oracle: str = flag(
        str,
        "rollout: every action; places: only actions without an offload",
        "rollout",
        choices=ORACLES,
    )
    profile: str = flag(str, f"one of the league's: {', '.join(PROFILES)}", "h100")
    instances: int = flag(int, "engines", 4)
    load: float = flag(positive, "load, as a part of the saturation rate", 0.8)
    policies: tuple[str, ...] = flag(
        names, "names of the league's policies, comma separated", ("cost", BASELINE)
    )
    seeds: int = flag(int, "runs per policy", 3)
    first_seed: int = flag(int, "lowest of the seeds, which are consecutive", 0)
    decisions: int = flag(int, "HEAVY decisions examined per seed", 30)
    repeats: int = flag(int, "repetitions of a policy's own run, with noise", 8)
    futures: int = flag(int, "resampled futures per action; 1: the real one", 4)
    horizon_s: float = flag(_horizon, "how far a future goes: end, or seconds", 60.0)
    regimes: tuple[str, ...] = flag(
        names, "the working set fits or exceeds", tuple(REGIMES), name="regime"
    )
    given: Scale | None = flag(
        given_scale, "RATE:KV instead of --regime, as of the league", None, name="scale"
    )
    load_horizon_s: float | None = flag(
        positive,
        f"virtual seconds of load (default: {USUAL_HORIZON_S:g}, less for a short trace)",
        None,
        shown=UNSET,
    )
    think_cap_s: float = flag(positive, "longest pause between turns, seconds", 60.0)
    timeout_s: float = flag(
        positive, "seconds to the first token after which a request fails", 60.0
    )
    tpot_slo_s: float = flag(positive, "TPOT target of the router and of J, seconds", Slo().tpot_s)
    jobs: int = flag(int, "worker processes", 1, shown=os.cpu_count() or 1)
    json: Path | None = flag(Path, "file for summary, runs and decisions", None)

    def check(self) -> None:
        """Raise RegretError for an unknown name or a number out of range."""
        named("policies", self.policies or ("nothing",), RIVALS, RegretError)
        named("regime", self.regimes or ("nothing",), REGIMES, RegretError)
        named("profile", (self.profile,), PROFILES, RegretError)
        for option, value, least in (
            ("instances", self.instances, 2),
            ("seeds", self.seeds, 1),
            ("first-seed", self.first_seed, 0),
            ("decisions", self.decisions, 0),
            ("repeats", self.repeats, 0),
            ("futures", self.futures, 1),
            ("jobs", self.jobs, 1),
        ):
            if value < least:
                raise RegretError(f"--{option}: must be at least {least}, not {value}")

    def read(self) -> Source:
        """Read the trace, as far as engines can serve it."""
        kv_tokens = self.given.kv_tokens if self.given is not None else None
        return PROFILES[self.profile].read(self.trace, self.timeout_s, kv_tokens)


@dataclass(frozen=True, slots=True)
class RegretTask:
    """One run to compute. `decisions`: most decisions to try other actions at, in a watched run.

    `repeats`: how often a watched run is repeated with noise.

    `horizon_s`: length of a branch, virtual seconds. `futures`: how many resampled futures a branch
    has. 1 is the real one. `offloads`: whether actions with a P are tried.
    """

    policy: str
    regime: str
    mode: str
    rules: LoadRules
    fleet: EngineFleet
    decisions: int
    horizon_s: float = math.inf
    futures: int = 1
    offloads: bool = True
    repeats: int = 0


def run_regret(source: Source, task: RegretTask) -> RegretRun:
    """Simulate a task and compute its figures."""
    planned = plan(source, task.rules)
    if task.mode == "watch":
        count, _run = run_probed(task, planned, source.block_tokens, Mode.WATCH, frozenset())
        wanted = sample(count.seen, task.decisions, task.rules.seed)
        probe, run = run_probed(task, planned, source.block_tokens, Mode.WATCH, wanted)
    else:
        probe, run = run_probed(task, planned, source.block_tokens, Mode(task.mode), None)
    row = {
        "policy": task.policy,
        "regime": task.regime,
        "mode": task.mode,
        "seed": task.rules.seed,
        "objective_s": objective_s(run.rows, task.rules.slo, task.fleet.timeout_s),
        "repeated_s": repeated_s(task, planned, source.block_tokens),
        "heavy_decisions": probe.seen,
        **figures(run, planned, task.rules, task.fleet.kv_tokens),
    }
    return RegretRun(row, probe.decisions)


def repeated_s(task: RegretTask, planned: Sequence[Planned], block_tokens: int) -> list[float]:
    """Return J of each repetition of the policy's own run, in seconds."""
    fleet, found = task.fleet, []
    for repeat in range(1, task.repeats + 1):
        way = WayNoise(max(REPEAT_NOISE_S, fleet.way.mean_s), repeat)
        run = run_policy(task.policy, planned, replace(fleet, way=way), block_tokens)
        found.append(objective_s(run.rows, task.rules.slo, fleet.timeout_s))
    return found


def sample(count: int, limit: int, seed: int) -> frozenset[int]:
    """Return the numbers of the decisions to try: all, or a draw by the seed."""
    if count <= limit:
        return frozenset(range(count))
    return frozenset(random.Random(f"decisions {seed}").sample(range(count), limit))


def run_probed(
    task: RegretTask,
    planned: Sequence[Planned],
    block_tokens: int,
    mode: Mode,
    wanted: frozenset[int] | None,
) -> tuple[Probe, VirtualRun]:
    """Run the load under the policy in a Probe; `wanted` None means every decision."""
    rival = RIVALS[task.policy]
    rule = make_rule(rival, task.fleet)
    config, options = setting(rival, task.fleet, block_tokens)
    policy = rule or POLICIES[config.offload_policy]
    probe = Probe(policy, mode, wanted, offloads=task.offloads)
    terms = Terms(task.rules.slo, task.horizon_s, task.futures, task.rules.seed)
    observers = [] if rule is None else [rule]
    router = Router(FleetState(config), decide=probe)
    fleet = BranchingFleet(planned, router, options, observers, terms)
    probe.attach(fleet)
    return probe, fleet.run()


def compute_regret(
    options: RegretOptions,
    progress: Callable[[int, int], None],
    say: Callable[[str], None] = lambda _what: None,
) -> tuple[Regret, RegretOptions]:
    """Find the scales, then compute every run; the result does not depend on `jobs`.

    Returns also the options with the horizon of the load. `say` is told what is done without runs.
    """
    options.check()
    source = options.read()
    if options.load_horizon_s is None:
        horizon_s = _bench(source, options).usual_horizon_s()
        if horizon_s < USUAL_HORIZON_S:
            say(f"--load-horizon {horizon_s:.3g}: the trace is short")
        options = replace(options, load_horizon_s=horizon_s)
    with workers(options.jobs, RegretOptions.read, options, source, apart=True) as compute:
        if options.given is not None:
            scales = [options.given]
        else:
            say(f"looking for the load that {options.instances} engines take")
            scales = list(compute(_scale, [(regime, options) for regime in options.regimes]))
        tasks = [task for scale in scales for task in _tasks(options, scale, source)]
        runs = rows_of(compute(run_regret, tasks), len(tasks), progress)
    return Regret(scales, runs), options


def _scale(source: Source, job: tuple[str, RegretOptions]) -> Scale:
    regime, options = job
    # In a worker, which writes a line on stderr as this process does.
    return REGIMES[regime](replace(_bench(source, options), say=Steps(f"regret: {regime}").say))


def _bench(source: Source, options: RegretOptions) -> Bench:
    profile = PROFILES[options.profile]
    return Bench(source, options.instances, _unit_rules(options), options.timeout_s, profile)


def _unit_rules(options: RegretOptions) -> LoadRules:
    return LoadRules(
        1.0,
        options.load_horizon_s or 0.0,
        think_cap_s=options.think_cap_s,
        slo=Slo(tpot_s=options.tpot_slo_s),
    )


def _tasks(options: RegretOptions, scale: Scale, source: Source) -> Iterator[RegretTask]:
    usual = PROFILES[options.profile].fleet(
        source, options.instances, scale.kv_tokens, options.timeout_s, options.load_horizon_s or 0.0
    )
    fleet = replace(usual, options={**usual.options, "tpot_slo_s": options.tpot_slo_s})
    for policy in options.policies:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            rules = replace(_unit_rules(options), rate=options.load * scale.rate, seed=seed)
            for mode in MODES:
                yield RegretTask(
                    policy,
                    scale.regime,
                    mode,
                    rules,
                    fleet,
                    options.decisions,
                    options.horizon_s,
                    options.futures,
                    offloads=options.oracle != "places",
                    repeats=options.repeats if mode == "watch" else 0,
                )


def document(regret: Regret, options: RegretOptions) -> dict[str, Any]:
    """Return the JSON form; null is infinite, unknown or absent."""
    return {
        "trace": options.trace.name,
        "profile": options.profile,
        "oracle": options.oracle,
        "tpot_slo_s": options.tpot_slo_s,
        "instances": options.instances,
        "load": options.load,
        "horizon_s": options.horizon_s if options.horizon_s < float("inf") else None,
        "futures": options.futures,
        "repeats": options.repeats,
        "load_horizon_s": options.load_horizon_s,
        "objective": "mean e2e + 10 s * share of requests that miss the SLO",
        "regimes": [asdict(scale) for scale in regret.scales],
        "summary": summarise_regret(regret, options.policies),
        "runs": [run.row for run in regret.runs],
        "decisions": [
            {**_where(run), **decision.as_dict()}
            for run in regret.runs
            if run.row["mode"] == "watch"
            for decision in run.decisions
        ],
    }


def _where(run: RegretRun) -> dict[str, Any]:
    return {name: run.row[name] for name in ("regime", "policy", "seed")}


def _perform(options: RegretOptions, console: Console) -> Result:
    steps = Steps("regret")
    regret, options = compute_regret(options, steps, steps.say)
    print_regret(regret, options.policies, console)
    said = sentences(summarise_regret(regret, options.policies))
    return Result(document(regret, options), tuple(said))


REGRET = Experiment(RegretOptions, _perform)
declare, run = REGRET.declare, REGRET.run
