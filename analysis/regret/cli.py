"""`analyze regret`: how it is run and printed."""

from __future__ import annotations

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result
from analysis.regret.regret import RegretOptions, compute_regret, document
from analysis.regret.summary import sentences, summarise_regret
from analysis.regret.tables import print_regret


def _perform(options: RegretOptions, console: Console) -> Result:
    steps = Steps("regret")
    regret, options = compute_regret(options, steps, steps.say)
    print_regret(regret, options.policies, console)
    said = sentences(summarise_regret(regret, options.policies))
    return Result(document(regret, options), tuple(said))


REGRET = Experiment(RegretOptions, _perform)
declare, run = REGRET.declare, REGRET.run
