"""`analyze plan`: how it is run and printed."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result
from analysis.plan.experiment import run_plan
from analysis.plan.options import PlanOptions
from analysis.plan.tables import print_plan

TEXT = "Fleets that scale in virtual time: fixed ones, a search that knows the load, planners."


def _perform(options: PlanOptions, console: Console) -> Result:
    runs = run_plan(options, Steps("plan"))
    said = print_plan(runs, options.gpus, console)
    return Result({"runs": [asdict(run) for run in runs], "headroom": said})


PLAN = Experiment(PlanOptions, _perform, text=TEXT)
declare, run = PLAN.declare, PLAN.run
