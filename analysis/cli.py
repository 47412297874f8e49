"""The command `analyze`: reports of one run or two, and experiments in virtual time.

Only the chosen command's module is imported: some of them load pandas, plotly or scipy, which takes
longer than a small league.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from replayer.arguments import InputError, OneLineParser, missing_for_reports
from replayer.trace.rows import TraceError

COMMANDS = {
    "report": ("analysis.report.cli", "print a run and write its report.html again"),
    "compare": ("analysis.report.compare", "compare two runs of one trace, pair by pair"),
    "league": (
        "analysis.league.league",
        "compare published routing rules on one trace, in virtual time",
    ),
    "overload": (
        "analysis.league.capacity.overload",
        "offer a fleet more than it can carry, in virtual time, with clients that come again",
    ),
    "slo": (
        "analysis.league.capacity.slo",
        "search for the highest load that keeps an SLO, in virtual time",
    ),
    "elastic": (
        "analysis.elastic.cli",
        "compare offload rules on sessions in a closed loop: the founding experiment",
    ),
    "thermal": (
        "analysis.thermal.cli",
        "compare thermal control with none, in virtual time on simulated plants",
    ),
    "plan": (
        "analysis.plan.cli",
        "compare planners with fixed fleets and a clairvoyant, in virtual time",
    ),
    "regret": ("analysis.regret.regret", "compare policies with an oracle that tries every action"),
    "check": (
        "analysis.check.cli",
        "compare a run through real sockets with its prediction in virtual time",
    ),
    "what-if": (
        "analysis.check.what_if_cli",
        "repeat a proxy's request log in virtual time, under another policy",
    ),
}
"""Each command's module, which has `declare(parser)` and `run(options, console)`, and its help."""


def main(arguments: Sequence[str] | None = None, called: str = "analyze") -> int:
    """Run `analyze`; 0: done, 1: outputs differ, or virtual time is off the run, 2: bad input."""
    if missing := missing_for_reports():
        print(f"{called}: {missing}", file=sys.stderr)
        return 2
    from replayer.terminal import Terminal, printable

    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if word in COMMANDS), None)
    parser: argparse.ArgumentParser = OneLineParser(
        prog=called, description=str(__doc__).partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            importlib.import_module(module).declare(command)
    options = parser.parse_args(given)
    run = importlib.import_module(COMMANDS[options.command][0]).run
    try:
        return int(run(options, Terminal()))
    except (InputError, TraceError) as error:
        print(f"{called}: {printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
