"""The request log: one JSON object per line, written by a thread; no request waits for it.

`RecordLog` is what the access log is made of too: a queue, the thread, a file or stdout.

While the queue is full or the file cannot be written, lines are dropped and counted, and requests
are served as usual. If the file is renamed or deleted, its path is opened again.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import orjson

from proxy.core.placement.alternatives import MOST_KEPT, Alternatives, PastChecks
from proxy.telemetry.log import printable_json
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing.trace import Trace

QUEUE_LINES = 2_500
"""A record with all options of a decision among many instances has 10 KB: 25 MB in all."""
BATCH_LINES = 64
"""Lines made without a pause. The event loop waits as long for the interpreter: a few 0.1 ms."""
LOOK_S = 0.05
STDOUT = Path("-")
"""The path that stands for stdout."""
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
        if isinstance(value, Alternatives | PastChecks):
            return value.rows(candidates)
        if isinstance(value, Trace):
            return value.trace_id
        raise TypeError(type(value).__name__)

    return printable_json(orjson.dumps(record, default=rows))


class MayFail(Protocol):
    """A part that goes on without what it cannot do."""

    @property
    def fault(self) -> tuple[str, float] | None:
        """What it cannot do, and since when in unix seconds; None if all is well."""


class RecordSink(ABC):
    """What gets the record of each ended request."""

    @abstractmethod
    def write(self, record: RequestRecord) -> None:
        """Take one record; the caller must not change it afterwards."""


class RecordLog(RecordSink):
    """Appends a line per record to a file, or to stdout; without a path every call is a no-op.

    `name`: what the log on stderr calls it. `line`: a record's line, made by the thread.
    """

    def __init__(
        self,
        name: str,
        path: Path | None,
        line: Callable[[RequestRecord], bytes],
        on_drop: Callable[[], None],
    ) -> None:
        """Raises OSError when the file cannot be opened."""
        self._name, self._line = name, line
        self._queue: deque[RequestRecord] = deque()
        self._on_drop = on_drop
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None
        self.fault: tuple[str, float] | None = None
        """Why nothing can be written now, and since the end of which request, unix seconds."""
        if path is not None:
            file = _Stdout(name) if path == STDOUT else _LogFile(name, path)
            self._writer = threading.Thread(
                target=self._run, args=(file,), name=name.replace(" ", "-"), daemon=True
            )
            self._writer.start()

    @property
    def is_on(self) -> bool:
        """Whether lines are written."""
        return self._writer is not None

    def write(self, record: RequestRecord) -> None:
        """Queue one record."""
        if self._writer is None:
            return
        if len(self._queue) < QUEUE_LINES:
            self._queue.append(record)
        else:
            self._on_drop()

    def close(self) -> None:
        """Write what is queued and end the thread; waits for the disk, `CLOSE_S` at most."""
        if self._writer is not None:
            self._closing.set()
            self._writer.join(CLOSE_S)
            self._writer = None

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
                if file.fault is None:
                    self.fault = None
                elif self.fault is None:
                    self.fault = file.fault, batch[-1].t_done or batch[-1].t_proxy_recv
        file.close()

    def _lines(self, batch: list[RequestRecord]) -> list[bytes]:
        lines = []
        for record in batch:
            try:
                lines.append(self._line(record) + b"\n")
            except TypeError as error:  # orjson's error is one too
                said = self._name, record.request_id, error
                _log.error("%s: %s cannot be written: %s", *said)
        return lines


class RequestLog(RecordLog):
    """Records as JSON, with at most `candidates` options of each decision."""

    def __init__(self, path: Path | None, on_drop: Callable[[], None]) -> None:
        """Raises OSError when the file cannot be opened."""
        self.candidates = MOST_KEPT
        super().__init__("request log", path, self._json, on_drop)

    def _json(self, record: RequestRecord) -> bytes:
        return record_json(record, self.candidates)


class _LogFile:
    """The open log file. It has whole lines only, and is reopened when its path is another file."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._fd = self._open()
        self._is_torn = False
        self.fault: str | None = None

    def _open(self) -> int:
        return os.open(self._path, _FLAGS, 0o666)

    def append(self, lines: list[bytes]) -> int:
        """Write lines; returns how many were written."""
        try:
            self._follow()
            written = self._write((b"\n" if self._is_torn else b"") + b"".join(lines))
        except OSError as error:
            self._failed(error.strerror or str(error))
            return 0
        if self.fault is not None:
            _log.warning("%s: can be written again", self._name)
            self.fault = None
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
        self._fd = self._open()

    def _write(self, data: bytes) -> bool:
        """Write all of `data` or leave no half line behind; raises OSError."""
        left = memoryview(data)
        try:
            while left:
                try:
                    written = os.write(self._fd, left)
                    left = left[written:]
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
        if self.fault is None:
            self.fault = f"{self._name}: {why}; dropping lines until it can be written"
            _log.error("%s", self.fault)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)


class _Stdout(_LogFile):
    """The process's stdout, which is never reopened nor cut.

    It is shared with whoever else has it, so it keeps its mode: what may block is not begun.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, STDOUT)

    def _open(self) -> int:
        # Where the process began without one, descriptor 1 is something else by now.
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(STDOUT))
        return os.dup(1)

    def _follow(self) -> None:
        """Nothing: it has no path."""

    def _write(self, data: bytes) -> bool:
        left = memoryview(data)
        try:
            while left:
                if not self._is_ready():
                    raise BlockingIOError(errno.EAGAIN, "its reader does not read")
                written = os.write(self._fd, left[: select.PIPE_BUF])
                left = left[written:]
        except OSError:
            self._is_torn |= len(left) < len(data)
            raise
        self._is_torn = False
        return True
