"""The entry of the command `replay`: it reports missing packages before it sends."""

import sys

from replayer.arguments import missing_for_reports

EXIT_NOT_INSTALLED = 2


def main() -> int:
    """Run `replay`; 2, with one line on stderr, where its packages are not installed."""
    if missing := missing_for_reports():
        print(f"replay: {missing}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    from replayer.replay.cli import main as replay

    return replay()


if __name__ == "__main__":
    sys.exit(main())
