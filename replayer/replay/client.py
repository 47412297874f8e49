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
from typing import Any

import aiohttp
import orjson
import xxhash

from replayer.replay.retries import NEVER, Retries

CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls")
DONE = b"[DONE]"


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
        "last_token_s",
        "prompt_tokens",
        "text",
    )

    def __init__(self) -> None:
        """Start an empty answer; None means that the server has not sent the value."""
        self._rest = b""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps_s = array("d")
        self.chunks = 0
        # As bytes: a string per token is ten times as large, and a run keeps all its answers.
        self.text = bytearray()
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Scan the next bytes of the body."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = self.error or f"event is not JSON: {data[:80]!r}"
            return
        if not isinstance(event, dict):
            self.error = self.error or f"event is not an object: {data[:80]!r}"
        elif event.get("error"):
            self.error = self.error or _error_text(event["error"])
        else:
            self._answer(event, now_s)

    def _answer(self, event: dict[str, Any], now_s: float) -> None:
        if usage := event.get("usage"):
            self._usage(usage)
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice.get("text")
            if text is None:
                text = _delta_text(choice.get("delta") or {})
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

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self.completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")


def _delta_text(delta: dict[str, Any]) -> str:
    for key in CONTENT_KEYS:
        value = delta.get(key)
        if value:
            return value if isinstance(value, str) else orjson.dumps(value).decode()
    return ""


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
ERROR_CHARS = 300
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
    STREAM_ERROR = "stream_error"  # an error event inside a 200 answer
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

    @property
    def gaps_s(self) -> Sequence[float]:
        """Return the pauses between successive events with content."""
        return self.stream.gaps_s

    @property
    def digest(self) -> str | None:
        """Return the hash of all text received (None: there was no text)."""
        return xxhash.xxh3_64_hexdigest(self.stream.text) if self.stream.text else None


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Target, time limit of an attempt (0: none), retries of a 503; `seed`: of jitter."""

    url: str
    timeout_s: float = 600.0
    retries: Retries = NEVER
    seed: int = 0


def open_session() -> aiohttp.ClientSession:
    """Open the session of a run, without a limit on its connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
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
            self._options.url, data=body, headers=call.headers
        ) as response:
            exchange.status = response.status
            exchange.headers = response.headers
            if response.status != 200:
                _note_refusal(exchange, await response.read())
                return
            clock, stream = self._clock, exchange.stream
            async for data in response.content.iter_any():
                now_s = clock()
                if exchange.first_byte_s is None:
                    exchange.first_byte_s = now_s
                stream.feed(data, now_s)
        exchange.outcome, exchange.error = _judge(stream)


def explain(error: aiohttp.ClientError | OSError) -> str:
    """Describe a failed connection in one line for the user."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return NO_CONNECTION
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off before its end"
    if not isinstance(error, aiohttp.ClientConnectorError):
        return f"{type(error).__name__}: {error}"[:ERROR_CHARS]
    cause = error.os_error
    number = cause.errno or 0  # negative for names that do not resolve
    reason = os.strerror(number) if number > 0 else cause.strerror or str(cause)
    return f"cannot connect to {error.host}:{error.port}: {reason}"[:ERROR_CHARS]


def _judge(stream: StreamScanner) -> tuple[ReplayOutcome, str | None]:
    if stream.error is not None:
        return ReplayOutcome.STREAM_ERROR, stream.error[:ERROR_CHARS]
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
