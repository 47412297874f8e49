"""An instance's answer on its way to the client: bytes as they came, under back-pressure.

Up to the first event nothing is promised to the client, so an instance can still be replaced
unseen. After it, a failure is said inside the stream, and the connection closes without the
terminal chunk, so that no client takes a cut answer for a whole one.

Bytes bypass aiohttp's writer: a piece is scanned and written to the client's transport in the call
that read it. The client's connection is still aiohttp's. Between two writes a client of a stream
has whole events in whole chunks and nothing else: what is incomplete waits here. So a heartbeat or
an error can follow at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from aiohttp import web

from proxy.core.admission.largest_pays import LargestPays
from proxy.core.types import PLANNED, FailureKind, MoveCause
from proxy.net.server.connection import StalledClientError
from proxy.net.timeouts import IdleLimit
from proxy.net.upstream.response import Holder, UpstreamResponse
from proxy.protocol.endpoints import ENDED, ENDED_BY_NAME, endpoint_of
from proxy.protocol.errors import UpstreamFailure
from proxy.protocol.framing import Chunked, FramingError, UntilClose, wrap
from proxy.protocol.streams.heartbeat import heartbeat
from proxy.protocol.streams.legs import FirstLeg, LaterLeg
from proxy.protocol.streams.sse import (
    FastPath,
    Scanner,
    end_of_stream,
    events_end,
    is_cut,
    names_the_end,
)
from proxy.request.client_response import ClientResponse
from proxy.state.held_for_clients import Unread

GROW_EVENTS = 16
"""Output is charged in steps of this many events."""
EVENT_BYTES = 8 << 20
"""Longest event in bytes; an incomplete event is kept in memory until its end has come. A first
event may repeat the prompt: the token ids of a million tokens are 7 MB."""
COUNTED_BYTES = 1 << 12
"""Bytes kept of an event beyond this count in the total of all streams."""
NO_EVENT_BYTES = 1 << 20
"""The same for what does not begin like an event, and speaks against its instance."""
_EVENT_STARTS = (b"data:", b"event:", b"id:", b":")
LAST_CHUNK = b"0\r\n\r\n"
GRACE_S = 1.0
"""Longest time of an instance from the end of its stream to the end of its answer."""
LOOK_S = 0.05
"""Interval in that time of checks whether a slow client's socket has the stream's end."""


class RelayState(IntEnum):
    """Progress of an answer on its way to the client."""

    WAITING = 0
    """The client has no byte of the answer."""
    STREAMING = 1
    ENDING = 2
    """The last event of a stream has passed: its instance has a moment to end the answer."""
    ENDED = 3
    """The client has all of the answer, or will have it with what is being written."""
    CUT = 4
    """The client was told that the answer ends here."""


# A member of an enum is a slower look-up than a global.
_WAITING, _STREAMING, _ENDING, _ENDED, _CUT = RelayState
_STEPS: dict[RelayState, tuple[RelayState, ...]] = {
    _WAITING: (_STREAMING,),
    _STREAMING: (_ENDING, _ENDED, _CUT),
    _ENDING: (_ENDED, _CUT),
    _ENDED: (),
    _CUT: (),
}
"""The allowed next states of each state."""


_LOST_WORDS = {
    MoveCause.ABORT: "the engine has ended the answer (finish reason abort)",
    MoveCause.ERROR: "the engine has failed within the answer",
    MoveCause.DIFFERS: "the instance that went on with the answer gave another one",
}
NEVER_S = 1e9
EVENT_TOO_LONG = "event_too_long"
_NO_ROOM = "an incomplete event for which no buffer is left"


class StreamCutError(Exception):
    """The answer ended before its end; `detail` says how, `code` is for programs.

    `failure`: what the instance did, where that speaks against it; `limit_s`: the limit it met.
    `cause`: of a move, as metrics name it.
    """

    def __init__(
        self,
        detail: str,
        code: str,
        *,
        failure: UpstreamFailure | None = None,
        limit_s: float | None = None,
        cause: MoveCause = MoveCause.LOST,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.failure = failure
        self.limit_s = limit_s
        self.cause = cause


class Onward(NamedTuple):
    """The answer of an instance that goes on with a stream, and what writes its events."""

    answer: UpstreamResponse
    leg: LaterLeg


class Rooms(NamedTuple):
    """The rooms in which a stream's bytes count. `owner`: whose share its client takes."""

    pending: LargestPays[Holder]
    """The incomplete events of all streams, and answers that have not begun."""
    unread: Unread
    owner: str


