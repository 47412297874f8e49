"""Scans a stream's events as bytes pass, and the fast path for plain content.

The scanner gets the same bytes as the client, in any segmentation, and its results do not depend on
that. It never parses JSON: it finds the first content, counts events, and searches the rest in
steps for errors and the end. Limits: counted events end in two newlines, as vLLM writes them. An
error is kept up to `CARRY_BYTES`. Usage is found up to `TAIL_BYTES` before the end of its event. Of
a long event only both ends are searched (`ends_of`): a client may have had its middle written.

A stream has a piece every 20 ms. The cost is not the work on a piece but fetching the data that it
touches back into the CPU caches. So `FastPath` is one compiled object between an instance's
connection and its client's. No other code of the proxy runs for a piece of only content. It knows
neither connection; its owner passes in where bytes go.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import orjson

from proxy.protocol.endpoints import END_NAMES
from proxy.protocol.streams.parse_cost import is_cheap

TAIL_BYTES: Final = 4096
LAST_BYTES: Final = 1024
"""Bytes of the end of an answer that are searched for its finish reason: each takes 5 ns."""
MOST_USAGES: Final = 4
"""Most members `usage` of one event that are looked at, from its end."""
MOST_KEYS: Final = 64
"""Most names `usage` that are looked at from an end, whatever stands behind them."""
MOST_LINES: Final = 64
"""Most lines that may follow the event with the usage."""
CARRY_BYTES: Final = 65536
"""Most bytes that are read of an answer in search of its first event."""
LONG_BYTES: Final = 3 * CARRY_BYTES
"""A longer event is searched in its first two thirds of this and in its last third."""
_NEW_BYTES: Final = 1 << 18
"""More than one turn of the loop brings: of more bytes these have the end of the first event."""
_DIGITS: Final = b"0123456789, \t\r\n"
_NAMES_OF_TEXT: Final = (
    b"content",
    b"text",
    b"delta",
    b"reasoning_content",
    b"reasoning",
    b"refusal",
    b"thinking",
    b"partial_json",
)
# Each has a fixed beginning of its own: one pattern for all is tried at every quote.
_CONTENT: Final = [
    (b'"%b"' % name, re.compile(rb'"%b"\s*:\s*"[^"]' % name)) for name in _NAMES_OF_TEXT
] + [(b'"tool_calls"', re.compile(rb'"tool_calls"\s*:\s*\[\s*\{'))]
_TEXTS: Final = (b'"content":"', b'"text":"')
"""How most engines begin it."""
_CONTENT_BYTES: Final = 64
"""A match of `_CONTENT` is not longer, unless JSON is padded with blanks."""
_USAGE: Final = re.compile(rb'(?<!\\)"usage"\s*:\s*\{')
"""Begins a member `usage` with an object, but no JSON string, in which its quotes are escaped."""
_USAGE_KEY: Final = b'"usage"'
_NUMBERS: Final = re.compile(rb"(?<=\[)(?:\s*\d{1,20}\s*,)+")
"""All but the last of a list of whole numbers: after `usage` vLLM may write the prompt's ids."""
_SKIPPED: Final = b"data:\n\n"
"""An event without data, in place of those that the fast path took."""
_ERROR: Final = re.compile(
    rb'event:\s*error\b|(?:event:[^\n]*\n)?data:\s*\{\s*"(?:error"|type"\s*:\s*"error")'
)
_ERROR_LINE: Final = re.compile(
    rb"\n(?:event:\s*(?:error|response\.failed)\b[^\n]*\ndata:\s*"
    rb'|data:\s*(?=\{\s*(?:"error"\s*:\s*[{"]|"type"\s*:\s*"(?:error|response\.failed)")))(\{[^\n]*)\n'
)
_BEHIND_USAGE: Final = re.compile(
    rb'data:\s*(?:\[DONE\]|\{\s*"type"\s*:\s*"(?:message_stop|ping)"[^\n]*)'
)
"""A line that may follow the event with the usage."""
_FIRST_DATA: Final = re.compile(rb'\ndata:\s*(\{(?!\s*"type"\s*:\s*"ping")[^\n]*)\n')
# Both begin with a line end, put before what is searched: without a fixed beginning the search in
# an event of 1 MB takes 16 ms, with one 0.1.
_LAST_EVENT: Final = re.compile(rb"\ndata:\s*\[DONE\][^\n]*\n\r?\n")
_BEGUN: Final = re.compile(rb"\ndata:[ \t]*([{\[].*)\Z")
_NAMES: Final = "|".join(map(re.escape, END_NAMES)).encode()
_NAME: Final = rb'(?:event:\s*|data:\s*\{\s*"type"\s*:\s*")'
"""The text before an event's name; the data has it too, for some servers only there."""
_LAST_NAMED: Final = re.compile(rb"\n%b(?:error|%b)\b" % (_NAME, _NAMES))
_END: Final = re.compile(rb"\n(?:data:\s*\[DONE\]|%b(?:%b)\b)" % (_NAME, _NAMES))
"""Marks of a stream's end, each at the start of a line: a JSON string, which a model may write,
contains no line start."""
_DONE_LINE: Final = b"data: [DONE]"
_DONE: Final = b"\n%b\n\n" % _DONE_LINE
"""The end of most streams."""
_A_LINE: Final = re.compile(rb"\n(?!\r?(?:\n|\Z))[^:]")
"""Before a line that is neither blank nor a comment; for `\\n` before all, as above."""
_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_END_BYTES: Final = 2
"""Bytes of the end of a piece in which the end of an event may begin."""
_HINTS: Final = (b"[DONE]", b"\nevent:", b'{"type"')
_ERROR_HINT: Final = b"error"
_UNKNOWN: Final = b"\n"
_starts: list[bytes] = [_UNKNOWN] * 4103
"""First bytes of a chunk that holds exactly one event, by the chunk's total size.

A size has only one spelling, but for leading zeros and capitals. Up to three digits; filled in when
a size first occurs. Not a `Memo`: an index takes 22 ns, a look-up in one 53, and this is done for
every piece of every stream.
"""
_LINE_START: Final = b'data: {"'
_TYPED: Final = b'data: {"type"'
_ERROR_KEY: Final = ord("e")
_QUOTE: Final = ord('"')


