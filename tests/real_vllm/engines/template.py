"""`template.py MODULE [IMPORT...]`: a process that has imported an engine, and forks one per line.

Importing vLLM takes most of an engine's start. Each line of standard input is an object of `argv`,
`env`, `cwd` and `log`; the answer is a line with the engine's pid, which leads a session of its own
and runs `MODULE.main()`. All end with whoever started this, also when that is killed. It runs in
the engines' environment, whose Python has no package of the tests.
"""

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends; in a fork, be what was asked for."""
    _end_with_the_parent()
    context = multiprocessing.get_context("fork")
    answers = os.dup(1)
    os.dup2(2, 1)  # what is said while importing
    module, *_ = (importlib.import_module(name) for name in sys.argv[1:])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes the dead away
    # vLLM asks for processes that import everything once more.
    multiprocessing.get_context = lambda _method=None: context  # type: ignore[assignment]
    gc.freeze()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        if not (pid := os.fork()):
            os.close(answers)
            _become(asked)
            sys.exit(module.main())
        os.write(answers, b"%d\n" % pid)


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _become(asked: dict[str, Any]) -> None:
    os.setsid()  # Ctrl-C reaches the tests, which stop it in order
    _end_with_the_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, descriptor)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:0] = [path for path in asked["env"].get("PYTHONPATH", "").split(":") if path]
    sys.argv = asked["argv"]


if __name__ == "__main__":
    main()
