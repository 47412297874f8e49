"""One client's request: its id, its body, the one JSON parse, and what goes on to an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import StreamReader, web

from proxy.core.connectors.base import Edits
from proxy.net.server.connection import connection_of
from proxy.net.timeouts import RateLimit
from proxy.protocol.body import (
    MAX_BRACKETS,
    TOO_MANY_BRACKETS,
    Members,
    Unfit,
    brackets,
    is_small,
)
from proxy.protocol.endpoints import (
    COMPACT,
    ENDPOINTS,
    OFFLOADABLE,
    RESPONSES,
    Salting,
    endpoint_of,
    is_for_operators,
    is_relayed,
    why_not_relayed,
)
from proxy.protocol.errors import (
    BadRequestError,
    BodyTimeoutError,
    BodyTooLargeError,
    MethodNotAllowedError,
    NoSuchPathError,
    NotForClientsError,
    UnsaltedError,
)
from proxy.protocol.examined import NO_OBJECT, Examined, Task, examine
from proxy.protocol.headers import forwarded
from proxy.protocol.names.stored_responses import NAMED
from proxy.protocol.prompt.facts import MOST_VALUES_SMALL
from proxy.protocol.streams.movable import Plan
from proxy.request.content_coding import Unpacking, coding_of
from proxy.request.forms import examine_form
from proxy.request.large_bodies import LargeBodies
from proxy.state.access import Grant

TOKEN_IDS = "return_token_ids"
MIN_RATE = 1024
"""Least average rate of a body, bytes per second, checked once a third of its time is over."""
_LONG_BYTES = 1 << 20
"""The pieces of a longer body are joined in a thread, which does not hold up the event loop."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits on a client's body: bytes, and seconds until it is complete.

    `plans_moves`: a stream may go on elsewhere; one that may is asked for token ids.
    """

    bytes: int
    seconds: float
    plans_moves: bool = False


async def read(
    request: web.Request,
    name: str,
    limits: BodyLimits,
    grant: Grant,
    large: LargeBodies,
    extra_paths: Collection[str] = (),
) -> Outgoing:
    """Body and headers as instances will get them; raises ProxyError.

    `extra_paths`: see `is_relayed`. What could steer an engine's KV connector or rank is taken out,
    see `protocol/body.py`.
    """
    is_ours = request.raw_path in OFFLOADABLE
    path = request.raw_path if is_ours else request.path
    if not is_ours or request.method != "POST":
        _check_path(request, extra_paths)
    is_ours = path in OFFLOADABLE
    # What is not UTF-8 JSON is refused, since an engine might understand what was not looked at.
    # Of a form upload only small fields are read: engines take it for nothing else.
    is_json = is_ours or not request.content_type.startswith("multipart/")
    raw = await _body(request, limits, large.unpacking, is_json=is_json)
    kind = request.headers.get("Content-Type", "")
    found, members = NO_OBJECT if is_json else await examine_form(raw, kind), Members(raw)
    if is_ours or (raw and is_json):
        plans = is_ours and limits.plans_moves
        task = Task(path, raw, is_object=is_ours, salt=grant.salt, plans=plans)
        found = await _examined(task, large)
        members, drop = Members(raw, found.spans), found.drop
        if grant.tenant is not None and path in (RESPONSES, COMPACT) and NAMED in found.fields:
            drop = [*drop, NAMED]
        if found.put or drop:
            try:
                members = await _edited(members, found.put, drop)
            except ValueError as error:
                raise BadRequestError(str(error)) from error
        if isinstance(found.plan, Plan) and not found.plan.shows_ids:
            members = await _with_token_ids(members)
    if grant.salt is not None and raw and endpoint_of(request.path).salting is not Salting.NO_KV:
        _check_salting(request, grant, is_object=is_json and found is not NO_OBJECT)
    headers = forwarded(request.raw_headers, name, grant.hidden, grant.added)
    return Outgoing(request.method, request.raw_path, headers, members, found)


async def _examined(task: Task, large: LargeBodies) -> Examined:
    """What is needed of a body; raises BadRequestError for one that is refused."""
    found = examine(task, MOST_VALUES_SMALL) if is_small(task.raw) else None
    if found is None:
        found = await large.examine(task)
    if isinstance(found, Unfit):
        raise BadRequestError(found.message, param=found.param)
    return found


async def _edited(members: Members, put: Mapping[str, bytes], drop: Collection[str]) -> Members:
    """A body with some members set and removed; a long one is copied in a thread."""
    if len(members.raw) <= _LONG_BYTES:
        return members.edited(put, drop)
    return await asyncio.to_thread(members.edited, put, drop)


async def _with_token_ids(members: Members) -> Members:
    """A body that asks for the ids of all tokens."""
    if TOKEN_IDS.encode() not in members.raw:
        return members.with_first(TOKEN_IDS, b"true")
    try:
        return await _edited(members, {TOKEN_IDS: b"true"}, ())
    except ValueError as error:
        raise BadRequestError(str(error)) from error


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


def _check_path(request: web.Request, extra_paths: Collection[str]) -> None:
    """Only what is on the list once an engine has resolved it, and with a method that it has."""
    path = request.path
    if not {".", ".."}.isdisjoint(path.split("/")) or "\\" in path:
        raise BadRequestError("path: must not have . or .. in it")
    if not is_relayed(path, extra_paths):
        kind = NotForClientsError if is_for_operators(path) else NoSuchPathError
        raise kind(why_not_relayed(path))
    methods = endpoint_of(path).methods
    if request.method not in methods:
        raise MethodNotAllowedError.of(request.method, methods)


async def _body(
    request: web.Request, limits: BodyLimits, unpacking: Unpacking, *, is_json: bool
) -> bytes:
    """The body as it is without a Content-Encoding."""
    given = request.headers.getall("Content-Encoding", ())
    coding = coding_of(given) if given else None
    if request.content.is_eof():
        raw = request.content.read_nowait()
    else:
        length = request.content_length
        if (length or 0) > limits.bytes:
            raise _too_large(limits)
        raw = await _rest(request, limits, length, is_json=is_json and coding is None)
    if len(raw) > limits.bytes:
        raise _too_large(limits)
    return raw if coding is None or not raw else await unpacking.plain(raw, coding, limits.bytes)


def _too_large(limits: BodyLimits) -> BodyTooLargeError:
    return BodyTooLargeError(f"body: over {limits.bytes} bytes (--max-body-bytes)")


async def _rest(
    request: web.Request, limits: BodyLimits, length: int | None, *, is_json: bool
) -> bytes:
    """The body once it is complete; woken once for one of moderate length that is known."""
    content = request.content
    try:
        with RateLimit(limits.seconds, lambda: content.total_bytes, MIN_RATE):
            if length is None or content.exception() is not None:
                return await request.read()
            if length > _LONG_BYTES:
                return await _long(content, is_json=is_json)
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


async def _long(content: StreamReader, *, is_json: bool) -> bytes:
    """A long body; one full of arrays is refused before the rest of it costs anybody anything."""
    pieces, left = [], MAX_BRACKETS
    async for piece in content.iter_any():
        left -= brackets(piece) if is_json else 0
        if left < 0:
            raise BadRequestError(TOO_MANY_BRACKETS.message)
        pieces.append(piece)
    return await asyncio.to_thread(b"".join, pieces)


@dataclass(slots=True)
class Outgoing:
    """A request as it goes to instances: the body with its edits, and what was found in it.

    `headers` are lines as bytes, see `forwarded`. Nobody changes one; to be frozen would
    make it dearer.
    """

    method: str
    path: str
    headers: bytes
    members: Members
    found: Examined

    @property
    def raw(self) -> bytes | None:
        """The body; None where there is none."""
        return self.members.raw or None

    async def with_edits(self, edits: Edits | None) -> bytes | None:
        """The body with a few more fields edited; every other byte as it came.

        Raises ValueError where it has too many fields.
        """
        if edits is None or not self.members.raw:
            return self.raw
        put = {key: orjson.dumps(value) for key, value in edits.put.items()}
        return (await _edited(self.members, put, edits.drop)).raw
