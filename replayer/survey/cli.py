"""The command line of `replay validate` and its like: a trace's file in, an exit status out."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from replayer.arguments import InputError, OneLineParser
from replayer.terminal import Terminal, printable
from replayer.trace.loaders import LOADERS
from replayer.trace.rows import TraceError

COMMANDS: Final = {
    "validate": ("replayer.survey.validate", "Say whether a trace can be replayed whole."),
    "analyze-trace": ("replayer.survey.analyze", "Say what the load of a trace is like."),
    "export": ("replayer.survey.export", "Write a trace in the form that another tool reads."),
}
"""Each command's module, which has `declare(parser)` and `run(options, console)`, and its help."""
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; 2 for bad input."""
    name = arguments[0]
    module, text = COMMANDS[name]
    command = importlib.import_module(module)
    parser = OneLineParser(prog=f"replay {name}", description=text)
    add = parser.add_argument
    add("trace", type=Path, help="trace file, one request per line, plain or gzip")
    add("--format", choices=tuple(LOADERS), help="row format (default: detected in the first row)")
    command.declare(parser)
    options = parser.parse_args(arguments[1:])
    try:
        return int(command.run(options, Terminal()))
    except (InputError, TraceError) as error:
        print(f"replay: {printable(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
