"""The log on stderr, written by a thread, so that a blocked pipe delays no request.

Lines that do not fit into the queue are dropped and counted; the next line has the count. Text from
outside is made printable: one message stays one line, without control sequences. Lines that may
come with every request are throttled: at most one per cause and 10 s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import sys
import threading
import traceback
from collections.abc import Hashable, Mapping
from itertools import islice
from logging.handlers import QueueHandler
from typing import Any

import orjson

_UNFIT = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e007f]"
)
"""Unicode's categories Cc, Cf, Cs, Zl and Zp: control characters (ANSI sequences begin with one),
marks of direction or without width, lone surrogates, line ends.
"""


def printable(text: str) -> str:
    """The text with unprintable characters as `\\uXXXX`; JSON stays valid JSON."""
    return _UNFIT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    """A character as JSON escapes it: beyond U+FFFF as two surrogates."""
    code = ord(match[0])
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 | code >> 10:04x}\\u{0xDC00 | code & 0x3FF:04x}"


def printable_json(line: bytes) -> bytes:
    """`printable` for a line of JSON without its line end; nearly always unchanged."""
    if line.isascii() and b"\x7f" not in line:
        return line  # orjson escapes control characters
    return printable(line.decode()).encode()


LINES = 1000
CLOSE_S = 1.0
"""Longest wait at exit for a reader that does not read."""


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = printable(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


class _TextFormatter(logging.Formatter):
    """One line per message, also if it has text from outside."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return printable(super().formatMessage(record))


class StderrLog(QueueHandler):
    """The handler of all loggers; `close` writes the queued lines."""

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
            count = logging.LogRecord(
                record.name, logging.WARNING, "", 0, "%d log lines dropped", (self._dropped,), None
            )
            if not self._put(count):
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
                continue  # the reader is gone; the next line may find another one

    def close(self) -> None:
        """Write the queued lines, for `CLOSE_S` at most, and close."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        except queue.Full:
            pass
        super().close()


def _write(line: str) -> None:
    """Write to the file descriptor, since the buffer of `sys.stderr` could block the exit."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError):  # a test's stream without a descriptor
        sys.stderr.write(line)
        sys.stderr.flush()
        return
    data = line.encode(errors="backslashreplace")
    while data:
        data = data[os.write(number, data) :]


def set_up(level: str, form: str) -> None:
    """Log everything to stderr in this form."""
    logging.basicConfig(level=level.upper(), handlers=[StderrLog(form)])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


LOG_EVERY_S = 10.0
KEYS = 1024
"""Most causes remembered; beyond it the cause that was logged longest ago is forgotten."""


class Throttle:
    """Limits log lines to one per cause and LOG_EVERY_S; counts the suppressed ones."""

    __slots__ = ("_causes",)

    def __init__(self) -> None:
        self._causes: dict[Hashable, tuple[float, int]] = {}

    def turn(self, cause: Hashable, now_s: float) -> int | None:
        """Lines of `cause` suppressed since its last one; None: suppress this line too."""
        until_s, suppressed = self._causes.get(cause, (now_s, 0))
        if now_s < until_s:
            self._causes[cause] = until_s, suppressed + 1
            return None
        self._causes.pop(cause, None)
        if len(self._causes) >= KEYS:
            del self._causes[next(iter(self._causes))]
        self._causes[cause] = now_s + LOG_EVERY_S, 0
        return suppressed


def more(suppressed: int) -> str:
    """End of a log line: the number of similar lines that were suppressed."""
    return f"; {suppressed} more since the last line" if suppressed else ""


EACH, FEW = 8, 3
"""More instances than EACH that share a line's cause are one line, which names a FEW of them."""


def log_each(log: logging.Logger, lines: Mapping[str, str], of_many: str) -> None:
    """Log a line for each instance, by its name; of more than EACH how many `of_many` is true."""
    if len(lines) > EACH:
        few = ", ".join(islice(lines, FEW))
        log.info("%d instances %s: %s and %d more", len(lines), of_many, few, len(lines) - FEW)
        return
    for name, line in lines.items():
        log.info("instance %s %s", name, line)


class LoopFaults:
    """The loop's exception handler: logs a fault in a callback once per line of code and interval.

    The text of each has the callback's own address and arguments in it.
    """

    __slots__ = ("_throttle",)

    def __init__(self) -> None:
        self._throttle = Throttle()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what the loop tells of a fault, with its traceback."""
        error, message = context.get("exception"), str(context.get("message"))
        cause = message if error is None else (type(error), _where(error))
        suppressed = self._throttle.turn(cause, loop.time())
        if suppressed is not None:
            loop.default_exception_handler({**context, "message": message + more(suppressed)})


def _where(error: BaseException) -> tuple[str, int] | None:
    """The line of code that raised an exception."""
    at = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        at = frame.f_code.co_filename, line
    return at
