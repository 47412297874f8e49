"""The request log: one JSON object per line, written by a thread, never waited for by a request.

A full queue or a disk that refuses drops lines and counts them; serving goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import orjson

from proxy.core.options import Options
from proxy.core.record import RequestRecord
from proxy.plain import printable_json

QUEUE_LINES = 10_000
BATCH_LINES = 64
"""Lines made in one go: the event loop waits that long for the interpreter, a few 0.1 ms."""
LOOK_S = 0.05
_log = logging.getLogger(__name__)


def record_json(record: RequestRecord) -> bytes:
    """The line of a record; here its options become dictionaries, away from the decision."""
    return printable_json(orjson.dumps(record, default=_rows))


def _rows(value: object) -> object:
    if isinstance(value, Options):
        return value.rows()
    raise TypeError(type(value).__name__)


class RequestLog:
    """Appends records to a file; without a path every call is a no-op."""

    def __init__(self, path: Path | None, on_drop: Callable[[], None]) -> None:
        self._queue: deque[RequestRecord] = deque()
        self._on_drop = on_drop
        self._failing = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            file = path.open("ab", buffering=0)
            self._thread = threading.Thread(target=self._run, args=(file,), name="request-log")
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
        """Write what is queued and end the thread; waits for the disk."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread = None

    def _run(self, file: BinaryIO) -> None:
        """Look every `LOOK_S`: waking the thread for each record would cost more than the line."""
        with file:
            is_last = False
            while not is_last:
                is_last = self._closing.wait(LOOK_S)
                while self._queue:
                    size = min(len(self._queue), BATCH_LINES)
                    self._append(file, [self._queue.popleft() for _ in range(size)])

    def _append(self, file: BinaryIO, batch: list[RequestRecord]) -> None:
        try:
            file.write(b"".join(record_json(record) + b"\n" for record in batch))
            self._failing = False
        except OSError as error:
            for _ in batch:
                self._on_drop()
            if not self._failing:
                _log.error("request log: %s; dropping lines until it can be written", error)
            self._failing = True
