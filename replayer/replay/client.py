"""The client: sends one request, scans and times the answer, and gives it an outcome.

Times are seconds from the run's origin on one monotonic clock. A stream is fed to its scanner with
the arrival time of each piece. The first token is the first event with content, reasoning or a tool
call, not the role event that servers send at once. Token counts come only from `usage`, since an
event may carry several tokens.
"""

import io
import os
from array import array
from asyncio import sleep, timeout
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from random import Random
from typing import Annotated, Any

import aiohttp
import msgspec
import orjson
import xxhash

from replayer.answers import body_of
from replayer.replay.retries import NEVER, Retries

DONE = b"[DONE]"
MOST_EVENT_BYTES = 1 << 20
"""Of one line of a stream."""
MOST_TEXT_BYTES = 8 << 20
"""Of one answer: a million tokens have half of it."""
MOST_CHUNKS = 1 << 20
"""Events of one answer that have text; each is a pause to keep."""
MOST_TOKENS = 10**9
"""A larger count is none: the sums of a run fit in 64 bits."""
REASON_CHARS = 64
ERROR_CHARS = 300

Part = str | list[Any] | None
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None


class _Delta(msgspec.Struct, gc=False):
    content: Part = None
    reasoning_content: Part = None
    reasoning: Part = None
    tool_calls: Part = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS)] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Tokens = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Tokens = None
    completion_tokens: Tokens = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    """What is read of an event. An event of another form is an error of its answer."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamScanner:
    """Reads one streamed answer; times are those passed to `feed`."""

    __slots__ = (
        "_rest",
        "cached_tokens",
        "chunks",
        "completion_tokens",
        "done",
        "error",
        "finish_reason",
        "first_token_s",
        "gaps_s",
        "is_too_large",
        "last_token_s",
        "prompt_tokens",
        "text",
    )

    def __init__(self) -> None:
        """Start an empty answer; None means that the server has not sent the value."""
        self._rest = bytearray()
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps_s = array("d")
        self.chunks = 0
        # As bytes: a string per token is ten times as large.
        self.text = bytearray()
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.is_too_large = False
        """Whether a limit was passed: what comes after that is not worth reading."""
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Scan the next bytes of the body."""
        *lines, rest = data.split(b"\n")
        if lines and self._rest:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)
        if len(self._rest) > MOST_EVENT_BYTES:
            self._stop(f"an event has over {MOST_EVENT_BYTES} bytes")
        elif len(self.text) > MOST_TEXT_BYTES:
            self._stop(f"the text has over {MOST_TEXT_BYTES} bytes")
        elif self.chunks > MOST_CHUNKS:
            self._stop(f"over {MOST_CHUNKS} events have text")

    def _stop(self, why: str) -> None:
        self.is_too_large = True
        self._fail(why)

    def _fail(self, why: str) -> None:
        self.error = self.error or why[:ERROR_CHARS]

    def _event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.done = True
            return
        if len(data) > MOST_EVENT_BYTES:
            self._stop(f"an event has over {MOST_EVENT_BYTES} bytes")
            return
        try:
            self._answer(_decode(data), now_s)
        except msgspec.ValidationError as error:
            self._fail(f"event is of another form: {error}")
        except RecursionError:
            self._fail(f"event is nested too deep: {data[:80]!r}")
        except ValueError:
            self._fail(f"event is not JSON: {data[:80]!r}")

    def _answer(self, event: _Event, now_s: float) -> None:
        if event.error:
            self._fail(_error_text(event.error))
            return
        if event.usage is not None:
            self._usage(event.usage)
        for choice in event.choices or ():
            self.finish_reason = choice.finish_reason or self.finish_reason
            text = choice.text
            if text is None:
                text = "" if choice.delta is None else _delta_text(choice.delta)
            if text:
                self._token(text, now_s)

    def _token(self, text: str, now_s: float) -> None:
        if self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s
        self.chunks += 1
        self.text += text.encode()

    def _usage(self, usage: _Usage) -> None:
        details = usage.prompt_tokens_details
        self.prompt_tokens = usage.prompt_tokens
        self.completion_tokens = usage.completion_tokens
        self.cached_tokens = None if details is None else details.cached_tokens


def _delta_text(delta: _Delta) -> str:
    value = delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
    if not value:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)


