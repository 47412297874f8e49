"""Answers to malformed requests, their count and log line, without the client's bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from aiohttp.http_exceptions import (
    BadHttpMethod,
    BadStatusLine,
    ContentLengthError,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    TransferEncodingError,
)

from proxy.protocol.errors import BadRequestError
from proxy.protocol.request_framing import HEAD_BYTES, Refusal
from proxy.telemetry.log import Throttle

_log = logging.getLogger(__name__)
_ANSWERS: dict[Refusal, tuple[int, str]] = {
    Refusal.SYNTAX: (400, "the request is not valid HTTP"),
    Refusal.LINE: (400, "request line: must be METHOD TARGET HTTP/1.1, one blank between each"),
    Refusal.METHOD: (405, "method: not supported"),
    Refusal.TARGET: (400, "request target: must be a path in printable ASCII"),
    Refusal.VERSION: (400, "HTTP version: must be 1.0 or 1.1"),
    Refusal.HOST: (400, "Host: must be given once, as name or address with an optional port"),
    Refusal.HEADER: (400, "headers: a name or value has invalid characters"),
    Refusal.HEAD_SIZE: (
        431,
        f"headers: at most 100, lines of 8190 bytes, {HEAD_BYTES} bytes in all",
    ),
    Refusal.HEAD_LATE: (408, "headers: not complete in time (--header-timeout)"),
    Refusal.FRAMING: (400, "body: its length must be stated once and in a valid way"),
    Refusal.CHUNKS: (400, "body: too many chunks of a few bytes"),
    Refusal.RECORDS: (400, "TLS: too many records of a few bytes"),
    Refusal.BODY_SIZE: (413, "body: too large (--max-body-bytes)"),
    Refusal.EXPECTATION: (417, "Expect: only 100-continue is understood"),
    Refusal.UPGRADE: (426, "Upgrade: websockets are not supported; send the request over HTTP"),
    Refusal.PIPELINED: (400, "too many requests on one connection at once"),
    Refusal.SILENT: (408, "no request in time (--header-timeout)"),
}
NO_FAULT = frozenset({Refusal.UPGRADE})
"""Not counted: a client asks for a websocket, and uses HTTP where there is none.

Codex does so at once only at a 426, which names the protocol to use (RFC 9110 15.5.22)."""
_BY_ERROR: tuple[tuple[type[HttpProcessingError], Refusal], ...] = (
    (LineTooLong, Refusal.HEAD_SIZE),
    (BadHttpMethod, Refusal.LINE),
    (BadStatusLine, Refusal.VERSION),
    (InvalidURLError, Refusal.TARGET),
    (InvalidHeader, Refusal.HEADER),
    (TransferEncodingError, Refusal.FRAMING),
    (ContentLengthError, Refusal.FRAMING),
)
_BY_WORDS = {
    "Missing 'Host' header in request.": Refusal.HOST,
    "Duplicate 'Host' header found.": Refusal.HOST,
    "Duplicate 'Content-Length' header found.": Refusal.FRAMING,
    "Duplicate 'Transfer-Encoding' header found.": Refusal.FRAMING,
    "Too many headers received": Refusal.HEAD_SIZE,
}


class RefusedError(BadRequestError):
    """Bytes that are not an acceptable request; also raised in a handler that waits for them.

    The message is one of a fixed set. `path`: the request's, as far as it is known.
    """

    def __init__(self, refusal: Refusal, path: str = "") -> None:
        status, message = _ANSWERS[refusal]
        super().__init__(message)
        self.status = status
        self.refusal = refusal
        self.path = path.partition("?")[0]
        if refusal in NO_FAULT:
            self.fields = {"Upgrade": "HTTP/1.1", "Connection": "Upgrade, close"}


def refusal_of(error: BaseException) -> Refusal:
    """The refusal of a parser's error; the error's own text would quote a header line."""
    if isinstance(error, HttpProcessingError):
        for kind, refusal in _BY_ERROR:
            if isinstance(error, kind):
                return refusal
        return _BY_WORDS.get(error.message, Refusal.SYNTAX)
    return Refusal.SYNTAX


class RefusalLog:
    """Counts refusals, and logs them in one throttled line."""

    def __init__(self, count: Callable[[Refusal], None]) -> None:
        self._count = count
        self._unlogged: Counter[Refusal] = Counter()
        self._throttle = Throttle()

    def note(self, refusal: Refusal, now_s: float) -> None:
        """Count one refused connection; `now_s` is the loop's time."""
        self._count(refusal)
        self._unlogged[refusal] += 1
        if self._throttle.turn(None, now_s) is None:
            return
        counts = ", ".join(f"{reason} {count}" for reason, count in self._unlogged.items())
        _log.warning("malformed requests refused: %s", counts)
        self._unlogged.clear()
