"""HTTP as vLLM's server frames it: headers, error bodies, model cards."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from replayer.sim_errors import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PERMISSION = {
    "id": "modelperm-sim",
    "object": "model_permission",
    "created": 0,
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


def model_card(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [_PERMISSION | {"created": created}],
    }


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return web.Response(body=raw, status=status, content_type="application/json")


@web.middleware
async def like_vllm(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give errors vLLM's shape, unknown routes FastAPI's, and every answer their headers."""
    try:
        response = await handler(request)
    except ApiError as error:
        response = json_response(error.body(), error.status)
    except web.HTTPNotFound:
        response = json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed as error:
        response = json_response({"detail": "Method Not Allowed"}, 405)
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if not response.prepared:
        name = request.headers.get("X-Request-Id")
        response.headers.setdefault("X-Request-Id", name or uuid.uuid4().hex)
        response.headers["Vary"] = "Origin"
    return response
