"""`make demo`: simulated engines, the proxy, a replay of a real agentic trace, and checks.

Without a policy it is the tour: the default policy beside round robin, then an offload. With one
(`--offload-policy`) or with a kill it is one run. All processes are stopped by pid at the end. The
checks compare independent records of the run: the proxy's request log and metrics, the engines'
request logs and metrics, and the client's rows.
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.resources import files
from pathlib import Path

from replayer.arguments import missing_for_reports
from replayer.demo.one_run import one_run
from replayer.demo.processes import Children, Stopped
from replayer.demo.tour import tour

SAMPLE = "agentic_sample.trace.jsonl.gz"
TOUR_PART = ("--limit", "150")
"""The tour's part of the trace: two fleets on two cores end it in half a minute."""
EXIT_SIGNAL = 128  # plus the signal's number
_log = logging.getLogger("demo")


def main() -> int:
    """Run the demo; 0 only when every check holds."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    if missing := missing_for_reports():
        _log.error("demo: %s", missing)
        return 1
    is_one_run = options.offload_policy is not None or options.kill_engine_after is not None
    children = Children()
    try:
        with children.stopped_at_the_end():
            if is_one_run:
                held = one_run(children, options, _load(options))
            else:
                held = tour(children, options, _load(options, *TOUR_PART))
    except RuntimeError as error:
        _log.error("demo: %s", error)
        return 1
    except Stopped as stop:
        _log.info("demo: stopped by %s, and so is every process it had started", stop)
        return EXIT_SIGNAL + stop.number
    return 0 if held else 1


def _load(options: argparse.Namespace, *part: str) -> tuple[str, ...]:
    """Arguments of `replay`: trace, pace, the part of the trace, and the user's own."""
    # Trace and engines run at the same speed, and the report is in engine time.
    speed = str(options.speed)
    # The same words in every demo: its engines are fresh, and two runs can be compared.
    pace = ("--speedup", speed, "--time-scale", speed, "--seed", "0")
    return (str(Path(options.trace).resolve()), *pace, *part, *options.replay)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    trace = str(files("replayer") / "data" / SAMPLE)
    parser.add_argument("--trace", default=trace, help="trace to replay")
    parser.add_argument("--out", default=".cache/demo", help="folder for logs and the report")
    parser.add_argument("--engines", type=int, default=4, help="simulated engines of a fleet")
    parser.add_argument("--speed", type=float, default=6.0, help="times faster than real engines")
    parser.add_argument(
        "--offload-policy",
        help="one run under this policy (one run with a kill: seed-heuristic) in place of the tour",
    )
    parser.add_argument(
        "--kill-engine-after",
        type=int,
        metavar="N",
        help="one run, with SIGKILL to an engine at work once N requests are done",
    )
    parser.add_argument("replay", nargs="*", help="more options for replay, behind --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
