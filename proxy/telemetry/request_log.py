"""The request log: one JSON object per line, written by a thread; no request waits for it.

While the queue is full or the file cannot be written, lines are dropped and counted, and requests
are served as usual. If the file is renamed or deleted, its path is opened again.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import orjson

from proxy.core.placement.alternatives import MOST_KEPT, Alternatives
from proxy.telemetry.log import printable_json
from proxy.telemetry.record import RequestRecord

QUEUE_LINES = 10_000
BATCH_LINES = 64
"""Lines made without a pause. The event loop waits as long for the interpreter: a few 0.1 ms."""
LOOK_S = 0.05
PIPE_S = 1.0
"""Longest wait for a full pipe to be read."""
CLOSE_S = 5.0
"""Longest wait at exit for a disk that does not respond."""
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_log = logging.getLogger(__name__)


def record_json(record: RequestRecord, candidates: int = MOST_KEPT) -> bytes:
    """The log line of a record, with at most `candidates` options of its decision.

    The options become dictionaries here, in the log's thread, not in the decision. Raises TypeError
    for a value that JSON does not have.
    """

    def rows(value: object) -> object:
        if isinstance(value, Alternatives):
            return value.rows(candidates)
        raise TypeError(type(value).__name__)

    return printable_json(orjson.dumps(record, default=rows))


class RequestLog:
    """Appends records to a file; without a path every call is a no-op."""

    def __init__(self, path: Path | None, on_drop: Callable[[], None]) -> None:
        """Raises OSError when the file cannot be opened."""
        self._queue: deque[RequestRecord] = deque()
        self._on_drop = on_drop
        self.candidates = MOST_KEPT
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            file = _LogFile(path)
            self._thread = threading.Thread(
                target=self._run, args=(file,), name="request-log", daemon=True
            )
            self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Queue one record; the caller must not change it afterwards."""
        if self._thread is None:
            return
        if len(self._queue) < QUEUE_LINES:
            self._queue.append(record)
        else:
            self._on_drop()

    def close(self) -> None:
        """Write what is queued and end the thread; waits for the disk, `CLOSE_S` at most."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join(CLOSE_S)
            self._thread = None

    def _run(self, file: _LogFile) -> None:
        """Read the queue every `LOOK_S`: waking the thread per record costs more than a line."""
        is_last = False
        while not is_last:
            is_last = self._closing.wait(LOOK_S)
            while self._queue:
                size = min(len(self._queue), BATCH_LINES)
                batch = [self._queue.popleft() for _ in range(size)]
                for _ in range(size - file.append(self._lines(batch))):
                    self._on_drop()
        file.close()

    def _lines(self, batch: list[RequestRecord]) -> list[bytes]:
        lines = []
        for record in batch:
            try:
                lines.append(record_json(record, self.candidates) + b"\n")
            except TypeError as error:  # orjson's error is one too
                _log.error("request log: %s cannot be written: %s", record.request_id, error)
        return lines


class _LogFile:
    """The open log file. It has whole lines only, and is reopened when its path is another file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, _FLAGS, 0o666)
        self._is_failing = self._is_torn = False

    def append(self, lines: list[bytes]) -> int:
        """Write lines; returns how many were written."""
        try:
            self._follow()
            written = self._write((b"\n" if self._is_torn else b"") + b"".join(lines))
        except OSError as error:
            self._failed(str(error))
            return 0
        if self._is_failing:
            _log.warning("request log: can be written again")
            self._is_failing = False
        return len(lines) if written else 0

    def _follow(self) -> None:
        """Open the path again if the file was rotated or deleted."""
        if self._fd >= 0:
            is_ours = os.fstat(self._fd)
            try:
                if os.path.samestat(is_ours, self._path.stat()):
                    return
            except FileNotFoundError:
                pass
            os.close(self._fd)
            self._fd = -1
        self._is_torn = False
        self._fd = os.open(self._path, _FLAGS, 0o666)

    def _write(self, data: bytes) -> bool:
        """Write all of `data` or leave no half line behind; raises OSError."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._fd, left) :]
                except BlockingIOError:
                    if not self._is_ready():
                        raise
        except OSError:
            self._take_back(len(data) - len(left))
            raise
        self._is_torn = False
        return True

    def _is_ready(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(PIPE_S * 1000))

    def _take_back(self, size: int) -> None:
        """Truncate the written part of a batch; if that fails, note that a line is torn."""
        if not size:
            return
        try:
            state = os.fstat(self._fd)
            if not stat.S_ISREG(state.st_mode):
                raise OSError
            os.ftruncate(self._fd, state.st_size - size)
        except OSError:
            self._is_torn = True

    def _failed(self, why: str) -> None:
        if not self._is_failing:
            _log.error("request log: %s; dropping lines until it can be written", why)
        self._is_failing = True

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
