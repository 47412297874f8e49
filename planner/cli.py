"""The command `cache-planner`: scales a fleet of vLLM instances behind cache-proxy."""

import argparse
import asyncio
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any, Final

from proxy.config.sources import ConfigError
from replayer.arguments import InputError, OneLineParser, missing_for_reports
from replayer.trace.rows import TraceError

COMMANDS: Final = {
    "run": "plan, and carry out unless advisory; until a signal comes",
    "validate": "check options, proxies and scaler, and exit",
    "dry-run": "predict the intervals of a trace, and the replicas for them",
    "replay": "plan a load in virtual time, as `analyze plan` does",
    "report": "make the page of an audit log",
    "profile": "measure what an iteration takes on an idle instance",
}
"""Each command's help."""
MODULES: Final = {
    "dry-run": "planner.dry_run",
    "replay": "analysis.plan.cli",
    "report": "planner.telemetry.audit",
    "profile": "planner.profiling.cli",
}
"""Where a command is that has `declare(parser)` and `run(options, console)`."""
WITH_DEFAULTS: Final = {"replay", "report", "profile"}
"""Commands whose arguments are not options that a CONFIG may have, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `cache-planner`: 0 done, 1 something is wrong with the fleet, 2 bad input."""
    if missing := missing_for_reports():
        print(f"cache-planner: {missing}", file=sys.stderr)
        return 2
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if word in COMMANDS), None)
    parser = OneLineParser(prog="cache-planner", description=str(__doc__).partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        own = name not in WITH_DEFAULTS
        more: dict[str, Any] = {"argument_default": argparse.SUPPRESS} if own else {}
        command = commands.add_parser(name, help=text, allow_abbrev=False, **more)
        if name == chosen:
            _declare(name, command)
    try:
        options, unknown = parser.parse_known_args(given)
        if unknown:  # the value behind it may be a secret
            parser.error(f"unknown argument {unknown[0].partition('=')[0]!r}")
        return _other(options) if options.command in MODULES else _own(options)
    except (ConfigError, InputError, TraceError) as error:
        print(f"cache-planner: {error}", file=sys.stderr)
        return 2


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    if name in MODULES:
        importlib.import_module(MODULES[name]).declare(parser)
        return
    from planner.config.load import declare

    declare(parser)


def _other(options: argparse.Namespace) -> int:
    from replayer.terminal import Terminal

    return int(importlib.import_module(MODULES[options.command]).run(options, Terminal()))


def _own(options: argparse.Namespace) -> int:
    """The commands `run` and `validate`."""
    from planner.config.deployments import load_all
    from planner.scalers.state_file import StateError
    from planner.service import StartError, serve_all, validate_all, with_deployment

    deployments, warnings = load_all(vars(options))
    handler = logging.StreamHandler()
    handler.addFilter(with_deployment)
    how = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=how, handlers=[handler])
    for warning in warnings:
        logging.getLogger("planner").warning("%s", warning)
    try:
        if options.command == "validate":
            return _say(asyncio.run(validate_all(deployments)))
        asyncio.run(serve_all(deployments))
    except (StartError, StateError) as error:
        print(f"cache-planner: {error}", file=sys.stderr)
        return 2
    return 0


def _say(wrong: Sequence[str]) -> int:
    for line in wrong:
        print(line)
    print(f"{len(wrong)} wrong" if wrong else "all is well")
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