def events_end(data: bytes | bytearray, start: int = 0) -> int:
    """End of the last whole event at or after `start`; 0 without one."""
    plain, crlf = data.rfind(b"\n\n", start), data.rfind(b"\n\r\n", start)
    return plain + 2 if plain >= crlf and plain >= 0 else crlf + 3 if crlf >= 0 else 0


def long_end(events: bytes) -> int:
    """End of the first of these events if it is a long one, else 0."""
    size = len(events)
    if size <= LONG_BYTES or _first_end(events, 0, LONG_BYTES) > 0:
        return 0
    return _first_end(events, max(0, size - _NEW_BYTES), size) or size


def _first_end(events: bytes, start: int, stop: int) -> int:
    """End of the first event that ends between these places; 0 without one."""
    plain, crlf = events.find(b"\n\n", start, stop), events.find(b"\n\r\n", start, stop)
    if crlf >= 0 and (plain < 0 or crlf < plain):
        return crlf + 3
    return plain + 2 if plain >= 0 else 0


def ends_of(events: bytes) -> bytes:
    """Whole events, of a long first one only both ends.

    So what one event costs is bounded, however long it is. What is left is no JSON, unless only
    numbers of a list are missing: brackets would close at another depth than they were opened.
    """
    end = long_end(events)
    if not end:
        return events
    begin, rest = 2 * CARRY_BYTES, end - CARRY_BYTES
    head = events[:begin]
    return b"%b%b%b" % (head, _joint(head, events, begin, rest), events[rest:])


def place_of(key: bytes, event: bytes) -> int:
    """Where `key` first occurs in an event, of a long one in its ends alone; -1 without it."""
    size = len(event)
    if size <= LONG_BYTES:
        return event.find(key)
    at = event.find(key, 0, 2 * CARRY_BYTES)
    return at if at >= 0 else event.find(key, size - CARRY_BYTES)


def _joint(head: bytes, events: bytes, begin: int, end: int) -> bytes:
    """What stands for the middle of a long event: nothing where that is numbers of a list."""
    if head.rfind(_USAGE_KEY) < 0 or events[begin : begin + 64].translate(None, _DIGITS):
        return b"\0"
    return b"\0" if events[begin:end].translate(None, _DIGITS) else b""


def carries_content(events: bytes) -> bool:
    """Whether these events have content: text, reasoning or a call of a tool."""
    for member in _TEXTS:
        begin = events.find(member) + len(member)
        if begin >= len(member) and begin < len(events) and events[begin] != _QUOTE:
            return True
    for name, form in _CONTENT:
        at = events.find(name)
        if at >= 0 and form.search(events, at) is not None:
            return True
    return False


