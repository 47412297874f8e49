"""`analyze league`: how it is run and printed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from analysis.bench.progress import Steps
from analysis.bench.runner import Experiment, Result
from analysis.league.figures import write_figures
from analysis.league.league import USUAL_CLOSED, LeagueOptions, run_league
from analysis.league.summary import print_league, summarise
from analysis.league.verdict import print_verdicts, sentence
from replayer.virtual.load import LeftOut


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


def left_out(left: LeftOut) -> str:
    """Say in one line what of the trace is no part of the load."""
    return (
        f"left out: {left.requests:,} requests of {left.sessions:,} sessions, as no engine serves "
        f"a prompt of {left.shortest_tokens:,} tokens or more in time, or no KV holds it"
    )


LEAGUE = Experiment(
    LeagueOptions, _perform, usual=lambda given: USUAL_CLOSED if given.closed else {}
)
declare, run = LEAGUE.declare, LEAGUE.run
