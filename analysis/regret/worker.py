"""One function call in a process of its own that holds nothing but what the call needs.

Every branch of a run is a fork of the process that runs it, and a fork costs by the memory that is
mapped: with pandas and plotly aboard six times as much CPU time as without. multiprocessing would
import the caller's main module, and with it both.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LOOK_S = 1.0
P = ParamSpec("P")
T = TypeVar("T")


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same as `function(...)`, computed elsewhere; all of it must be picklable."""
    done = subprocess.run(
        [sys.executable, "-m", "analysis.regret.worker"],
        input=pickle.dumps((function, args, kwargs)),
        stdout=subprocess.PIPE,
        check=True,
    )
    result: T = pickle.loads(done.stdout)
    return result


def _end_with(parent: int) -> None:
    """Look once a second whether anybody still wants the result; branches inherit no timer."""

    def look(*_signal: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)


def main() -> None:
    """Read the call, write its result."""
    _end_with(os.getppid())
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    # A branch shares this process's memory until it writes: no collection is to touch all of it.
    gc.freeze()
    pickle.dump(function(*args, **kwargs), sys.stdout.buffer)
    # The interpreter takes handlers away as it ends, and the next signal would kill it there.
    signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
