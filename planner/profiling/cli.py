"""The command `profile`: measures one idle instance and writes its profile.

Exit status: 0 written, 1 it broke off, 2 bad input or an instance that cannot be measured, 130
interrupted. Nothing is written before all is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from planner.config.profiles import NPZ, write_profile
from planner.core.perf.profile import Precision, Profile, precision
from planner.profiling.benchmark import BenchmarkOptions, benchmark
from planner.profiling.grid import GridOptions
from planner.profiling.instance import TIMEOUT_S, BenchmarkError, Target
from replayer.arguments import InputError, positive, positive_count
from replayer.replay.options import url
from replayer.terminal import printable

BROKEN_OFF, INTERRUPTED = 1, 130


def _granularity(text: str) -> int:
    value = positive_count(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, not {text!r}")
    return value


def _instance(text: str) -> str:
    """Read an address, which is printed; a password has no place in it."""
    address = url(text)
    if "@" in address:
        raise argparse.ArgumentTypeError("must be http(s)://HOST:PORT; use --api-key")
    return address


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    grid = GridOptions()
    add = parser.add_argument
    add("--instance", type=_instance, required=True, help="base address of the instance")
    add("--out", type=Path, default=Path("profile-out"), metavar="FOLDER",
        help="folder to write the profile to (default: %(default)s)")  # fmt: skip
    add("--gpus", type=positive_count, default=1,
        help="GPUs of the instance, for throughput per GPU (default: %(default)s)")  # fmt: skip
    add("--prefill-granularity", type=_granularity, default=grid.prefill_granularity, metavar="N",
        help="lengths of prompts (default: %(default)s)")  # fmt: skip
    add("--decode-granularity", type=_granularity, default=grid.decode_granularity, metavar="N",
        help="contexts, and most numbers of streams for each (default: %(default)s)")  # fmt: skip
    add("--max-num-seqs", type=positive_count, default=grid.max_num_seqs, metavar="N",
        help="most streams: what the engine was started with (default: %(default)s)")  # fmt: skip
    add("--max-length", type=positive_count, metavar="TOKENS",
        help="longest prompt and context (default: 0.9 of what the engine takes)")  # fmt: skip
    add("--model", help="model name (default: the first of GET /v1/models)")
    add("--api-key", help="bearer token")
    add("--timeout", type=positive, default=TIMEOUT_S, metavar="SECONDS",
        help="of one request (default: %(default)s)")  # fmt: skip


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure and write; returns the exit status."""
    out: Path = options.out
    _check(out)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            profile = runner.run(_until_terminated(_options(options), console))
        written = write_profile(out, profile)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("profile: interrupted; nothing is written", file=sys.stderr)
        return INTERRUPTED
    except BenchmarkError as error:
        print(f"profile: {printable(str(error))}", file=sys.stderr)
        return BROKEN_OFF
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    _print(profile, written, console)
    return 0


def _options(given: argparse.Namespace) -> BenchmarkOptions:
    return BenchmarkOptions(
        Target(given.instance, given.model, given.api_key, given.timeout),
        GridOptions(
            given.prefill_granularity,
            given.decode_granularity,
            given.max_num_seqs,
            given.max_length,
        ),
        given.gpus,
    )


def _check(out: Path) -> None:
    """Refuse a folder that cannot take a profile, before minutes are spent on one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    for name in NPZ.values():
        if (out / name).exists():
            raise InputError(f"--out {out}: has {name}, which is read before what is written here")


async def _until_terminated(options: BenchmarkOptions, console: Console) -> Profile:
    """Make SIGTERM end the run as Ctrl-C does."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await benchmark(options, partial(_say, console), time.monotonic)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _print(profile: Profile, written: list[Path], console: Console) -> None:
    rows = {"first token": profile.prefill_rows(), "tokens after it": profile.decode_rows()}
    for name, of in rows.items():
        _say(console, f"{name}: {_precision_text(precision(of))}")
    for path in written:
        _say(console, f"written: {path}")


def _precision_text(found: Precision) -> str:
    if found.mean is None or found.worst is None:
        return "no point stands between others"
    errors = f"{found.mean:.1%} on average and {found.worst:.1%} at worst"
    return f"left out one by one, {found.points} points are foretold to {errors}"
