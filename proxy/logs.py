"""The log on stderr: written by a thread, so that a pipe nobody reads stops no request.

What does not fit into the queue meanwhile is dropped and counted; the next line says how many.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from logging.handlers import QueueHandler

import orjson

from proxy.plain import printable

LINES = 1000
CLOSE_S = 1.0
"""At the end: a reader that is stuck does not keep the process."""


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage()),
        }
        return orjson.dumps(line).decode()


class _TextFormatter(logging.Formatter):
    """One line per message, whatever of it came from outside."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))


class StderrLog(QueueHandler):
    """The handler of all loggers; `close` writes what is left."""

    def __init__(self, form: str) -> None:
        """`form`: text or json."""
        self._lines: queue.Queue[str | None] = queue.Queue(LINES)
        super().__init__(self._lines)
        text = _TextFormatter("%(asctime)s %(levelname)s %(message)s")
        self.setFormatter(_JsonFormatter() if form == "json" else text)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line; never waits."""
        if self._dropped:
            told = logging.LogRecord(
                record.name, logging.WARNING, "", 0, "%d log lines dropped", (self._dropped,), None
            )
            if not self._put(told):
                self._dropped += 1
                return
            self._dropped = 0
        if not self._put(record):
            self._dropped += 1

    def _put(self, record: logging.LogRecord) -> bool:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            return False
        except (TypeError, ValueError):  # a library's own line whose arguments do not fit it
            return True
        return True

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                _write(line)
            except (OSError, ValueError):
                continue  # nobody is there; the next line may find somebody

    def close(self) -> None:
        """Write what is queued, `CLOSE_S` at most."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        except queue.Full:
            pass
        super().close()


def _write(line: str) -> None:
    """Past `sys.stderr`: its buffer, if a reader is stuck, would be waited for at exit."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError):  # not a file: a test's
        sys.stderr.write(line)
        sys.stderr.flush()
        return
    data = line.encode(errors="backslashreplace")
    while data:
        data = data[os.write(number, data) :]


def set_up(level: str, form: str) -> None:
    """From now on everything that is logged goes to stderr in this form."""
    logging.basicConfig(level=level.upper(), handlers=[StderrLog(form)])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
