"""One client's request: its id, its body, the single JSON parse, and its form for an instance."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import hdrs, web

from proxy.config.in_force import BodyLimits
from proxy.core.connectors.base import Edits
from proxy.net.addresses import party
from proxy.net.server.aiohttp_adapter import taken_whole
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
    NoRoomError,
    NoSuchPathError,
    NotForClientsError,
    UnsaltedError,
)
from proxy.protocol.examined import NO_OBJECT, SALT, Examined, Task, examine
from proxy.protocol.headers import forwarded
from proxy.protocol.names.stored_responses import NAMED
from proxy.protocol.prompt.facts import MOST_VALUES_SMALL
from proxy.protocol.streams.movable import Plan
from proxy.request.content_coding import coding_of
from proxy.request.forms import examine_form
from proxy.request.large_bodies import LargeBodies
from proxy.state.access import Grant
from proxy.state.uploads import Holding

TOKEN_IDS = "return_token_ids"
MIN_RATE = 1024
"""Least average rate of a body, bytes per second, checked once a third of its time is over."""
UNPACKED_RATIO = 20
"""A packed body has room for so many times its length before it is unpacked: JSON takes a tenth."""
_LONG_BYTES = 1 << 20
"""The pieces of a longer body are joined in a thread, which does not hold up the event loop."""


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
    if request.raw_path not in OFFLOADABLE or request.method != "POST":
        _check_path(request, extra_paths)
    content = request.content
    is_whole = content.is_eof() and hdrs.CONTENT_ENCODING not in request.headers
    if not is_whole and (request.content_length or 0) > limits.bytes:
        raise _too_large(limits)
    if is_whole:  # nearly all come with their head, and take no room until they are examined
        raw = taken_whole(content)
        members, found = await _understood(request, raw, grant, limits, large, None)
    else:
        owner = owner_of(request, grant)
        try:
            with large.uploads.holding(owner, lambda: content.total_bytes) as holding:
                raw = await _body(request, limits, large, holding)
                holding.upload.is_whole = True
                members, found = await _understood(request, raw, grant, limits, large, holding)
        except NoRoomError:
            connection_of(request).stop_lingering()
            raise
    raw = members.raw
    if grant.salt is not None and raw and endpoint_of(request.path).salting is not Salting.NO_KV:
        _check_salting(request, grant, is_object=_is_json(request) and found is not NO_OBJECT)
    headers = forwarded(request.raw_headers, name, grant.hidden)
    return Outgoing(request.method, request.raw_path, headers, members, found)


def owner_of(request: web.Request, grant: Grant) -> str:
    """The owner of a body's share of the room: a tenant, or a client's address."""
    return party(request.remote or "") if grant.tenant is None else grant.tenant


def _is_json(request: web.Request) -> bool:
    """Whether a body is to be JSON.

    What is not UTF-8 JSON is refused, since an engine might understand what was not looked at. Of a
    form upload only small fields are read: engines take it for nothing else.
    """
    is_ours = request.raw_path in OFFLOADABLE or request.path in OFFLOADABLE
    return is_ours or not request.content_type.startswith("multipart/")


async def _understood(
    request: web.Request,
    raw: bytes,
    grant: Grant,
    limits: BodyLimits,
    large: LargeBodies,
    holding: Holding | None,
) -> tuple[Members, Examined]:
    """A body with what has to be edited in it at once, and what was found."""
    if len(raw) > limits.bytes:
        raise _too_large(limits)
    path = request.raw_path if request.raw_path in OFFLOADABLE else request.path
    is_ours = path in OFFLOADABLE
    if not (is_ours or _is_json(request)):
        found = await examine_form(raw, request.headers.get("Content-Type", ""))
        return Members(raw), found
    if not is_ours and not raw:
        return Members(raw), NO_OBJECT
    plans = is_ours and limits.plans_moves
    task = Task(path, raw, is_object=is_ours, salt=grant.salt, plans=plans)
    found = await _examined(request, task, grant, large, holding)
    members, drop = Members(raw, found.spans), found.drop
    found.spans = None  # kept once: by the members
    if grant.tenant is not None and path in (RESPONSES, COMPACT) and NAMED in found.fields:
        drop = [*drop, NAMED]
    if found.is_new and not drop:
        members = members.with_first(SALT, found.put[SALT])
    elif found.put or drop:
        members = await _edited(members, found.put, drop)
    if isinstance(found.plan, Plan) and not found.plan.shows_ids:
        members = await _with_token_ids(members)
    return members, found


async def _examined(
    request: web.Request, task: Task, grant: Grant, large: LargeBodies, holding: Holding | None
) -> Examined:
    """The needed parts of a body; raises BadRequestError for a refused one.

    `holding`: None for one that came with its head, and has no place among the others yet.
    """
    found = examine(task, MOST_VALUES_SMALL) if is_small(task.raw) else None
    if found is None:
        owner = owner_of(request, grant)
        if holding is not None:
            found = await large.examine(task, owner)
        else:
            with large.uploads.holding(owner, lambda: len(task.raw)) as own:
                own.upload.is_whole = True
                found = await large.examine(task, owner)
    if isinstance(found, Unfit):
        raise BadRequestError(found.message, param=found.param)
    return found


async def _edited(members: Members, put: Mapping[str, bytes], drop: Collection[str]) -> Members:
    """A body with some members set and removed; a long one is copied in a thread."""
    try:
        if len(members.raw) <= _LONG_BYTES:
            return members.edited(put, drop)
        return await asyncio.to_thread(members.edited, put, drop)
    except ValueError as error:
        raise BadRequestError(str(error)) from error


async def _with_token_ids(members: Members) -> Members:
    """A body that asks for the ids of all tokens."""
    if TOKEN_IDS.encode() not in members.raw:
        return members.with_first(TOKEN_IDS, b"true")
    return await _edited(members, {TOKEN_IDS: b"true"}, ())


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
    """Check the path, as an engine resolves it, and the method against the list."""
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
    request: web.Request, limits: BodyLimits, large: LargeBodies, holding: Holding
) -> bytes:
    """The body as it is without a Content-Encoding."""
    given = request.headers.getall("Content-Encoding", ())
    coding = coding_of(given) if given else None
    if request.content.is_eof():
        raw = request.content.read_nowait()
    else:
        is_json = coding is None and _is_json(request)
        raw = await _rest(request, limits, holding, is_json=is_json)
    if len(raw) > limits.bytes:
        raise _too_large(limits)
    if coding is None or not raw:
        return raw
    if not holding.has(min(UNPACKED_RATIO * len(raw), limits.bytes)):
        await holding.wait()
    plain = await large.unpacking.plain(raw, coding, limits.bytes, holding.upload.owner)
    holding.resize(len(plain))
    return plain


def _too_large(limits: BodyLimits) -> BodyTooLargeError:
    return BodyTooLargeError(f"body: over {limits.bytes} bytes (--max-body-bytes)")


async def _rest(
    request: web.Request, limits: BodyLimits, holding: Holding, *, is_json: bool
) -> bytes:
    """The body once it is complete; woken once for one of moderate length that is known."""
    content, length = request.content, request.content_length
    try:
        if length is not None:
            await _room(request, holding, length)
        with RateLimit(limits.seconds, lambda: content.total_bytes, MIN_RATE):
            if length is None or length > _LONG_BYTES or content.exception() is not None:
                return await _long(request, limits, holding, is_json=is_json)
            content.set_read_chunk_size(limits.bytes)
            # More than aiohttp's own limit may have come in the first read: then it waits for a
            # reader, and nobody will read before the end.
            request.protocol.resume_reading()
            await content.wait_eof()
            return content.read_nowait()
    except TimeoutError as error:
        connection_of(request).stop_lingering()
        late = f"body: not complete in {limits.seconds:g} s, or below 1 KiB/s (--body-timeout)"
        raise BodyTimeoutError(late) from error


async def _room(request: web.Request, holding: Holding, size: int) -> None:
    """Room for a body of this size; while there is none its client waits too.

    Raises NoRoomError.
    """
    if holding.has(size):
        return
    connection = connection_of(request)
    connection.hold()
    try:
        await holding.wait()
    finally:
        connection.let_go()


async def _long(
    request: web.Request, limits: BodyLimits, holding: Holding, *, is_json: bool
) -> bytes:
    """A long body, or one of unknown length; one full of arrays is refused before all of it came.

    The rest of it costs nobody anything.
    """
    pieces, left, size = [], MAX_BRACKETS, 0
    async for piece in request.content.iter_any():
        size += len(piece)
        if size > limits.bytes:
            raise _too_large(limits)
        if size > holding.upload.held:
            await _room(request, holding, min(max(2 * size, _LONG_BYTES), limits.bytes))
        left -= brackets(piece) if is_json else 0
        if left < 0:
            raise BadRequestError(TOO_MANY_BRACKETS.message)
        pieces.append(piece)
    return b"".join(pieces) if size <= _LONG_BYTES else await asyncio.to_thread(b"".join, pieces)


@dataclass(slots=True)
class Outgoing:
    """A request as it goes to instances: the body with its edits, and what was found in it.

    `headers` are lines as bytes, see `forwarded`, without the proxy's own key. A leg gets the key
    that is in force when it is sent (`Upstream.keyed`). Nobody changes one; to be frozen would
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