# vLLM closes an idle connection after 5 s; reusing one at that moment would fail a request.
KEEPALIVE_S = 4.0
CONNECT_TIMEOUT_S = 10.0
NO_CONNECTION = f"no connection within {CONNECT_TIMEOUT_S:g} s"
READ_BUFFER_BYTES = 1 << 20  # at the default 64 KiB long answers stop and go
LARGE_BODY_BYTES = 1 << 20  # from this size on aiohttp wants a body that it can send in pieces
REFUSAL_BYTES = 1 << 16  # of a refusal so much is read
ROUTE_HEADERS = {
    "instance": "X-Cache-Proxy-Instance",
    "route_class": "X-Cache-Proxy-Route",
    "reason": "X-Cache-Proxy-Reason",
}
KEPT_HEADERS = (*ROUTE_HEADERS.values(), "Retry-After")
HEADER_CHARS = 1024
MESSAGE_KEYS = ("message", "error", "detail")


class ReplayOutcome(StrEnum):
    """The end of a request of the trace. All but `ok` count as failures of the run."""

    OK = "ok"
    REJECTED = "rejected"  # the proxy's 503: all instances busy
    HTTP_ERROR = "http_error"
    TIMEOUT = "timeout"
    DISCONNECT_BEFORE_FIRST = "disconnect_before_first"  # before any byte of the answer
    DISCONNECT_MID = "disconnect_mid"
    TRUNCATED = "truncated"  # the answer ended without finish_reason or [DONE]
    STREAM_ERROR = "stream_error"  # an error event inside a 200 answer, or one of no known form
    SKIPPED = "skipped"  # never sent: a request that it waits for failed
    INTERRUPTED = "interrupted"  # the run was stopped


@dataclass(frozen=True, slots=True)
class Call:
    """Body and headers of a request."""

    body: bytes
    headers: Mapping[str, str]


