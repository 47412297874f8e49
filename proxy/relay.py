"""An instance's answer on its way to the client: bytes as they came, under back-pressure.

Up to the first event nothing is promised to the client, so an instance can still be replaced
unseen. After it, a failure is said inside the stream, and the connection closes without the
terminal chunk, so that no client takes a cut answer for a whole one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp import web

from proxy.core.sse import CARRY_BYTES, Scanner, first_event, is_error_event
from proxy.core.types import FailureKind
from proxy.errors import UpstreamFailure
from proxy.upstream import ERROR_BODY_BYTES, HOP_BY_HOP

BUSY_STATUSES = frozenset({429, 503, 529})
GROW_EVENTS = 16
"""Output is charged in steps of this many events."""


@dataclass(slots=True)
class Answer:
    """An answer whose head and first bytes have arrived, and are good."""

    response: aiohttp.ClientResponse
    head: bytes
    is_stream: bool


class StreamCutError(Exception):
    """The answer ended before its end; `detail` says how."""

    def __init__(self, detail: str, *, timed_out: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.timed_out = timed_out


class StalledClientError(ConnectionResetError):
    """The client holds its connection and reads nothing: as good as gone."""


class RelayResponse(web.StreamResponse):
    """A StreamResponse that can be left without its end."""

    is_cut = False

    async def write_eof(self, data: bytes = b"") -> None:
        """End properly, unless the answer was cut."""
        if not self.is_cut:
            await super().write_eof(data)

    def cut(self, request: web.Request) -> None:
        """Close after what was written, without the terminal chunk or the missing bytes."""
        self.is_cut = True
        request.protocol.force_close()
        if request.transport is not None:
            request.transport.close()


async def open_answer(response: aiohttp.ClientResponse) -> Answer:
    """Judge an answer by its status and first event; raises UpstreamFailure for one to replace."""
    if response.status in BUSY_STATUSES or response.status >= 500:
        raise await _refusal(response)
    is_stream = response.content_type == "text/event-stream" and response.status == 200
    if not is_stream:
        return Answer(response, b"", is_stream=False)
    head = await _read_first_event(response)
    event = first_event(head)
    if event is None and len(head) < CARRY_BYTES:
        raise UpstreamFailure(FailureKind.RESET, "the stream ended before its first event")
    if event is not None and is_error_event(event):
        raise _in_band_error(event)
    return Answer(response, head, is_stream=True)


async def _refusal(response: aiohttp.ClientResponse) -> UpstreamFailure:
    kind = FailureKind.BUSY if response.status in BUSY_STATUSES else FailureKind.SERVER_ERROR
    try:
        body = await response.content.read(ERROR_BODY_BYTES)
    except aiohttp.ClientError:
        body = b""
    return UpstreamFailure(
        kind,
        f"status {response.status}",
        status=response.status,
        body=body,
        headers=response.headers,
    )


async def _read_first_event(response: aiohttp.ClientResponse) -> bytes:
    head = b""
    try:
        while len(head) < CARRY_BYTES and first_event(head) is None:
            piece = await response.content.readany()
            if not piece:
                break
            head += piece
    except (aiohttp.ClientError, ConnectionError) as error:
        raise UpstreamFailure(FailureKind.RESET, "the connection broke") from error
    return head


def _in_band_error(event: bytes) -> UpstreamFailure:
    """An engine error inside a 200, before any content: as good as an error status."""
    body = event[event.find(b"{") :]
    try:
        error = orjson.loads(body).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        error = None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    headers = {"Content-Type": "application/json"}
    return UpstreamFailure(
        FailureKind.SERVER_ERROR, "error event", status=status, body=body, headers=headers
    )


def client_response(answer: Answer, extra: Mapping[str, str]) -> RelayResponse:
    """The head for the client: the instance's, less hop-by-hop headers, plus ours."""
    upstream = answer.response
    response = RelayResponse(status=upstream.status, reason=upstream.reason)
    for key, value in upstream.headers.items():
        if key.lower() not in HOP_BY_HOP:
            response.headers.add(key, value)
    response.headers.update(extra)
    return response


class Idle:
    """Ends a scope in which nothing moved for `timeout_s`: one lazy timer, none per piece."""

    def __init__(self, scope: asyncio.Timeout, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = scope
        self._timeout_s = timeout_s
        self._last_s = self._loop.time()
        self._handle = self._loop.call_later(timeout_s, self._check)

    def touch(self) -> None:
        """Something moved."""
        self._last_s = self._loop.time()

    def stop(self) -> None:
        """No longer needed."""
        self._handle.cancel()

    def _check(self) -> None:
        left_s = self._last_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._handle = self._loop.call_later(left_s, self._check)
        else:
            self._scope.reschedule(self._loop.time())


async def relay(
    answer: Answer,
    response: RelayResponse,
    scanner: Scanner,
    on_piece: Callable[[], None],
    idle_timeout_s: float,
) -> None:
    """Pass the body on until its end; raises StreamCutError when either side stops moving.

    `on_piece` is called after each piece has been scanned, before the client gets it.
    """
    piece = answer.head
    try:
        async with asyncio.timeout(None) as scope:
            idle = Idle(scope, idle_timeout_s)
            try:
                piece = piece or await _next(answer.response)
                while piece:
                    idle.touch()
                    scanner.feed(piece)
                    on_piece()
                    await response.write(piece)
                    idle.touch()
                    piece = b""
                    piece = await _next(answer.response)
            finally:
                idle.stop()
    except TimeoutError as error:
        late = f"for {idle_timeout_s:g} s (--idle-timeout)"
        if piece:
            raise StalledClientError(f"the client took nothing {late}") from error
        raise StreamCutError(f"upstream: silent {late}", timed_out=True) from error
    if answer.is_stream and not scanner.is_done:
        raise StreamCutError("upstream: the stream ended without its end marker")


async def _next(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, ConnectionError) as error:
        raise StreamCutError("upstream: the connection broke") from error
