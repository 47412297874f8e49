"""A child process that answers questions: one line of JSON each, a number or null in return."""

from __future__ import annotations

import logging
import math
import os
import selectors
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import orjson

READY = b"ready"
START_S = 60.0
"""A child that has not begun by then is killed."""
MOST_ANSWER = 1 << 12
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The sums are small: on a busy machine threads that wait for each other take minutes."""
_log = logging.getLogger("planner")


class ChildError(Exception):
    """The child is late, dead, or says what is no answer."""


class Child:
    """Starts `command` when it is first needed, and again after each failure.

    It says READY on a line before its first answer. A question waits `deadline_s` at most, and is
    answered by None where that is not enough.
    """

    def __init__(
        self,
        command: Sequence[str],
        now_s: Callable[[], float],
        deadline_s: float,
        start_s: float = START_S,
    ) -> None:
        self._command, self._now_s = command, now_s
        self._deadline_s, self._start_s = deadline_s, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready, self._started_s, self._read = False, 0.0, b""
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it, so that it is ready once it is asked; a failure is said then."""
        with self._lock, suppress(OSError):
            self._running()

    def ask(self, question: object) -> float | None:
        """Its answer; None where it has none, or none in time."""
        until_s = self._now_s() + self._deadline_s
        with self._lock:
            try:
                process = self._running()
                if not self._begins(process, until_s):
                    return None
                assert process.stdin is not None
                process.stdin.write(orjson.dumps(question) + b"\n")
                return _number(self._line(process, until_s))
            except (ChildError, OSError) as error:
                _log.warning("%s: %s; it is started again", self._command[-1], error)
                self._kill()
                return None

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A session of its own: a Ctrl-C is for the planner, which then ends its child.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=os.environ | ONE_THREAD,
                start_new_session=True,
            )
            self._is_ready, self._started_s, self._read = False, self._now_s(), b""
        return self._process

    def _begins(self, process: subprocess.Popen[bytes], until_s: float) -> bool:
        """Whether it is ready by then. Raises ChildError where it should have been long ago."""
        if self._is_ready:
            return True
        try:
            self._is_ready = self._line(process, until_s) == READY
        except TimeoutError:
            if self._now_s() - self._started_s < self._start_s:
                return False
            raise
        if not self._is_ready:
            raise ChildError("says something else than that it is ready")
        return True

    def _line(self, process: subprocess.Popen[bytes], until_s: float) -> bytes:
        """Its next line. Raises TimeoutError, ChildError."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, until_s - self._now_s())):
                    raise TimeoutError(f"no answer within {self._deadline_s:g} s")
                part = os.read(process.stdout.fileno(), MOST_ANSWER)
                self._read += part
                if not part or len(self._read) > MOST_ANSWER:
                    raise ChildError("has ended" if not part else "says too much")
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _number(line: bytes) -> float | None:
    """The answer. Raises ChildError."""
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError:
        said = line
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said):
        raise ChildError(f"says {line[:40]!r}, which is no number")
    return float(said)
