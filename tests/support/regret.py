"""A small watched run of the cost policy."""

from analysis.league.fleet import EngineFleet, engines
from analysis.regret.oracle import Mode
from analysis.regret.outcomes import JudgedDecision
from analysis.regret.regret import RegretTask, run_probed
from replayer.virtual.arrivals import LoadRules, plan
from replayer.virtual.load import load_source
from replayer.virtual.requests import VirtualRun
from tests.support.traces import SAMPLE

SOURCE = load_source(SAMPLE)
RULES = LoadRules(rate=0.2, horizon_s=90.0, think_cap_s=5.0)
PLANNED = plan(SOURCE, RULES)
FLEET = EngineFleet(engines(3, 200_000, SOURCE.block_tokens))
TASK = RegretTask("cost", "given", "watch", RULES, FLEET, 4)


def watch(task: RegretTask = TASK) -> tuple[list[JudgedDecision], VirtualRun]:
    wanted = frozenset(range(0, 12, 3))
    probe, run = run_probed(task, PLANNED, SOURCE.block_tokens, Mode.WATCH, wanted)
    return probe.decisions, run


Watched = tuple[list[JudgedDecision], VirtualRun]
