"""One worker's task for the regret: a run of one policy on one seed, with or without the oracle.

- watch: the policy's own run; at a sample of its HEAVY decisions every other action is tried too;
- rollout: the oracle-controlled run, which at each HEAVY decision takes the action that turned out
  best;
- placebo: as many tries that only postpone by milliseconds, the noise floor of the rollout.

J = mean e2e + 10 s * (share of requests that miss the SLO), over all requests of the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.league.fleet import EngineFleet
from analysis.league.simulate import figures, make_rule, setting
from analysis.regret.branching import BranchingFleet, Terms, objective_s
from analysis.regret.oracle import Mode, Probe, RegretRun
from analysis.rivals.registry import RIVALS
from proxy.core.placement.policies import POLICIES
from proxy.core.routing.router import Router
from replayer.virtual.arrivals import LoadRules, Planned, plan
from replayer.virtual.load import Source
from replayer.virtual.requests import VirtualRun

MODES = ("watch", "rollout", "placebo")


@dataclass(frozen=True, slots=True)
class RegretTask:
    """One run to compute. `decisions`: most decisions to try other actions at, in a watched run.

    `horizon_s`: length of a branch, virtual seconds; `futures`: how many resampled futures a branch
    has; 1 is the real one.
    """

    policy: str
    regime: str
    mode: str
    rules: LoadRules
    fleet: EngineFleet
    decisions: int
    horizon_s: float = math.inf
    futures: int = 1


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
        "heavy_decisions": probe.seen,
        **figures(run, planned, task.rules, task.fleet.kv_tokens),
    }
    return RegretRun(row, probe.decisions)


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
    probe = Probe(policy, mode, wanted)
    terms = Terms(task.rules.slo, task.horizon_s, task.futures, task.rules.seed)
    observers = [] if rule is None else [rule]
    router = Router(config, decide=probe)
    fleet = BranchingFleet(planned, router, options, observers, terms)
    probe.attach(fleet)
    return probe, fleet.run()
