"""A client's request as it comes in: its id, its body, and the one JSON parse."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from proxy.core.connectors import KV_PARAMS
from proxy.core.splice import splice
from proxy.core.tokens import OFFLOAD_ENDPOINTS
from proxy.errors import BadRequestError, BodyTooLargeError, UnsupportedEncodingError
from proxy.legs import Outgoing
from proxy.upstream import forwarded

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's own id where it is printable and of sane length, else a new one."""
    given = headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def read(request: web.Request, name: str, max_bytes: int) -> Outgoing:
    """Body and headers as instances will get them; raises BadRequestError.

    `kv_transfer_params` of a client is taken out: it could steer an engine's KV connector.
    """
    raw = await _body(request, max_bytes)
    parsed = _parse(request, raw)
    if KV_PARAMS in parsed:
        raw = splice(raw, {}, {KV_PARAMS})
    headers = forwarded(request.headers, name)
    return Outgoing(request.method, request.raw_path, headers, raw or None, parsed)


async def _body(request: web.Request, max_bytes: int) -> bytes:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncodingError("Content-Encoding: only identity is accepted")
    too_large = BodyTooLargeError(f"body: over {max_bytes} bytes (--max-body-bytes)")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error


def _parse(request: web.Request, raw: bytes) -> Mapping[str, Any]:
    """The body's object. Where its form is not ours to know, anything else is routed unread."""
    is_ours = request.path in OFFLOAD_ENDPOINTS
    if not is_ours and "json" not in request.content_type:
        return {}
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if is_ours:
            raise BadRequestError(f"body: not valid JSON ({error})") from error
        return {}
    if isinstance(parsed, dict):
        return parsed
    if is_ours:
        raise BadRequestError("body: must be a JSON object")
    return {}
