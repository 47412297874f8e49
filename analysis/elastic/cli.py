"""`analyze elastic`: how it is run and printed, of runs in virtual time or of finished ones.

A finished run is a folder of `replay --mode sessions --proxy-log ...`, as `python -m replayer.demo`
makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.bench.finished import of_row
from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result
from analysis.elastic.experiment import ElasticOptions, figures, run_elastic
from analysis.elastic.interference import BATCHED_TOKENS, gaps_beside
from analysis.elastic.tables import print_experiment, print_interference, sentence
from analysis.measures import in_target_time
from analysis.runs import RunError, read_rows, read_summary
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


def read_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read a row per run; runs of one rule and load are told apart by `seed`, in their order."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        row = read_run(folder)
        alike = [(o["rule"], o["sessions"]) for o in rows].count((row["rule"], row["sessions"]))
        rows.append({**row, "seed": alike})
    return rows


def read_run(folder: Path) -> dict[str, Any]:
    """Read one run; RunError unless its requests were sent as sessions under one policy."""
    summary = read_summary(folder / "summary.json")
    sessions, rules = summary.get("concurrency"), summary.get("offload_policies")
    if not isinstance(sessions, int):
        raise RunError(f"{folder}: must be a run of replay --mode sessions")
    if not isinstance(rules, list) or len(rules) != 1:
        raise RunError(f"{folder}: must name one offload policy; was --proxy-log given?")
    measured = in_target_time(read_rows(folder / "requests.jsonl"), summary.get("time_scale", 1.0))
    sent = [row for row in measured if row.get("sent_s") is not None]
    return {"rule": rules[0], "sessions": sessions, **figures([of_row(row) for row in sent])}


ELASTIC = Experiment(ElasticOptions, _perform)
declare, run = ELASTIC.declare, ELASTIC.run
