"""RedisBus: one stream of a Redis or Valkey server, by redis-py.

An exchange is one round trip: XADD and XREAD in a pipeline, without BLOCK. A read that was given up
would leave its answer to the next one on that connection, so after a failure it is closed. An
answer is bounded before it is parsed: whatever answers there takes neither memory nor the loop.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Final

import redis.asyncio as redis_py
from redis._parsers import _AsyncRESP2Parser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from proxy.net.addresses import LookUps
from proxy.net.bus.base import KEPT_MS, MOST_BYTES, READ_AT_ONCE, BusError, Heard
from proxy.protocol.errors import DEFECTS

SOCKET_S: Final = 0.5
"""Time limit of a connection, and of each read and write."""
EXCHANGE_S: Final = 2.0
"""Time limit of an exchange, whose answer may take several reads."""
FIELD: Final = b"b"
STRANGE: Final = "its answer is not one of Redis or Valkey to XADD and XREAD"
LINES_MAX: Final = 16 * READ_AT_ONCE
"""Parts of an answer: a batch has five."""
BYTES_MAX: Final = (READ_AT_ONCE + 1) * MOST_BYTES
"""Bytes of an answer's strings."""
_TLS_FILES: Final = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"})
FILE_BYTES: Final = 1 << 20
"""Size of a file for TLS."""
_ENTRY = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
FROM_START: Final = b"0-0"


class _TooMuchError(ValueError):
    """An answer of too many parts or bytes."""


class _Bounded(_AsyncRESP2Parser):
    """redis-py's parser, which gives up an answer of too many parts or bytes."""

    _lines_left = _bytes_left = 0

    async def read_response(self, disable_decoding: bool = False) -> Any:  # noqa: FBT001, FBT002
        self._lines_left, self._bytes_left = LINES_MAX, BYTES_MAX
        return await super().read_response(disable_decoding=disable_decoding)

    async def _readline(self) -> bytes:
        self._lines_left -= 1
        if self._lines_left < 0:
            raise _TooMuchError
        return await super()._readline()

    async def _read(self, length: int) -> bytes:
        if not 0 <= length <= self._bytes_left:
            raise _TooMuchError
        self._bytes_left -= length
        return await super()._read(length)


_OURS: Final[dict[str, Any]] = {
    "protocol": 2,
    "socket_timeout": SOCKET_S,
    "socket_connect_timeout": SOCKET_S,
    "health_check_interval": 0,
    "decode_responses": False,
    "parser_class": _Bounded,
    "driver_info": None,  # it would be read from a file at each connection
}


