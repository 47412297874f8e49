"""The command `engine-sim`: N simulated vLLM engines in one process."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import uvloop

from replayer.arguments import OneLineParser
from replayer.simulator.host import USUAL_BOOTSTRAP_PORT, SimFleet
from replayer.simulator.options import SimOptions, flag

_BAD_START = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM; exit status 2 for a bad option or a taken port."""
    args = {"bootstrap_port": None, **vars(_parser().parse_args(argv))}
    logging.basicConfig(level=args.pop("log_level").upper(), format="%(levelname)s %(message)s")
    try:
        first = args["bootstrap_port"]
        usual = USUAL_BOOTSTRAP_PORT if first is None else first
        _check_ports(args["port"], usual, args["instances"])
        _check_events_port(args["kv_events_port"], args["instances"])
        fleet_arguments = {"count": args.pop("instances"), **args}
        uvloop.run(_serve(fleet_arguments))
    except ValueError as error:
        print(f"engine-sim: {error}", file=sys.stderr)
        return _BAD_START
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"engine-sim: {where}{error.strerror or error}", file=sys.stderr)
        return _BAD_START
    return 0


async def _serve(arguments: dict[str, Any]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with SimFleet(**arguments) as fleet:
        for index, engine in enumerate(fleet.engines):
            print(
                f"engine {index} {engine.url} bootstrap {engine.bootstrap_url}"
                f" model {engine.options.model}",
                flush=True,
            )
        await stop.wait()


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="engine-sim",
        description="Simulated vLLM engines with prefix caching and Mooncake-like KV transfer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--instances", type=int, default=1, help="number of engines")
    parser.add_argument(
        "--port", type=int, default=8001, help="first API port; 0: the kernel chooses"
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=argparse.SUPPRESS,
        help="first bootstrap port; 0: the kernel chooses (default: "
        f"{USUAL_BOOTSTRAP_PORT}, or free ones where these are taken)",
    )
    parser.add_argument(
        "--kv-events-port",
        type=int,
        help="first port for KV events, two per engine; 0: the kernel chooses; none: no events",
    )
    parser.add_argument(
        "--request-log", type=Path, help="file for one JSON line per finished request"
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning", "error"),
        help="lowest severity that is logged",
    )
    for spec in fields(SimOptions):
        _add(parser, spec)
    return parser


def _add(parser: argparse.ArgumentParser, spec: "Field[Any]") -> None:
    """Declare the flag of a field of SimOptions."""
    if spec.default is MISSING:
        raise TypeError(f"{spec.name} needs a default")
    help_ = spec.metadata["help"]
    if isinstance(spec.default, bool):
        parser.add_argument(flag(spec.name), action="store_true", help=help_)
        return
    kind = int if spec.default is None else type(spec.default)
    choices = spec.metadata.get("choices")
    parser.add_argument(
        flag(spec.name), type=kind, default=spec.default, choices=choices, help=help_
    )


def _check_ports(port: int, bootstrap_port: int, instances: int) -> None:
    """Refuse numbers that cannot be ports, and port ranges that overlap."""
    if not 1 <= instances <= 1_000:
        raise ValueError(f"--instances {instances}: must be 1 to 1000")
    for name, first in (("--port", port), ("--bootstrap-port", bootstrap_port)):
        if first and not 1 <= first <= 65_536 - instances:
            last = 65_536 - instances
            raise ValueError(f"{name} {first}: must be 0 to {last} with {instances} engines")
    if port and bootstrap_port and abs(port - bootstrap_port) < instances:
        raise ValueError(
            f"--bootstrap-port {bootstrap_port}: {instances} ports from there meet those of --port"
        )


def _check_events_port(port: int | None, instances: int) -> None:
    """Refuse a first port for KV events that leaves no room for two per engine."""
    last = 65_536 - 2 * instances
    if port is not None and not 0 <= port <= last:
        raise ValueError(f"--kv-events-port {port}: must be 0 to {last} with {instances} engines")


if __name__ == "__main__":
    sys.exit(main())
