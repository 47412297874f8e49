"""The command `python -m bench.planner` (`make bench-planner`): planners in Dynamo's replay.

Rules that scale a fleet meet the same engines, router and requests; only the rule differs. The
replay is NVIDIA Dynamo's, in an environment of its own.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from analysis.plan.measured import CLAIRVOYANT, STATIC
from bench.planner import report
from bench.planner.engine import Engine
from bench.planner.jobs import Job, LeftOut, PlannerError, Played, Workers
from bench.planner.judge import ROUTERS
from bench.planner.results import Result
from bench.planner.rules.rivals import RIVALS
from bench.planner.worker import parts_of
from bench.routing import engine as profile
from bench.routing import environments
from bench.routing.environments import Environment, RoutingError
from replayer.arguments import OneLineParser, names, not_negative, positive_count
from replayer.demo.processes import Stopped
from replayer.loads import LOADS, missing

WORK = Path(".cache/planner")
REQUIREMENTS = Path(__file__).parent / "requirements-dynamo.txt"
PRESETS = Path(__file__).parent / "requirements-presets.txt"
KV_TOKENS = 262_144
STARTUPS_S = (30.0, 120.0)
EFFORT = 30
"""Replays of the clairvoyant's local search."""
WIDTH = 200
"""Of the tables where no terminal says how wide it is."""
EXIT_SIGNAL = 128  # plus the signal's number
ALL = "all"


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be played, and with what."""

    policies: tuple[str, ...]
    loads: tuple[str, ...]
    startups_s: tuple[float, ...]
    seeds: tuple[int, ...]
    router: str
    effort: int
    traces: Path | None
    parallel: int
    work: Path
    python: Path | None
    """Another Python that has Dynamo; None: one of this command's own."""
    has_presets: bool
    installs: bool
    out: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a policy failed, 2 for bad input."""
    given = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    signal.signal(signal.SIGTERM, _stop)
    try:
        if given.report:
            show(Result.load(given.report), console, is_markdown=given.markdown)
            return 0
        return _compare(_options(given), console, is_markdown=given.markdown)
    except (PlannerError, RoutingError, ValueError) as error:
        print(f"bench-planner: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"bench-planner: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(f"bench-planner: stopped by {stop}, and so is all it had started", file=sys.stderr)
        return EXIT_SIGNAL + stop.number
    except KeyboardInterrupt:
        print("bench-planner: stopped", file=sys.stderr)
        return 130


def _stop(number: int, _frame: FrameType | None) -> None:
    raise Stopped(number)


def show(result: Result, console: Console, *, is_markdown: bool) -> None:
    """Print the tables, and what they lack."""
    if is_markdown:
        print(report.markdown(result))
        return
    for grid in report.grids(result):
        console.print(grid.rich())
    for line in report.left_out(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _compare(options: Options, console: Console, *, is_markdown: bool) -> int:
    """Play every policy on every load."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    result, faults = Result([], {}), []
    for name in options.loads:
        if file := missing(name, options.traces):
            result.left_out[name] = f"needs {file} in the folder of --traces"

    def done(played: Played) -> None:
        if not isinstance(played, LeftOut):
            result.runs.append(played)
            say(report.line_of(played))
        else:
            result.left_out[played.policy] = played.why
            faults.extend([played] if played.is_fault else [])
        if options.out is not None:
            result.save(options.out)

    python = options.python or _installed(options, say)
    workers = Workers(python, options.work.absolute() / "runs", done)
    workers.play_all(list(_jobs(options)), options.parallel)
    show(result, console, is_markdown=is_markdown)
    for fault in faults:
        print(f"bench-planner: FAILED: {fault.policy}: {fault.why}", file=sys.stderr)
    return 1 if faults else 0


def _installed(options: Options, say: Callable[[str], None]) -> Path:
    """The Python of Dynamo's environment, which is made where it is missing."""
    wanted, venvs = environment(has_presets=options.has_presets), options.work.absolute() / "venvs"
    if options.installs:
        environments.make([wanted], venvs, say)
    return venvs / wanted.name / "bin" / "python"


def environment(*, has_presets: bool) -> Environment:
    """Dynamo's environment; with all that its own planner needs, or without."""
    files = [REQUIREMENTS, *([PRESETS] if has_presets else [])]
    texts = [path.read_text("utf-8") for path in (*files, environments.REQUIREMENTS)]
    arguments = [part for path in files for part in ("-r", str(path))]
    name = "dynamo-presets" if has_presets else environments.DYNAMO
    return Environment(name, ("--no-deps", *arguments), "\n".join(texts))


def _jobs(options: Options) -> Iterator[Job]:
    """Seed by seed, so that an early end leaves whole comparisons."""
    folder = options.work.absolute()
    engine = simulated_engine(folder / "engine")
    for seed in options.seeds:
        for name in options.loads:
            if not missing(name, options.traces):
                yield Job(
                    load=name,
                    seed=seed,
                    startups_s=options.startups_s,
                    policies=options.policies,
                    router=options.router,
                    effort=options.effort,
                    trace=str(folder / "runs" / f"{name}-{seed}.trace.jsonl"),
                    traces=str(options.traces.absolute()) if options.traces else None,
                    engine=engine,
                )