def end_of_stream(events: bytes) -> int:
    """End of the event `[DONE]` in these whole events; 0 without one."""
    end = long_end(events)
    start = end - CARRY_BYTES if end else 0
    if events.find(b"[DONE]", start) < 0:
        return 0
    if start:
        found = _LAST_EVENT.search(events, start)
        return found.end() if found else 0
    found = _LAST_EVENT.search(b"\n" + events)
    return found.end() - 1 if found else 0


def names_the_end(events: bytes) -> bool:
    """Whether the name of one of these whole events is that of its stream's last event.

    Behind an error of the engine nothing follows either.
    """
    return _LAST_NAMED.search(b"\n" + ends_of(events)) is not None


def is_cut(rest: bytes | bytearray) -> bool:
    """Whether what stands behind the last whole event is part of one, as its JSON tells."""
    begun = _BEGUN.search(b"\n" + rest)
    if begun is None:
        return False
    if not is_cheap(begun[1]):
        return True
    try:
        orjson.loads(begun[1])
    except orjson.JSONDecodeError:
        return True
    return False


def object_of(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes; empty where they are anything else."""
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def first_event(head: bytes) -> bytes | None:
    """The first complete event without its comments; None if it is not complete yet."""
    return FirstEvent().feed(head)


class FirstEvent:
    """The search for a stream's first event, piece by piece.

    The work grows with the bytes and not with their square, however small the pieces are: comments
    are forgotten as they come, and an event is put together once its end has come.
    """

    __slots__ = ("_begun", "_edge")

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._edge = b""
        """The begin of a line that may be a comment or blank; later the end of what has begun."""

    def feed(self, piece: bytes) -> bytes | None:
        """The event without its comments, once it is complete."""
        new = self._edge + piece
        if self._begun:
            self._begun.append(piece)
        elif (line := _A_LINE.search(b"\n" + new)) is not None:
            start = line.start()
            new = new[start:]
            self._begun.append(new)
        else:
            last = new[new.rfind(b"\n") + 1 :]
            self._edge = b":" if last.startswith(b":") else last
            return None
        self._edge = new[-_END_BYTES:]
        if _BLANK_LINE.search(new) is None:
            return None
        begun = b"".join(self._begun)
        found = _BLANK_LINE.search(begun)
        assert found is not None
        end = found.end()
        lines = begun[:end].replace(b"\r\n", b"\n").split(b"\n")
        return b"\n".join([line for line in lines if line and not line.startswith(b":")])


def is_error_event(event: bytes) -> bool:
    """Whether an event is an engine error: vLLM sends these in a 200."""
    return _ERROR.match(event) is not None


class Scanner:
    """Scans one answer. Feed it every piece; its fields may be read at any time.

    `comments_size`: bytes of pieces that are only comments, which do not count as progress.
    """

    __slots__ = (
        "_edge",
        "_ended",
        "_error",
        "_first",
        "_has_first",
        "_last",
        "_looked_to",
        "_open",
        "_recent",
        "_recent_to",
        "comments_size",
        "events",
        "has_content",
        "size",
    )

    def __init__(self) -> None:
        self.events = 0
        self.size = self._recent_to = self._looked_to = 0
        self.comments_size = 0
        self.has_content = False
        self._open = b""
        self._edge = b""
        self._recent = bytearray(b"\n")
        self._ended = self._has_first = False
        self._first = self._error = self._last = b""

    def takes(self, wire: bytes) -> bytes:
        """Accept a piece of the wire if it is one chunk of one event of one line with content.

        That is, without usage, error or end; only the last one is kept. Returns what the client
        gets of it: the same bytes. Nothing for any other piece, which is to be framed and fed. The
        piece must begin between two chunks and two events (`is_between`).
        """
        size = len(wire)
        if size >= len(_starts):
            return b""
        start = _starts[size]
        if not wire.startswith(start):
            if start is _UNKNOWN:
                _learn(size)
            return b""
        begin = len(start)
        if not wire.endswith(b"\n\n\r\n") or wire[begin] == _ERROR_KEY:
            return b""
        if wire.find(b"\n", begin) != size - 4:
            return b""
        if wire.rfind(_USAGE_KEY) >= 0 and not _is_without_usage(wire):
            return b""
        self.events += 1
        self.size += size - begin + len(_LINE_START) - 2
        self._last = wire
        return wire

    @property
    def is_between(self) -> bool:
        """Whether content has passed, and the last newline cannot be half of a pair."""
        return self.has_content and not self._open

    def feed(self, data: bytes) -> None:
        """Scan the next piece of the answer's body.

        A very long one is an event with what came with its end.
        """
        if self.size != self._recent_to:
            self._recent += _SKIPPED
        size = len(data)
        self.size += size
        if size > LONG_BYTES:
            data = ends_of(data)
        if data.startswith(b":") and b"\ndata:" not in data:
            self.comments_size += size
        if data.find(b"\n") == len(data) - 2 and data.endswith(b"\n\n") and not self._open:
            self.events += 1  # one event of one line, as nearly always
        else:
            self._count_events(self._open + data)
        self._recent += data
        self._recent_to = self.size
        if not self.has_content:
            seen = self._edge + data
            self.has_content = carries_content(seen)
            self._edge = seen[-_CONTENT_BYTES:]
        if len(self._recent) > 3 * TAIL_BYTES:
            self._look_back()
            self._drop_oldest()

    def _count_events(self, data: bytes) -> None:
        """Count pairs of newlines; an odd one at the end waits for the next piece in `_open`."""
        self.events += data.count(b"\n\n")
        at_end = len(data) - len(data.rstrip(b"\n"))
        self._open = b"\n" if at_end & 1 else b""

    def _drop_oldest(self) -> None:
        recent = self._recent
        if not self._has_first and recent.find(b"\ndata:") >= 0:
            self._has_first, self._first = True, _first_data(recent)
        if (start := _last_usage(recent, len(recent))) >= 0:
            recent[start:] = _NUMBERS.sub(b"", recent[start:])
        if len(recent) > 2 * TAIL_BYTES:
            del recent[:-TAIL_BYTES]

    def _look_back(self) -> None:
        """Search the recent bytes for the end; called before they are dropped or read."""
        recent = self._recent
        if self._looked_to == self._recent_to:
            return
        self._looked_to = self._recent_to
        # rfind is several times as fast as `in` where most of the text matches nothing.
        if not self._ended:
            self._ended = recent.endswith(_DONE) or (
                max(map(recent.rfind, _HINTS)) >= 0 and _END.search(recent) is not None
            )
        if not self._error and recent.rfind(_ERROR_HINT) >= 0:
            found = _ERROR_LINE.search(recent)
            self._error = bytes(found[1][:CARRY_BYTES]) if found else b""

    @property
    def is_done(self) -> bool:
        """Whether the stream's own end marker has passed, or an error, which ends it too."""
        self._look_back()
        return self._ended or bool(self._error)

    def error(self) -> bytes | None:
        """The data of an error event among the last ones, as JSON bytes."""
        if self.size - self._recent_to > 2 * TAIL_BYTES:
            return None
        self._look_back()
        return self._error or None

    def usage(self, opening: bytes = b"{") -> bytes | None:
        """See `usage_member`, of what has passed so far."""
        return usage_member(self._recent, opening) if self.size == self._recent_to else None

    @property
    def last_events(self) -> bytes:
        """The last events that have passed, up to `LAST_BYTES` and a piece of the fast path."""
        return self._last + self._recent[-LAST_BYTES:]

    @property
    def recent_events(self) -> bytes:
        """All that is kept of what has passed: of a short stream all of it."""
        return self._last + self._recent

    @property
    def first_data(self) -> bytes:
        """The JSON data of the stream's first event that is not a ping; empty where it is long."""
        return self._first if self._has_first else _first_data(self._recent)


def _is_without_usage(event: bytes) -> bool:
    return event.count(_USAGE_KEY) == event.count(b'"usage":null')


def _learn(size: int) -> None:
    """Note how a piece of this size begins, if it can be a chunk of one event."""
    for digits in (1, 2, 3):
        body = b"%x" % max(0, size - digits - 4)
        if len(body) == digits:
            _starts[size] = body + b"\r\n" + _LINE_START


def _first_data(seen: bytearray) -> bytes:
    found = _FIRST_DATA.search(seen)
    return bytes(found[1]) if found and found.end() - found.start() <= TAIL_BYTES else b""


def _last_usage(seen: bytes | bytearray, end: int, begin: int = 0) -> int:
    """Start of the last member `usage` from `begin` to `end`; -1 without one."""
    for _ in range(MOST_KEYS):
        start = seen.rfind(_USAGE_KEY, begin, end)
        if start < 0:
            break
        if _USAGE.match(seen, start):
            return start
        end = start
    return -1


def _is_behind_usage(line: bytes | bytearray) -> bool:
    if not line.startswith(b"data:"):
        return line.startswith((b":", b"event:"))
    if line.startswith(_LINE_START) and not line.startswith(_TYPED):
        return False  # its first member is not `type`: no regular expression is needed
    return line == _DONE_LINE or _BEHIND_USAGE.fullmatch(line) is not None


def _last_line(seen: bytes | bytearray) -> tuple[int, int]:
    """Begin and end of the last line that may have the usage; an end of 0 without one."""
    begin = end = len(seen.rstrip())
    for _ in range(MOST_LINES):
        if end <= 0:
            return 0, 0
        begin = seen.rfind(b"\n", 0, end) + 1
        line = seen[begin:end].strip()
        if line and not _is_behind_usage(line):
            return begin, end
        end = begin - 1
    return 0, 0


def usage_member(seen: bytes | bytearray, opening: bytes = b"{") -> bytes | None:
    """The JSON object of `usage` and what follows it in the last event, or in a whole answer.

    `opening`: what stands for all that is in front of it. The result is valid JSON only if `usage`
    is at that depth, by default a member of the event or answer itself. A deeper one is followed by
    more closing brackets, one in an earlier event by other events.
    """
    begin, end = _last_line(seen)
    start = _last_usage(seen, end) if end > 0 else -1
    for _ in range(MOST_USAGES):
        if start < 0:
            break
        found = bytes(seen[start:end])
        if len(found) > LONG_BYTES:
            found = ends_of(found)
        if len(found) > TAIL_BYTES:
            found = _NUMBERS.sub(b"", found)
        if len(found) > TAIL_BYTES:
            break
        earlier = _last_usage(seen, start, begin) if start > begin else -1
        if earlier < 0 or object_of(opening + found):
            return opening + found
        start = earlier  # this one is further in, such as a tool's parameter
    return None


def _drop(data: bytes) -> None:
    """Drop bytes while no answer is served."""


def _nothing() -> int:
    return 0


class FastPath:
    """Reads of one connection into `buffer`; pieces of plain content are passed on at once.

    That is while it serves an answer (`serve`) and is open (`open`); all other reads go to `rest`.
    `get_buffer` and `buffer_updated` are those of `asyncio.BufferedProtocol`.
    """

    __slots__ = ("_buffer", "_full", "_gone", "_scanner", "_until", "_waiting", "_write", "rest")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._until = 0
        self.rest: Callable[[bytes], None] = _drop
        self._scanner: Scanner | None = None
        self._write: Callable[[bytes], object] = _drop
        self._waiting: Callable[[], int] = _nothing
        self._full: Callable[[], object] = _nothing
        self._gone: Callable[[], object] = _nothing

    def serve(
        self,
        scanner: Scanner,
        write: Callable[[bytes], object],
        waiting: Callable[[], int],
        full: Callable[[], object],
        gone: Callable[[], object],
    ) -> None:
        """Serve an answer: what `scanner` takes of a piece is passed to `write`.

        `waiting` returns how many bytes the receiver has not read yet; if there are any, `full`
        checks whether they are too many. `gone` is called if a write is refused (RuntimeError).
        """
        self._scanner, self._write, self._waiting = scanner, write, waiting
        self._full, self._gone = full, gone
        self._until = 0

    def open(self, until: int) -> None:
        """The last piece ended between two events: pass pieces on up to before event `until`."""
        if self._scanner is not None:
            self._until = until

    def shut(self) -> None:
        """Send the next piece to `rest`."""
        self._until = 0

    def leave(self) -> None:
        """Shut, and serve no answer any more."""
        self._until = 0
        if self._scanner is not None:
            self._scanner = None
            self._write, self._waiting = _drop, _nothing
            self._full = self._gone = _nothing

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of the next read, used before anything else can read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` were read from the instance."""
        data: bytes = self._buffer[:nbytes].tobytes()
        scanner = self._scanner
        if scanner is None or scanner.events + 1 >= self._until:
            self.rest(data)
            return
        passed = scanner.takes(data)
        if not passed:
            self.rest(data)
            return
        try:
            self._write(passed)
        except RuntimeError:
            self._gone()
            return
        if self._waiting():
            self._full()