class Relay:
    """One answer's way to its client; the sink of its reply."""

    __slots__ = (
        "_always_frames",
        "_asked_for",
        "_client",
        "_counted",
        "_dialect",
        "_fast_path",
        "_feed",
        "_frame",
        "_frames",
        "_framing",
        "_held",
        "_is_asked",
        "_is_named",
        "_is_stream",
        "_is_too_long",
        "_leg",
        "_limit",
        "_mark",
        "_may_pass",
        "_needs_end",
        "_on_mark",
        "_rooms",
        "_waits_for_room",
        "_wraps",
        "_write",
        "instance",
        "is_paused",
        "is_taken",
        "reply",
        "response",
        "scanner",
        "state",
        "transport",
    )

    def __init__(
        self,
        request: web.Request,
        reply: UpstreamResponse,
        response: ClientResponse,
        scanner: Scanner,
        on_mark: Callable[[], int],
        leg: FirstLeg | None = None,
    ) -> None:
        """`on_mark` is called when a piece was scanned, before the client gets it.

        It says at how many events it wants to be called again. `leg`: edits a stream that may go on
        elsewhere.
        """
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        self._client = request.protocol
        self.transport = transport
        self._write = transport.write
        self.reply, self.response, self.scanner = reply, response, scanner
        self._framing = reply.framing
        self._frame = reply.framing.feed
        self._feed = scanner.feed
        self._is_stream = reply.is_stream
        self._dialect = dialect = endpoint_of(request.path).dialect
        self._needs_end = dialect in ENDED
        self._is_named = self._is_stream and dialect in ENDED_BY_NAME
        self._leg: FirstLeg | LaterLeg | None = leg
        own_frames = response.rechunks or response.unchunks or self._is_named
        self._always_frames = own_frames or leg is not None
        self._frames = self._always_frames
        is_chunked = isinstance(reply.framing, Chunked) or response.rechunks
        self._wraps = is_chunked and not response.unchunks
        self._may_pass = self._is_stream and self._wraps and not own_frames
        self._fast_path: FastPath | None = None
        self._on_mark = on_mark
        self._mark = 0
        self._held = bytearray()
        self._rooms: Rooms | None = None
        self._waits_for_room = False
        self.instance, self._counted = "", False
        self._is_too_long = self._is_asked = False
        self._asked_for = MoveCause.DRAIN
        self._limit: IdleLimit | None = None
        self.state = _WAITING
        self.is_paused = self.is_taken = False

    def count(self, rooms: Rooms, instance: str) -> None:
        """Count what is kept among that of all streams; `instance`: whose answer."""
        self._rooms, self.instance = rooms, instance

    def _move(self, state: RelayState) -> None:
        """Change the state: the one place that does, with what follows from the new state."""
        assert state in _STEPS[self.state], f"from {self.state} to {state}"
        self.state = state
        if state is _ENDED:
            # A stream that has said so is over, whether or not its instance ends the answer.
            self.reply.turn_to(self._drop)
        elif state is _ENDING:
            if self._limit is not None and not self.is_paused:
                self._limit.change(min(self._limit.seconds, GRACE_S))
            # What is written in this turn of the loop uvloop hands to the socket at its end.
            asyncio.get_running_loop().call_soon(self._look_taken)

    def _look_taken(self) -> None:
        """Note whether the client's socket has all that was written, the stream's end included."""
        if self.state is not _ENDING or self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(LOOK_S, self._look_taken)
        else:
            self.is_taken = True

    @property
    def has_begun(self) -> bool:
        """Whether the client has the head of this answer: no other one can be given."""
        return self.state is not _WAITING

    def begin(self) -> None:
        """Write the head, and what is already there of the body."""
        reply = self.reply
        self._move(_STREAMING)
        body = reply.pour(self._piece)
        if self._may_pass:
            self._fast_path = reads = reply.fast_path()
            if reads is not None:
                waiting = self.transport.get_write_buffer_size
                reads.serve(self.scanner, self._write, waiting, self._look, self._is_gone)
        try:
            self._pass(body, self.response.begin(reply))
        except FramingError as error:
            reply.fail(UpstreamFailure(FailureKind.MALFORMED, str(error)))
        if not self.is_paused:
            reply.resume()

    def _look(self) -> None:
        """Whether more waits for the client than its transport should hold."""
        if self._client.writing_paused:
            self._hold()

    def _piece(self, wire: bytes) -> None:
        """Handle a piece that the fast path did not pass on. Raises FramingError."""
        body = self._frame(wire)
        if (
            self._frames
            or not self._framing.is_whole
            or (self._is_stream and (not body.endswith(b"\n\n") or b"[DONE]" in body))
        ):
            self.reply.note_end(wire)
            self._pass(body)
            return
        self._scan(body)
        try:
            self._write(wire)
        except RuntimeError:
            self._is_gone()
        if self._client.writing_paused:
            self._hold()

    def _scan(self, body: bytes) -> None:
        scanner = self.scanner
        self._feed(body)
        if scanner.events >= self._mark:
            self._mark = self._on_mark()
        if (fast_path := self._fast_path) is None:
            return
        is_clean = not self._frames if self._leg is None else not self._held
        if self._framing.is_whole and is_clean and scanner.is_between:
            fast_path.open(self._mark)
        else:
            fast_path.shut()

    def _is_gone(self) -> None:
        """The client's connection was closed in this turn of the loop (so says uvloop).

        aiohttp cancels the task in the next one; until then there is nobody to read for.
        """
        self.reply.pause()

    def _pass(self, body: bytes, head: bytes = b"") -> None:
        """Every other piece: the first, the last, and what has to be framed again."""
        if self._is_stream:
            body = self._whole_events(body)
        self._scan(body)
        if self._framing.is_done and self.state is not _ENDED and self._is_at_end:
            self._move(_ENDED)
        if data := head + self._framed(body):
            try:
                self._write(data)
            except RuntimeError:
                self._is_gone()
        if self.state is _ENDED:
            self.reply.wake()
        if self._client.writing_paused:
            self._hold()

    @property
    def _is_at_end(self) -> bool:
        """Whether an answer whose body ends here is whole."""
        if self._is_stream and self._needs_end:
            return self.scanner.is_done
        return not self._held

    def _whole_events(self, body: bytes) -> bytes:
        """The part of the body that is whole events; the rest is kept. Raises FramingError."""
        held = self._held
        if held:
            start = max(0, len(held) - 2)
            held += body
            end = events_end(held, start)
            body = b""
            if end:
                rest = held[end:]
                del held[end:]  # one copy of a long event, not two
                body = bytes(held)
                held.clear()
                held += rest
        elif body:
            end = events_end(body)
            held += body[end:]
            body = body[:end]
        leg = self._leg
        body = self._up_to_end(body) if leg is None else self._edited(leg, body)
        if len(held) > COUNTED_BYTES:
            self._check_length()
        elif self._counted:
            self._discount()
        self._frames = self._always_frames or bool(held)
        return body

    def _edited(self, leg: FirstLeg | LaterLeg, body: bytes) -> bytes:
        """The client's form of whole events of a stream that may migrate."""
        body = leg.edit(body)
        if leg.lost:
            self.stop()
            return body
        return self._up_to_end(body)

    def _up_to_end(self, body: bytes) -> bytes:
        """Whole events up to the stream's end, which is recorded."""
        held = self._held
        is_last = self._framing.is_done
        if is_last and (held.rstrip() == b"data: [DONE]" or self._may_end_with(held)):
            body += held  # an end that is not followed by an empty line
            held.clear()
            self._move(_ENDED)
        elif (end := end_of_stream(body)) > 0 and not self._needs_end:
            if self.state is _STREAMING:
                self._move(_ENDING)  # of a stream of a kind that is not known more may follow
        elif end > 0:
            if end < len(body) or held:
                self.reply.note_excess()
            body = body[:end]
            held.clear()
            self._move(_ENDED)
        elif self._is_named and self.state is _STREAMING and names_the_end(body):
            self._move(_ENDING)
        return body

    def _may_end_with(self, rest: bytearray) -> bool:
        """Whether the body's end is the stream's, with these bytes behind its last whole event.

        A connection that ends within an event was cut: nothing else tells.
        """
        is_told = not isinstance(self._framing, UntilClose)
        return not self._needs_end and (is_told or not is_cut(rest))

    def stop(self) -> None:
        """Stop reading this answer: the stream migrates.

        What came meanwhile the client would get twice.
        """
        if self._fast_path is not None:
            self._fast_path.shut()
        self.reply.pause()
        self.reply.wake()

    def leave(self, cause: MoveCause) -> bool:
        """Make `run` end as soon as possible: the stream is to leave its instance.

        Whether that is now; not while its client reads too slowly.
        """
        if self.state is not _STREAMING or self.scanner.is_done:
            return False
        self._is_asked, self._asked_for = True, cause
        self.stop()
        return not self.is_paused

    def stay(self) -> None:
        """Go on with this answer, which was to be left; `run` is called next."""
        self._is_asked = False
        self.reply.resume()

    def let_pass(self) -> bool:
        """Pass on the withheld events, since no instance continues the stream; False if impossible.

        `run` is called next.
        """
        leg = self._leg
        if not isinstance(leg, FirstLeg) or not leg.lost:
            return False
        rest = bytes(self._held)
        self._held.clear()
        self._pass(leg.let_pass() + rest)
        if not self.is_paused:
            self.reply.resume()
        return True

    def follow(self, reply: UpstreamResponse, leg: LaterLeg) -> None:
        """Go on with another instance's answer, behind what the client has; `run` is called next.

        What has come of the present one and is not a whole event is dropped.
        """
        self.reply.close()
        self.reply, self._leg, self._fast_path = reply, leg, None
        self._framing, self._frame = reply.framing, reply.framing.feed
        self._always_frames = self._frames = True
        self._is_too_long = self._is_asked = False
        self._held.clear()
        self._mark = 0
        body = reply.pour(self._piece)
        try:
            self._pass(body)
        except FramingError as error:
            reply.fail(UpstreamFailure(FailureKind.MALFORMED, str(error)))
        if not self.is_paused:
            reply.resume()

    def beats(self, heartbeat_s: float) -> IdleLimit:
        """Heartbeats for a stream's client while another instance is asked to go on with it."""
        return IdleLimit(NEVER_S, lambda: 0, heartbeat_s, self._beat)

    def _check_length(self) -> None:
        """Raise FramingError if what is held is too long for an event, or is none."""
        is_event = self._held.startswith(_EVENT_STARTS)
        most = EVENT_BYTES if is_event else NO_EVENT_BYTES
        if len(self._held) > most:
            self._is_too_long = is_event
            raise FramingError(f"an event of more than {most} bytes")
        if (rooms := self._rooms) is None:
            return
        self._counted = True
        largest = rooms.pending.hold(self, self.instance, len(self._held))
        if largest is self:
            self._is_too_long = True
            raise FramingError(_NO_ROOM)
        if largest is not None:
            largest.give_way()
        elif rooms.unread.is_scarce(rooms.owner):
            self._wait_for_room(rooms)

    def _wait_for_room(self, rooms: Rooms) -> None:
        """Read no more of this event while clients of the same owner leave theirs unread."""
        self._discount()
        if not rooms.unread.enter(self, rooms.owner, self.held_bytes):
            self._is_too_long = True
            raise FramingError(_NO_ROOM)
        self._waits_for_room = True
        self._stop_reading()

    @property
    def held_bytes(self) -> int:
        """Bytes of an event that is not complete."""
        return len(self._held)

    def give_way(self) -> None:
        """End this stream: its incomplete event is the largest of too many."""
        self._is_too_long = True
        self._discount()
        self.stop()
        self.reply.fail(UpstreamFailure(FailureKind.MALFORMED, _NO_ROOM))

    def _discount(self) -> None:
        self._counted = False
        if self._rooms is not None:
            self._rooms.pending.drop(self)

    def _drop(self, wire: bytes) -> None:
        """Discard what an instance sends after the end of its answer."""
        if self._frame(wire):
            self.reply.note_excess()
        self.reply.note_end(wire)

    def _hold(self) -> None:
        """The client reads too slowly: pause the connection to its instance, and no other."""
        self._stop_reading()
        response, rooms = self.response, self._rooms
        if rooms is None or rooms.unread.take(response, rooms.owner, response.held_bytes):
            return
        response.give_way()

    def _stop_reading(self) -> None:
        self.is_paused = True
        self.reply.pause()
        self.reply.wake()

    def _progress(self) -> object:
        """A value that changes whenever bytes have moved on either side."""
        scanner = self.scanner
        moved = scanner.size - scanner.comments_size
        return moved, len(self._held), self.transport.get_write_buffer_size()

    def _beat(self) -> None:
        """Send a heartbeat after silence: client and proxies before it keep the connection."""
        scanner = self.scanner
        is_open = self.state is _STREAMING and not self.transport.is_closing()
        is_stalled = self.is_paused and not self._waits_for_room
        is_idle = not (is_stalled or self.transport.get_write_buffer_size())
        if self._is_stream and is_open and is_idle and not scanner.is_done:
            beat = heartbeat(self._dialect, scanner.first_data, scanner.events)
            self._write(self._framed(beat))

    def _framed(self, body: bytes) -> bytes:
        """Bytes for the client as chunks, with the final chunk at the end of the body."""
        if not self._wraps:
            return body
        return (wrap(body) if body else b"") + (LAST_CHUNK if self.state is _ENDED else b"")

    def cut(self, event: bytes) -> None:
        """Close after what was written, in a stream with this event as the last one.

        Its client has no clean end, unless it has the whole answer already.
        """
        is_open = self.state is _STREAMING
        if is_open or self.state is _ENDING:
            self._move(_CUT)
        self.response.cut(self._framed(event) if is_open and self._is_stream else None)

    async def run(self, idle_limit_s: float, heartbeat_s: float) -> None:
        """Pass the body on until its end; raises StreamCutError when either side stops moving.

        `idle_limit_s`: without progress on either side; `heartbeat_s`: after so much silence the
        client of a stream gets a heartbeat (0: never).
        """
        if self.state is _WAITING:
            self.begin()
        if self._is_moving:
            await self._run(idle_limit_s, heartbeat_s)
        if self.state is not _ENDED and self._is_stream and self.scanner.is_done:
            self._end_late()  # its instance failed behind the stream's end
        if self.state is _ENDED:
            self.response.note_end()
            return
        self._raise_stopped()
        failure = self.reply.failure
        if failure is not None and self._is_too_long:
            # Nothing is wrong with the engine: the event is more than is kept for one.
            raise StreamCutError(f"upstream: {failure.detail}", EVENT_TOO_LONG)
        if failure is not None:
            is_lost = failure.kind in (FailureKind.RESET, FailureKind.WENT_DOWN)
            code = "engine_lost" if is_lost else "bad_upstream"
            raise StreamCutError(f"upstream: {failure.detail}", code, failure=failure)
        what = "upstream: the stream ended without its end marker"
        lost = UpstreamFailure(FailureKind.RESET, what)
        raise StreamCutError(what, "incomplete_stream", failure=lost)

    def _raise_stopped(self) -> None:
        """Raise StreamCutError if the stream is to migrate, by its events or on request."""
        lost = self._leg.lost if self._leg is not None else ""
        if lost:
            cause, failure = MoveCause(lost), None
            if cause is MoveCause.ERROR and self._leg is not None and self._leg.is_error_event:
                failure = UpstreamFailure(FailureKind.SERVER_ERROR, _LOST_WORDS[cause], status=500)
            elif cause in (MoveCause.ABORT, MoveCause.ERROR):
                failure = UpstreamFailure(FailureKind.HOLLOW, _LOST_WORDS[cause])
            what = f"upstream: {_LOST_WORDS[cause]}"
            raise StreamCutError(what, "engine_lost", failure=failure, cause=cause)
        if self._is_asked and not self.reply.is_over:
            what = "the instance is to be left"
            raise StreamCutError(what, "engine_lost", cause=self._asked_for)

    def close(self) -> None:
        """Done: an answer whose end the client has may end by itself, any other one is closed."""
        if self._counted:
            self._discount()
        if self._rooms is not None:
            self._rooms.unread.free(self.response)
            self._rooms.unread.free(self)
        if self.state in (_ENDING, _ENDED):
            self.reply.let_end(GRACE_S)
        else:
            self.reply.close()

    @property
    def _is_moving(self) -> bool:
        if self.is_paused:
            return True
        is_lost = self._leg is not None and bool(self._leg.lost)
        return not (self.state is _ENDED or self.reply.is_over or self._is_asked or is_lost)

    async def _run(self, idle_limit_s: float, heartbeat_s: float) -> None:
        is_open = self._is_stream and self._needs_end and self.state is _STREAMING
        if is_open and self.scanner.is_done:
            self._move(_ENDING)
        start_s = min(idle_limit_s, GRACE_S) if self.state is _ENDING else idle_limit_s
        limit = IdleLimit(start_s, self._progress, heartbeat_s, self._beat)
        self._limit = limit
        try:
            with limit:
                while self._is_moving:
                    if self.is_paused:
                        await self._taken(limit, idle_limit_s)
                    else:
                        await self.reply.moved()
        except TimeoutError as error:
            self._time_is_up(limit.seconds, error)
        finally:
            self._limit = None  # a reference cycle that only the collector would free

    def _time_is_up(self, seconds: float, error: TimeoutError) -> None:
        """Raise StreamCutError after silence, unless the client has every event of the stream."""
        late = f"for {seconds:.3g} s (--idle-timeout)"
        if self.is_paused:
            raise StalledClientError(f"the client took nothing {late}") from error
        if self.state is _ENDED:
            return  # in the turn of the loop in which the time was up
        if self._is_stream and self.scanner.is_done:
            self._end_late()
            return
        code = "stream_idle_timeout" if self.scanner.has_content else "ttft_timeout"
        failure = UpstreamFailure(FailureKind.TIMEOUT, f"silent {late}")
        what = f"upstream: silent {late}"
        raise StreamCutError(
            what, code, failure=failure, limit_s=seconds, cause=MoveCause.SILENT
        ) from error

    async def _taken(self, limit: IdleLimit, idle_limit_s: float) -> None:
        """Wait for the client to read, or its owner's others; with the client's own time limit."""
        if limit.seconds != idle_limit_s:
            limit.change(idle_limit_s)
        await self.response.taken()
        if (rooms := self._rooms) is not None:
            rooms.unread.free(self.response)
            if self._waits_for_room:
                await rooms.unread.room_for(self, rooms.owner)
        self.is_paused = self._waits_for_room = False
        if self.state is _ENDING:
            limit.change(min(idle_limit_s, GRACE_S))
        self.reply.resume()

    def _end_late(self) -> None:
        """End an answer whose stream has ended but whose instance does not end it."""
        self._move(_ENDED)
        if self._wraps and not self.transport.is_closing():
            self._write(LAST_CHUNK)


class Reading:
    """An answer that its stream is to leave, and that is passed on while another one is awaited.

    `is_over`: the client has all of it meanwhile. `lost`: how it broke off meanwhile.
    """

    __slots__ = ("_idle_s", "_relay", "beat_s", "is_over", "lost")

    def __init__(self, relay: Relay, idle_limit_s: float, heartbeat_s: float) -> None:
        self._relay = relay
        self._idle_s, self.beat_s = idle_limit_s, heartbeat_s
        self.is_over = False
        self.lost: StreamCutError | None = None

    async def until(self, asked: asyncio.Task[Any]) -> None:
        """Pass it on until a task is done, then stop; or to its end, or to where it breaks."""
        relay = self._relay
        relay.stay()
        asked.add_done_callback(self._stop)
        try:
            await relay.run(self._idle_s, self.beat_s)
            self.is_over = True
        except StreamCutError as error:
            # Without its frames, which hold this: only the collector would end them.
            self.lost = None if error.cause in PLANNED else error.with_traceback(None)
        finally:
            asked.remove_done_callback(self._stop)

    def _stop(self, _: object) -> None:
        self._relay.leave(MoveCause.DRAIN)
