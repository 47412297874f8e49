"""The entry of the command `replay`: it reports missing packages before it sends.

A first word of `COMMANDS` names a command about a trace's file, and `what-if` that of `analyze`. A
trace of such a name is given with its folder, as in `./validate`.
"""

import sys

from replayer.arguments import missing_for_reports

EXIT_NOT_INSTALLED = 2


def main() -> int:
    """Run `replay`; 2, with one line on stderr, where its packages are not installed."""
    if missing := missing_for_reports():
        print(f"replay: {missing}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    from replayer.survey.cli import COMMANDS
    from replayer.survey.cli import main as survey

    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        return survey(sys.argv[1:])
    if sys.argv[1:2] == ["what-if"]:
        from analysis.cli import main as analyze

        return analyze(sys.argv[1:], "replay")
    from replayer.replay.cli import main as replay

    return replay()


if __name__ == "__main__":
    sys.exit(main())
