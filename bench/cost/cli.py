"""The command `python -m bench.cost` (`make bench`): what this proxy costs beside its peers."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from bench.cost import install, tables
from bench.cost.result import Result
from bench.cost.rounds import Plan, run
from bench.cost.sessions import SCENARIO as SESSIONS
from bench.cost.sessions import WHAT as SESSIONS_WHAT
from bench.measuring.build import BenchError
from bench.measuring.peers import BEFORE, PEERS, QUICK, Peer, clone
from bench.measuring.scenarios import SCENARIOS

PUBLISHED = Path("docs/benchmarks/cost.md")
WORK = Path(".cache/bench")
MARK = "<!-- bench -->"
WIDTH = 150
"""Of the tables where no terminal says how wide it is."""
QUICK_ROUNDS, ROUNDS = 1, 5
QUICK_SESSIONS, SESSIONS_IN_TABLE = 5_000, 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 1 when what was measured is not what it says: wrong process, lost events, dead peer."""
    options = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, terminate)
    try:
        return _command(options, console)
    except BenchError as error:
        print(f"bench: FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: stopped", file=sys.stderr)
        return 130


def _command(options: argparse.Namespace, console: Console) -> int:
    if options.list:
        print("peers:", *PEERS)
        print("scenarios:", *(f"\n  {name:12} {what}" for name, what in _whats().items()))
        return 0
    if options.markdown:
        print(tables.markdown(_merged(options.markdown)))
        return 0
    if options.publish:
        write_between_marks(PUBLISHED, tables.markdown(_merged(options.publish)))
        return 0
    return _bench(_plan(options), options, console)


def _merged(paths: Sequence[Path]) -> Result:
    try:
        return Result.merged([Result.load(path) for path in paths])
    except OSError as error:
        raise BenchError(f"no result: {error}") from error


def _bench(plan: Plan, options: argparse.Namespace, console: Console) -> int:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    if options.install:
        install.install(plan.peers.values(), plan.venvs, say)
    result = Result.begin(plan.rounds)
    try:
        run(plan, result, say)
    finally:
        if options.json and result.windows:
            result.save(options.json)
    for grid in tables.grids(result):
        console.print(grid.rich())
    for fault in result.faults:
        print(f"bench: FAILED: {fault}", file=sys.stderr)
    return 1 if result.faults else 0


def _whats() -> dict[str, str]:
    """Every scenario, and what it asks."""
    return {name: s.what for name, s in SCENARIOS.items()} | {SESSIONS: SESSIONS_WHAT}


def _plan(options: argparse.Namespace) -> Plan:
    quick = options.quick
    chosen = _chosen(options.peers, PEERS, QUICK if quick else PEERS, "peer")
    peers: dict[str, Peer] = {name: PEERS[name] for name in chosen}
    if options.before is not None:
        peers[BEFORE] = clone(options.before)
    return Plan(
        peers=peers,
        scenarios=_chosen(options.scenarios, _whats(), _whats(), "scenario"),
        rounds=options.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        sessions=QUICK_SESSIONS if quick else SESSIONS_IN_TABLE,
        limit_s=options.minutes * 60,
        work=options.work,
        retries=0 if quick else options.retries,
    )


def _chosen(
    given: str | None, known: Collection[str], default: Iterable[str], what: str
) -> list[str]:
    """The names that were asked for."""
    names = given.split(",") if given else list(default)
    for name in names:
        if name not in known:
            raise BenchError(f"no such {what}: {name} (see --list)")
    return names


def write_between_marks(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a document."""
    before, _, rest = path.read_text().partition(MARK)
    _, found, after = rest.partition(MARK)
    if not found:
        raise BenchError(f"{path} has no two lines {MARK}")
    path.write_text(f"{before}{MARK}\n{text}\n{MARK}{after}")


def terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the run in order: every process is stopped."""
    del frame
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description=__doc__)
    add = parser.add_argument
    add("--peers", metavar="A,B", help="who is measured; default: all that are installed")
    add("--scenarios", metavar="X,Y", help="default: all")
    add(
        "--before",
        type=Path,
        metavar="CLONE",
        help="another clone of the project after `make compiled`, measured as the peer `before`",
    )
    add("--rounds", type=int, metavar="N", help=f"windows per peer and scenario, {ROUNDS}")
    add(
        "--quick",
        action="store_true",
        help="a minute or so: one round, fewer peers, 5,000 sessions",
    )
    add("--minutes", type=float, default=30.0, help="no new window after this time, %(default)s")
    add(
        "--work", type=Path, default=WORK, metavar="DIR", help="binaries, bodies, logs; %(default)s"
    )
    add("--retries", type=int, default=1, help="for a window with neighbours in it, %(default)s")
    add("--json", type=Path, metavar="OUT", help="every window, for --markdown and --publish")
    add("--no-install", dest="install", action="store_false", help="install no peers from PyPI")
    add("--list", action="store_true", help="peers and scenarios")
    earlier: dict[str, Any] = {"type": Path, "nargs": "+", "metavar": "RESULT"}
    add("--markdown", **earlier, help="print the tables of earlier runs, taken together")
    add("--publish", **earlier, help=f"put them into {PUBLISHED}")
    return parser
