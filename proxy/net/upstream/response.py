"""An instance's answer as it comes: its head, then its body in pieces.

Until its owner takes over (`UpstreamResponse.pour`), up to `HOLD_BYTES` are held, then the
connection is paused. Whoever waits for more resumes it: then the answer counts in the room of all
(`Share`). Afterwards each piece is passed on in the call that read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from proxy.core.admission.largest_pays import LargestPays
from proxy.core.types import FailureKind
from proxy.net.timeouts import Alarm
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.framing import Chunked, Framing, FramingError, Length, UntilClose
from proxy.protocol.headers import answer_lines, page_lines
from proxy.protocol.streams.sse import FastPath

HOLD_BYTES = 65536
"""Held before the sender has to wait."""
COUNTED_BYTES = 4096
"""Answers that hold more than this are counted."""
EVENTS_BYTES = 32 << 20
"""Most bytes held of all answers whose beginning is waited for, and of the incomplete events of
all streams. Beyond it the largest one of the instance that has most is cut."""
_NO_ROOM = "the beginning of an answer for which no buffer is left"
_NO_BODY = Length(0)
Fields = list[tuple[bytes, bytes]]
Sink = Callable[[bytes], None]


class Holder(Protocol):
    """An answer of which bytes are held."""

    def give_way(self) -> None:
        """End it: it is the largest of too many."""


class Share(NamedTuple):
    """The room for bytes of answers, and the instance that has a share of it."""

    room: LargestPays[Holder]
    owner: str


class ResponseSource(Protocol):
    """The connection of an answer, as far as the answer uses it."""

    loop: asyncio.AbstractEventLoop
    share: Share | None
    """Of the instance; None where nothing is counted."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Resume reading."""

    def leave(self, reply: UpstreamResponse, /) -> None:
        """Drop the rest of this answer."""

    def fast_path(self, reply: UpstreamResponse, /) -> FastPath | None:
        """The fast path for the pieces of this answer, a stream; None if it is over."""

    def leave_fast_path(self, reply: UpstreamResponse, /) -> None:
        """Send every further piece of this answer to its sink."""

    def hang_up(self, reply: UpstreamResponse, /) -> bool:
        """Close the sending side; False if the connection could not be read after that."""


