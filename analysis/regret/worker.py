"""One function call in a process of its own, with only the modules that the call needs.

Every branch of a run is a fork of its process, and the time of a fork grows with the mapped memory.
With pandas and plotly loaded it takes six times as much CPU. multiprocessing would import the
caller's main module, and so both.
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

from replayer.arguments import InputError
from replayer.trace.rows import TraceError

CHECK_S = 1.0
P = ParamSpec("P")
T = TypeVar("T")


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `function(...)`, computed in a new process; all of it is pickled.

    Raises the InputError or TraceError that it raises there.
    """
    done = subprocess.run(
        [sys.executable, "-m", "analysis.regret.worker"],
        input=pickle.dumps((function, args, kwargs)),
        stdout=subprocess.PIPE,
        check=True,
    )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    found: T = result
    return found


def _exit_with(parent: int) -> None:
    """Exit within a second of the parent's end. Branches do not inherit the timer."""

    def check(*_signal: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, CHECK_S, CHECK_S)


def main() -> None:
    """Read the call, write its result."""
    _exit_with(os.getppid())
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    # Keep the garbage collector from writing to memory that branches share until a write.
    gc.freeze()
    try:
        found, error = function(*args, **kwargs), None
    except (InputError, TraceError) as wrong:  # one line for the user, from the caller's process
        found, error = None, wrong
    pickle.dump((found, error), sys.stdout.buffer)
    # At exit the interpreter removes its handlers, and another SIGALRM would then kill it.
    signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    main()
