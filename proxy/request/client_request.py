"""One client's request: its id, its body, the one JSON parse, and what goes on to an instance."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from proxy.core.connectors.base import Edits
from proxy.net.server.connection import connection_of
from proxy.net.timeouts import RateLimit
from proxy.protocol.body import PLUGINS, complaint, harmless_arguments, splice, steering_keys
from proxy.protocol.endpoints import ENDPOINTS, OFFLOADABLE, Salting, endpoint_of
from proxy.protocol.errors import (
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    MethodNotAllowedError,
    NotForClientsError,
    UnsaltedError,
    UnsupportedEncodingError,
)
from proxy.protocol.headers import forwarded
from proxy.state.access import SALT, Grant

MIN_RATE = 1024
"""Least average rate of a body, bytes per second, checked once a third of its time is over."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on a client's body: bytes, and seconds until it is complete."""

    bytes: int
    seconds: float


def _new_ids() -> Iterator[str]:
    """Random ids without a system call for each."""
    while True:
        pool = os.urandom(16 * 256).hex()
        for start in range(0, len(pool), 32):
            yield pool[start : start + 32]


_new_id = _new_ids().__next__


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id where it is printable and of sane length, else a new one."""
    given = headers.get("X-Request-Id")
    return given if given and _REQUEST_ID.fullmatch(given) else _new_id()


async def read(request: web.Request, name: str, limits: BodyLimits, grant: Grant) -> Outgoing:
    """Body and headers as instances will get them; raises BadRequestError.

    What could steer an engine's KV connector or rank is taken out, see `protocol/body.py`.
    """
    is_ours = request.raw_path in OFFLOADABLE
    if not is_ours or request.method != "POST":
        _check_path(request)
    raw = await _body(request, limits)
    parsed = _parse(request, raw, is_ours=is_ours)
    if grant.salt is not None:
        raw, parsed = _salted(request, raw, parsed, grant)
    if unfit := complaint(parsed, raw):
        raise BadRequestError(unfit.message, param=unfit.param)
    if steering := steering_keys(parsed):
        raw = splice(raw, {}, steering)
    if (plugins := harmless_arguments(parsed)) is not None:
        raw = splice(raw, {PLUGINS: orjson.dumps(plugins)}, {})
    headers = forwarded(request.raw_headers, name, grant.hidden, grant.added)
    return Outgoing(request.method, request.raw_path, headers, raw or None, parsed)


def _salted(
    request: web.Request, raw: bytes, parsed: Mapping[str, Any], grant: Grant
) -> tuple[bytes, Mapping[str, Any]]:
    """The body under its tenant's salt, which every prompt must have that leaves KV."""
    is_object = bool(parsed) or (
        not request.content_type.startswith("multipart/") and raw.lstrip()[:1] == b"{"
    )
    if raw and endpoint_of(request.path).salting is not Salting.NO_KV:
        _check_salting(request, grant, is_object=is_object)
    if not is_object:
        return raw, parsed
    return splice(raw, {SALT: orjson.dumps(grant.salt)}), {**parsed, SALT: grant.salt}


def _check_salting(request: web.Request, grant: Grant, *, is_object: bool) -> None:
    """Refuse a body that engines compute without `cache_salt`."""
    path = request.path
    if endpoint_of(path).salting is not Salting.ALWAYS and path not in grant.salted_paths:
        shown = path if path in ENDPOINTS else "this path"
        raise UnsaltedError(
            f"path: KV of tenants is kept apart (--cache-salt-secret), and not every engine does "
            f"so for {shown} (--salted-paths)"
        )
    if not is_object:
        raise BadRequestError("body: must be a JSON object, to be salted (--cache-salt-secret)")


def _check_path(request: web.Request) -> None:
    """Only what stays below /v1 once an engine has resolved it, and changes no engine."""
    segments = request.path.split("/")
    if {".", ".."} & set(segments) or "\\" in request.path:
        raise BadRequestError("path: must not have . or .. in it")
    if endpoint_of(request.path.rstrip("/")).operators_only:
        raise NotForClientsError("path: changes one engine only; ask that engine itself")
    if request.path in OFFLOADABLE and request.method != "POST":
        raise MethodNotAllowedError(f"method: {request.method} is not for this path, POST is")


async def _body(request: web.Request, limits: BodyLimits) -> bytes:
    given = request.headers.getall("Content-Encoding", ())
    if given and {coding.strip().lower() for coding in given} != {"identity"}:
        raise UnsupportedEncodingError("Content-Encoding: only identity is accepted")
    if request.content.is_eof():
        raw = request.content.read_nowait()
    else:
        length = request.content_length
        if (length or 0) > limits.bytes:
            raise _too_large(limits)
        raw = await _rest(request, limits, length)
    if len(raw) > limits.bytes:
        raise _too_large(limits)
    return raw


def _too_large(limits: BodyLimits) -> BodyTooLargeError:
    return BodyTooLargeError(f"body: over {limits.bytes} bytes (--max-body-bytes)")


async def _rest(request: web.Request, limits: BodyLimits, length: int | None) -> bytes:
    """The body once it is complete; this is woken once where its length is known."""
    content = request.content
    try:
        with RateLimit(limits.seconds, lambda: content.total_bytes, MIN_RATE):
            if length is None or content.exception() is not None:
                return await request.read()
            content.set_read_chunk_size(limits.bytes)
            # More than aiohttp's own limit may have come in the first read: then it waits for a
            # reader, and nobody will read before the end.
            request.protocol.resume_reading()
            await content.wait_eof()
            return content.read_nowait()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limits) from error
    except TimeoutError as error:
        connection_of(request).stop_lingering()
        late = f"body: not complete in {limits.seconds:g} s, or below 1 KiB/s (--body-timeout)"
        raise BodyTimeoutError(late) from error


def _parse(request: web.Request, raw: bytes, *, is_ours: bool) -> Mapping[str, Any]:
    """The body's object. Only a form upload goes unread: engines take it for nothing else.

    What is not UTF-8 JSON is refused, since an engine might understand what was not looked at.
    """
    is_ours = is_ours or request.path in OFFLOADABLE
    if not is_ours and (not raw or request.content_type.startswith("multipart/")):
        return {}
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"body: not valid JSON ({error})") from error
    if isinstance(parsed, dict):
        return parsed
    if is_ours:
        raise BadRequestError("body: must be a JSON object")
    return {}


@dataclass(slots=True)
class Outgoing:
    """A request as it goes to instances: the original body, and its parse to look at.

    `headers` are lines as bytes, see `forwarded`. Nobody changes one; to be frozen would
    make it dearer.
    """

    method: str
    path: str
    headers: bytes
    raw: bytes | None
    parsed: Mapping[str, Any]

    def with_edits(self, edits: Edits | None) -> bytes | None:
        """The body with a few fields spliced in and out; every other byte as it came."""
        if edits is None or self.raw is None:
            return self.raw
        put = {key: orjson.dumps(value) for key, value in edits.put.items()}
        return splice(self.raw, put, edits.drop)
