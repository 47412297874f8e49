"""`analyze elastic`: how it is run and printed."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result
from analysis.elastic.experiment import ElasticOptions, run_elastic
from analysis.elastic.interference import BATCHED_TOKENS, gaps_beside
from analysis.elastic.real_runs import read_runs
from analysis.elastic.tables import print_experiment, print_interference, sentence
from replayer.engine.types import EngineOptions


def _perform(options: ElasticOptions, console: Console) -> Result:
    if options.runs:
        rows = read_runs(options.runs)
    else:
        rows = run_elastic(options, Steps("elastic"))
        engine = replace(EngineOptions(), max_num_batched_tokens=BATCHED_TOKENS)
        colocated, offloaded = (gaps_beside(engine, offloaded=one) for one in (False, True))
        print_interference(colocated, offloaded, console)
    print_experiment(rows, console)
    said = sentence(rows)
    return Result(rows, (said,) if said else ())


ELASTIC = Experiment(ElasticOptions, _perform)
declare, run = ELASTIC.declare, ELASTIC.run