@dataclass(slots=True)
class TimedExchange:
    """The record of a call; None means unknown or not received."""

    sent_s: float
    end_s: float
    outcome: ReplayOutcome = ReplayOutcome.INTERRUPTED
    status: int | None = None
    error: str | None = None
    attempts: int = 0
    refusals: int = 0  # attempts that got a 503
    retry_waits_s: list[float] = field(default_factory=list)
    first_byte_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    stream: StreamScanner = field(default_factory=StreamScanner)
    _digest: str | None = None

    @property
    def gaps_s(self) -> Sequence[float]:
        """Return the pauses between successive events with content."""
        return self.stream.gaps_s

    @property
    def digest(self) -> str | None:
        """Return the hash of all text received (None: there was no text)."""
        return xxhash.xxh3_64_hexdigest(self.stream.text) if self.stream.text else self._digest

    def forget_text(self) -> None:
        """Keep of the text its hash alone."""
        self._digest, self.stream.text = self.digest, bytearray()


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Target, time limit of an attempt (0: none), retries of a 503; `seed`: of jitter."""

    url: str
    timeout_s: float = 600.0
    retries: Retries = NEVER
    seed: int = 0


def open_session() -> aiohttp.ClientSession:
    """Open the session of a run, without a limit on its connections.

    It keeps no cookies: they would be of any number, and go with all later requests.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Client:
    """Sends calls over one session."""

    def __init__(
        self, session: aiohttp.ClientSession, options: ClientOptions, clock: Callable[[], float]
    ) -> None:
        """`clock` gives seconds from the origin of the run."""
        self._session = session
        self._options = options
        self._clock = clock
        self._random = Random(options.seed)

    def open_exchange(self) -> TimedExchange:
        """Make the record of a call that is sent now."""
        now_s = self._clock()
        return TimedExchange(sent_s=now_s, end_s=now_s)

    async def run(self, call: Call, exchange: TimedExchange) -> None:
        """Send a call, and again while it gets a 503 and retries remain; fills in `exchange`.

        `sent_s` stays that of the first attempt, since the client has waited since then.
        """
        try:
            retries = self._options.retries
            for number in range(retries.most + 1):
                await self._attempt(call, exchange)
                if exchange.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    return
                exchange.refusals += 1
                if number == retries.most:
                    return
                exchange.outcome = ReplayOutcome.INTERRUPTED
                wait_s = retries.wait_s(number, exchange.retry_after_s, self._random.random())
                exchange.retry_waits_s.append(wait_s)
                await sleep(wait_s)
        finally:
            exchange.end_s = self._clock()

    async def _attempt(self, call: Call, exchange: TimedExchange) -> None:
        exchange.attempts += 1
        exchange.stream = StreamScanner()
        exchange.status = exchange.first_byte_s = None
        try:
            async with timeout(self._options.timeout_s or None):
                await self._send(call, exchange)
        except aiohttp.ConnectionTimeoutError as error:
            exchange.outcome = ReplayOutcome.TIMEOUT
            exchange.error = explain(error)
        except TimeoutError:
            exchange.outcome = ReplayOutcome.TIMEOUT
            exchange.error = f"no end after {self._options.timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            begun = exchange.first_byte_s is not None
            exchange.outcome = (
                ReplayOutcome.DISCONNECT_MID if begun else ReplayOutcome.DISCONNECT_BEFORE_FIRST
            )
            exchange.error = explain(error)

    async def _send(self, call: Call, exchange: TimedExchange) -> None:
        body = call.body if len(call.body) < LARGE_BODY_BYTES else io.BytesIO(call.body)
        async with self._session.post(
            self._options.url, data=body, headers=call.headers, allow_redirects=False
        ) as response:
            exchange.status = response.status
            exchange.headers = _kept(response.headers)
            if response.status != 200:
                _note_refusal(exchange, (await body_of(response, REFUSAL_BYTES))[:REFUSAL_BYTES])
                return
            clock, stream = self._clock, exchange.stream
            async for data in response.content.iter_any():
                now_s = clock()
                if exchange.first_byte_s is None:
                    exchange.first_byte_s = now_s
                stream.feed(data, now_s)
                if stream.is_too_large:
                    break
        exchange.outcome, exchange.error = _judge(stream)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are read later, as text that JSON can have."""
    told = {name: headers[name] for name in KEPT_HEADERS if name in headers}
    return {name: _text(value[:HEADER_CHARS]) for name, value in told.items()}


def _text(told: str) -> str:
    """Return a text without the surrogates that stand for bytes which are not UTF-8."""
    return told.encode(errors="replace").decode()


def explain(error: aiohttp.ClientError | OSError) -> str:
    """Describe a failed connection in one line for the user."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NO_CONNECTION
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off before its end"
    if not isinstance(error, aiohttp.ClientConnectorError):
        return _text(f"{type(error).__name__}: {error}"[:ERROR_CHARS])
    cause = error.os_error
    number = cause.errno or 0  # negative for names that do not resolve
    reason = os.strerror(number) if number > 0 else cause.strerror or str(cause)
    return f"cannot connect to {error.host}:{error.port}: {reason}"[:ERROR_CHARS]


def _judge(stream: StreamScanner) -> tuple[ReplayOutcome, str | None]:
    if stream.error is not None:
        return ReplayOutcome.STREAM_ERROR, stream.error
    if not stream.done or stream.finish_reason is None:
        missing = "[DONE]" if not stream.done else "finish_reason"
        return ReplayOutcome.TRUNCATED, f"the stream ended without {missing}"
    return ReplayOutcome.OK, None


def _note_refusal(exchange: TimedExchange, body: bytes) -> None:
    answer = _object(body)
    message = _error_message(answer) or body[:ERROR_CHARS].decode(errors="replace")
    exchange.error = message[:ERROR_CHARS] or "no text with it"
    exchange.outcome = (
        ReplayOutcome.REJECTED if _is_busy(exchange.status, answer) else ReplayOutcome.HTTP_ERROR
    )
    try:
        exchange.retry_after_s = max(0.0, float(exchange.headers.get("Retry-After", "")))
    except ValueError:
        exchange.retry_after_s = None


def _object(body: bytes) -> dict[str, Any]:
    """Read a JSON object; an empty one if the body is anything else."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _error_message(answer: Mapping[str, Any]) -> str | None:
    """Find the message of an error in the forms that servers use."""
    error = answer.get("error")
    places = (error, answer) if isinstance(error, dict) else (answer,)
    for place in places:
        for name in MESSAGE_KEYS:
            if isinstance(place.get(name), str):
                return str(place[name])
    return None


def _is_busy(status: int | None, answer: Mapping[str, Any]) -> bool:
    """Whether an answer is the proxy's own 'all workers are busy'."""
    return status == 503 and answer.get("type") == "service_unavailable"