def simulated_engine(folder: Path) -> Engine:
    """The engine of bench-routing, at its own speed."""
    return Engine(
        arguments=str(profile.write_engine(folder, KV_TOKENS, speedup=1.0)),
        kv_tokens=KV_TOKENS,
        step_tokens=profile.BATCHED_TOKENS,
        max_seqs=profile.SEQUENCES,
        prefill_base_s=profile.PREFILL_BASE_S,
        prefill_tps=profile.PREFILL_TPS,
        step_base_s=profile.STEP_BASE_S,
        step_s_per_kv_token=profile.STEP_S_PER_KV_TOKEN,
    )


def policies(text: str) -> tuple[str, ...]:
    """Read names joined by commas; one in braces or brackets joins nothing."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return tuple(_checked(part.strip()) for part in parts if part.strip())


def _checked(policy: str) -> str:
    """A name that a worker can read; raises ArgumentTypeError for another one."""
    if policy in (ALL, STATIC, CLAIRVOYANT, *RIVALS):
        return policy
    kind, _, number = policy.partition(":")
    if kind == STATIC and number.isdecimal():
        return policy
    try:
        parts_of(policy)
    except ValueError:
        known = ", ".join((ALL, STATIC, f"{STATIC}:N", CLAIRVOYANT, *RIVALS))
        text = f"must be of {known}, MODULE:CLASS or MODULE:CLASS:JSON, not {policy!r}"
        raise argparse.ArgumentTypeError(text) from None
    return policy


def seconds(text: str) -> tuple[float, ...]:
    """Read numbers joined by commas."""
    return tuple(map(not_negative, names(text)))


def seeds(text: str) -> tuple[int, ...]:
    """Read seeds joined by commas."""
    return tuple(map(positive_count, names(text)))


def _loads(text: str) -> tuple[str, ...]:
    chosen = LOADS if text == ALL else names(text)
    for name in chosen:
        if name not in LOADS:
            known = ", ".join(LOADS)
            raise argparse.ArgumentTypeError(f"must be {ALL}, or of {known}, not {name!r}")
    return chosen


def _options(given: argparse.Namespace) -> Options:
    chosen = given.policies
    if ALL in chosen:
        rest = [one for one in chosen if one != ALL]
        chosen = (STATIC, *RIVALS, *rest, CLAIRVOYANT)
    return Options(
        policies=tuple(dict.fromkeys(chosen)),
        loads=given.loads,
        startups_s=given.startup,
        seeds=given.seeds,
        router=given.router,
        effort=given.effort,
        traces=given.traces,
        parallel=given.parallel,
        work=given.work,
        python=given.python,
        has_presets=given.presets,
        installs=given.installs,
        out=given.out,
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="bench-planner", description=__doc__)
    add = parser.add_argument
    add("--policies", type=policies, default=(ALL,), metavar="A,B",
        help=f"of {STATIC} (every N), {STATIC}:N, {CLAIRVOYANT}, {', '.join(RIVALS)}, or "
        "MODULE:CLASS[:JSON] with settings; default: all of these names")  # fmt: skip
    add("--loads", type=_loads, default=LOADS, metavar="A,B",
        help=f"of {', '.join(LOADS)}; default: all")  # fmt: skip
    add("--traces", type=Path, metavar="DIR",
        help="public traces, packed or not; without them only synthetic loads")  # fmt: skip
    add("--startup", type=seconds, default=STARTUPS_S, metavar="S,S",
        help="seconds from an order to an engine that serves; default: 30,120")  # fmt: skip
    add("--seeds", type=seeds, default=(1,), metavar="N,N", help="default: 1")
    add("--router", choices=ROUTERS, default=ROUTERS[0], help="default: %(default)s")
    add("--effort", type=positive_count, default=EFFORT, metavar="N",
        help="replays of the clairvoyant's local search, and about as many before it; default: "
        "%(default)s")  # fmt: skip
    add("--parallel", type=positive_count, default=1,
        help="loads at a time, each on one CPU; default: %(default)s")  # fmt: skip
    add("--presets", action="store_true",
        help="install what Dynamo's own planner needs: 300 MB more")  # fmt: skip
    add("--python", type=Path, metavar="PATH", help="another environment that has Dynamo")
    add("--no-install", dest="installs", action="store_false", help="install nothing")
    add("--work", type=Path, default=WORK, metavar="DIR",
        help="environments, traces, logs; default: %(default)s")  # fmt: skip
    add("--out", type=Path, metavar="JSON", help="every run, for --report")
    add("--report", type=Path, nargs="+", metavar="JSON",
        help="print the tables of earlier runs, taken together")  # fmt: skip
    add("--markdown", action="store_true", help="print the tables as Markdown")
    return parser