class RedisBus:
    """One reader of a stream. `url`: redis://, rediss:// or unix://."""

    def __init__(self, url: str, stream: str) -> None:
        """Raises ValueError for a URL that redis-py cannot use; its text has no part of it."""
        try:
            # Without hiredis redis-py refuses its own default protocol.
            pool = redis_py.ConnectionPool.from_url(url, max_connections=1, protocol=2)
            # What the URL says of timeouts or forms is not taken.
            pool.connection_kwargs |= _OURS | {"retry": Retry(NoBackoff(), 0)}
            pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RedisError) as error:
            raise ValueError("the URL has a part that is not one of a Redis URL") from error
        _check_files(pool.connection_kwargs)
        self._client = redis_py.Redis(connection_pool=pool)
        self._host: str | None = pool.connection_kwargs.get("host")
        given = (pool.connection_kwargs.get(name) for name in ("username", "password"))
        self._secrets = sorted((text for text in given if text), key=len, reverse=True)
        self._look_up, self._is_found = LookUps(), False
        self._stream = stream.encode()
        self._large = f"an entry of {stream} is no batch, and is passed over"
        self._read = self._own = FROM_START
        self._marks: deque[tuple[float, bytes]] = deque(maxlen=2 * KEPT_MS // 1000)
        """Own ids and when they were written, from one on that is as old as KEPT_MS."""
        self._is_clean = True
        self._count = READ_AT_ONCE
        self._is_stuck = False
        """The entry behind the position is no batch, and cannot be read."""

    async def exchange(self, batch: bytes | None) -> Heard:
        """See `Bus`."""
        if not self._is_clean:
            await self.close()
        self._is_clean = False
        # Over a slow link fewer batches arrive in time. The next read asks for half of them.
        count, self._count = self._count, max(1, self._count // 2)
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await self._find()
                if self._is_stuck:
                    heard = await self._step_over(batch)
                else:
                    heard = await self._ask(batch, count)
        except TimeoutError:
            raise BusError(f"no answer within {EXCHANGE_S:g} s") from None
        except (RedisError, OSError) as error:
            raise BusError(self._said(error)) from error
        except _TooMuchError as error:
            is_entry = count == 1 and not self._is_stuck
            self._is_stuck |= is_entry
            raise BusError(self._large if is_entry else STRANGE) from error
        except DEFECTS as error:
            # Of redis-py too, which takes an answer to be one of its server.
            raise BusError(STRANGE) from error
        self._is_clean = True
        self._count = min(READ_AT_ONCE, 2 * count)
        return heard

    def _said(self, error: Exception) -> str:
        """The first line of an error's text, bounded; a server may repeat what AUTH told it."""
        text = (str(error) or type(error).__name__).splitlines()[0]
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(c if c.isprintable() else "?" for c in text[:200])

    async def _find(self) -> None:
        """Wait for the name service before a connection; raises BusError.

        redis-py asks in a pool of threads. Each attempt would leave a call there that hangs.
        """
        if self._host is None or self._is_found:
            return
        try:
            async with asyncio.timeout(SOCKET_S):
                await self._look_up(self._host, 0)
        except TimeoutError:
            raise BusError(f"its name has no answer within {SOCKET_S:g} s") from None
        self._is_found = True

    async def _ask(self, batch: bytes | None, count: int) -> Heard:
        pipeline = self._client.pipeline(transaction=False)
        if batch is not None:
            pipeline.execute_command(*self._added(batch))
        read = (b"COUNT", count, b"STREAMS", self._stream, self._read)
        pipeline.execute_command("XREAD", *read)
        answers = await pipeline.execute(raise_on_error=False)
        return self._heard(answers, count, has_batch=batch is not None)

    async def _step_over(self, batch: bytes | None) -> Heard:
        """Go on behind an entry that is no batch of ours: at the next own one."""
        if batch is None:
            return Heard([], is_all=True)
        add = self._client.execute_command
        answer = await add(*self._added(batch))  # type: ignore[no-untyped-call]
        self._own = _checked(answer)
        self._mark()
        self._read, self._is_stuck = _before(self._own), False
        return Heard([], is_all=False)

    def _added(self, batch: bytes) -> tuple[Any, ...]:
        """XADD, which trims what is older than KEPT_MS.

        Ids are times of the server, whose clock may be set back: then they stand still, and what
        is old is told by the age of own batches.
        """
        since_s = monotonic() - KEPT_MS / 1000
        while len(self._marks) > 1 and self._marks[1][0] <= since_s:
            self._marks.popleft()
        kept = (max(0, _parts(self._read)[0] - KEPT_MS), 0)
        if self._marks and self._marks[0][0] <= since_s:
            kept = max(kept, _parts(self._marks[0][1]))
        return "XADD", self._stream, b"MINID", b"~", b"%d-%d" % kept, b"*", FIELD, batch

    def _mark(self) -> None:
        """Note when the last own batch was written, once a second."""
        now_s = monotonic()
        if self._marks and _parts(self._own) < _parts(self._marks[-1][1]):
            self._marks.clear()  # another log
        if not self._marks or now_s - self._marks[-1][0] >= 1.0:
            self._marks.append((now_s, self._own))

    def _heard(self, answers: list[Any], count: int, *, has_batch: bool) -> Heard:
        """The new batches; raises what `exchange` knows for an error, or for another answer."""
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        streams = answers[-1] or ()
        entries = streams[0][1] if streams else ()
        if len(entries) > count:
            raise ValueError("more than was asked for")
        found = [_bytes(fields.get(FIELD, b"")) for _id, fields in entries]
        own = _checked(answers[0]) if has_batch else self._own
        read = _checked(entries[-1][0]) if entries else self._read
        self._own, self._read = own, read
        if has_batch:
            self._mark()
        return Heard(found, len(found) < count)

    def start_again(self) -> None:
        """See `Bus`."""
        self._read = _before(self._own)

    async def close(self) -> None:
        """See `Bus`."""
        try:
            async with asyncio.timeout(SOCKET_S):
                await self._client.connection_pool.disconnect()
        except (TimeoutError, RedisError, OSError):
            pass  # its socket is closed in any case
        self._is_clean, self._is_found = True, False


def _check_files(given: Mapping[str, Any]) -> None:
    """Raise ValueError where TLS would read, on the loop, anything but a file of bounded size."""
    for name in sorted(_TLS_FILES & given.keys()):
        path = Path(given[name])
        if not path.is_file() or path.stat().st_size > FILE_BYTES:
            raise ValueError(f"{name} in the URL must be a file of at most {FILE_BYTES >> 20} MiB")


def _checked(entry: Any) -> bytes:
    """The id of an entry; ValueError if it is none."""
    if not isinstance(entry, bytes) or not _ENTRY.fullmatch(entry):
        raise ValueError("not an id")
    return entry


def _bytes(value: Any) -> bytes:
    """A field of an entry; ValueError if it is no string: bytes() of a number allocates as many."""
    if not isinstance(value, bytes):
        raise ValueError("not a string")
    return value


def _parts(entry: bytes) -> tuple[int, int]:
    """Milliseconds and number of an id."""
    ms, _, number = entry.partition(b"-")
    return int(ms), int(number)


def _before(entry: bytes) -> bytes:
    """The id before that of an entry."""
    ms, number = _parts(entry)
    if number:
        return b"%d-%d" % (ms, number - 1)
    return b"%d-%d" % (max(0, ms - 1), (1 << 64) - 1)