class Head:
    """A parsed head, shared by all answers that begin with the same bytes.

    Names in `fields` are in lower case; `after_version` is what a client gets after "HTTP/1.x",
    without framing headers.
    """

    __slots__ = (
        "after_version",
        "coding",
        "fields",
        "is_packed",
        "is_stream",
        "keeps",
        "kind",
        "length",
        "reason",
        "status",
    )

    def __init__(self, head: bytes, status: int, fields: Fields) -> None:
        self.status, self.fields = status, fields
        self.reason = head[13 : head.index(b"\r\n")]
        self.kind = (self.header(b"content-type") or b"").lower()
        self.is_packed = self.header(b"content-encoding") is not None
        self.is_stream = status == 200 and self.kind.startswith(b"text/event-stream")
        self.coding = self.header(b"transfer-encoding")
        self.length = self.header(b"content-length")
        wish = (self.header(b"connection") or b"").lower()
        is_1_1 = head.startswith(b"HTTP/1.1")
        self.keeps = b"close" not in wish if is_1_1 else b"keep-alive" in wish
        start = b" %d %b\r\n" % (status, self.reason)
        self.after_version = start + page_lines(fields) + b"".join(answer_lines(fields))

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case)."""
        for key, value in self.fields:
            if key == name:
                return value
        return None


NO_HEAD = Head(b"HTTP/1.1 000 \r\n\r\n", 0, [])


def _nowhere(data: bytes) -> None:
    """The sink of an answer that is not wanted."""


class UpstreamResponse:
    """The answer to one request: its head once it has come, then the body.

    `heard`: any byte of the answer has come. `is_over`: nothing more comes; `failure` is set if
    that is too early. `may_repeat`: whether the request may be sent once more on a new connection,
    if it was lost on a stale one.
    """

    __slots__ = (
        "_alarm",
        "_connection",
        "_is_head",
        "_waiter",
        "body",
        "failure",
        "framing",
        "has_begun",
        "head",
        "heard",
        "held_bytes",
        "is_over",
        "is_stream",
        "keeps",
        "may_repeat",
        "sink",
        "status",
    )

    def __init__(self, connection: ResponseSource, *, is_head: bool) -> None:
        self._connection = connection
        self._is_head = is_head
        self._alarm: Alarm | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Sink = self.hold
        self.body: list[bytes] = []
        self.failure: UpstreamFailure | None = None
        self.head = NO_HEAD
        self.framing: Framing = _NO_BODY
        self.has_begun = self.heard = self.is_over = self.is_stream = self.keeps = False
        self.may_repeat = True
        self.held_bytes = 0
        self.status = 0

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name (lower case)."""
        return self.head.header(name)

    def begin(self, head: Head) -> None:
        """The head is complete; raises FramingError if it does not say how the body ends."""
        self.head, self.status, self.is_stream = head, head.status, head.is_stream
        self.framing = self._framing(head)
        self.has_begun = True
        # Whether the connection can carry another request after this answer.
        can_keep = not self._is_head and not isinstance(self.framing, UntilClose)
        self.keeps = can_keep and head.keeps
        if head.status in (204, 304) and (head.coding or head.length not in (None, b"0")):
            self.keeps = False  # what follows is not the answer to the next request

    def _framing(self, head: Head) -> Framing:
        if self._is_head or head.status in (204, 304):
            return Length(0)
        if head.coding is not None:
            if head.coding.strip().lower() != b"chunked":
                raise FramingError("an unknown transfer coding")
            return Chunked()
        return UntilClose() if head.length is None else Length(int(head.length))

    def hold(self, data: bytes) -> None:
        """The sink until `pour`: keep a piece of the body, and wake the waiting task."""
        if piece := self.framing.feed(data):  # of framing alone there may be any number
            self.body.append(piece)
        self.note_end(data)
        self.held_bytes += len(data)
        if self.held_bytes > COUNTED_BYTES:
            self._count()
            if self.held_bytes > HOLD_BYTES:
                self.pause()
        if not self.is_over:
            self.wake()

    def _count(self) -> None:
        """Count what is held while more is to come; the largest of too many ends."""
        share = self._connection.share
        if self.is_over:
            self._discount()
        elif share is not None:
            largest = share.room.hold(self, share.owner, self.held_bytes)
            if largest is not None:
                largest.give_way()

    def _discount(self) -> None:
        """Nothing is waited for any more, or its relay counts it."""
        if self.held_bytes > COUNTED_BYTES and (share := self._connection.share) is not None:
            share.room.drop(self)

    def give_way(self) -> None:
        """End this answer, of which its client has nothing yet."""
        self.close()
        self.fail(UpstreamFailure(FailureKind.MALFORMED, _NO_ROOM))

    def note_end(self, data: bytes) -> None:
        """Note after framing a piece whether the body ended, and whether bytes follow its end."""
        framing = self.framing
        self.is_over = framing.is_done
        if self.is_over and framing.end != len(data):
            self.note_excess()

    def wake(self) -> None:
        """Wake the task that waits for this answer."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def moved(self) -> None:
        """Wait until `wake`; the caller sets a time limit."""
        self._waiter = self._connection.loop.create_future()
        await self._waiter

    async def begun(self) -> UpstreamResponse:
        """Wait for the head, and for a stream's first bytes; raises UpstreamFailure.

        If the wait is cancelled, the answer is closed.
        """
        is_there = False
        try:
            while not (self.is_over or (self.has_begun and (self.body or not self.is_stream))):
                self._waiter = self._connection.loop.create_future()
                await self._waiter
            is_there = self.has_begun
        finally:
            if not is_there:
                self.close()
        if not is_there:
            assert self.failure is not None
            raise self.failure.again()
        return self

    async def more(self) -> bool:
        """Wait for the next held piece; False if there is none. Raises UpstreamFailure."""
        pieces = len(self.body)
        self.resume()
        while len(self.body) == pieces and not self.is_over:
            await self.moved()
        if len(self.body) == pieces and self.failure is not None:
            raise self.failure.again()
        return len(self.body) > pieces

    async def read(self, limit: int) -> bytes:
        """Read the body up to `limit` bytes; raises UpstreamFailure."""
        size = counted = 0
        while True:
            for piece in self.body[counted:]:
                size += len(piece)
            counted = len(self.body)
            if size > limit or not await self.more():
                return b"".join(self.body)[:limit]

    def pour(self, sink: Sink) -> bytes:
        """Send each further piece of the wire to `sink`; returns the body held so far."""
        self.turn_to(sink)
        held = b"".join(self.body)
        self.body.clear()
        return held

    def fast_path(self) -> FastPath | None:
        """Passes pieces of a stream on before the sink gets them; None if the answer is over."""
        return self._connection.fast_path(self)

    def turn_to(self, sink: Sink) -> None:
        """Send every further piece to `sink`, none by the fast path."""
        self.sink = sink
        self._discount()
        self._connection.leave_fast_path(self)

    def note_excess(self) -> None:
        """Unexpected bytes follow the body: they are dropped, the connection is not kept."""
        self.keeps = False

    def pause(self) -> None:
        """Stop reading from the instance, unless the connection already serves another request."""
        if not self.is_over:
            self._connection.pause()

    def resume(self) -> None:
        """Resume reading."""
        if not self.is_over:
            self._connection.resume()

    def fail(self, failure: UpstreamFailure) -> None:
        """The answer is cut before its end."""
        self.failure, self.is_over = failure, True
        self._discount()
        self.wake()

    def let_end(self, seconds: float) -> None:
        """The rest is not wanted: give the answer `seconds` to end, so that its connection is kept.

        A further piece of the body closes the connection at once.
        """
        if self.is_over:
            self.turn_to(_nowhere)  # breaks a reference cycle
        elif not self.keeps:
            self.close()
        else:
            self.turn_to(self._expect_nothing)
            self.resume()
            self._alarm = Alarm(seconds, self.close)

    def _expect_nothing(self, data: bytes) -> None:
        body = self.framing.feed(data)
        self.note_end(data)
        if body:
            self.close()
        if self.is_over:
            self.turn_to(_nowhere)
            if self._alarm is not None:
                self._alarm.stop()
                self._alarm = None

    def be_the_last(self) -> bool:
        """Forbid sending the request again; False if it was lost and has been sent again."""
        self.may_repeat = False
        return self.failure is None

    def hang_up(self) -> bool:
        """Tell the instance that its client has left, and read on; False if impossible."""
        self.keeps = self.may_repeat = False
        return not self.is_over and self._connection.hang_up(self)

    def close(self) -> None:
        """Drop the answer; if it is not over, its connection is closed."""
        self.sink = _nowhere
        self._discount()
        self._connection.leave(self)  # also ends the fast path
