"""vLLM's error answers, as recorded from 0.32, and its other fixed JSON bodies."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}


class ApiError(Exception):
    """An answer other than 200, shaped `{"error": {message, type, param, code}}`.

    `is_early`: vLLM raises it while it parses the body, before it looks at kv_transfer_params.
    """

    is_early = False

    def __init__(self, status: int, message: str, param: str | None = None, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _TYPES.get(status, "InternalServerError")

    def body(self) -> bytes:
        """Return the JSON body."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return orjson.dumps({"error": error})


class EarlyError(ApiError):
    """An error that vLLM raises while it parses the body."""

    is_early = True


def wrong(message: str, param: str, value: object = None) -> ApiError:
    """Make the error for a value that vLLM itself refuses; `value` is named in the message."""
    shown = "" if value is None else f", value={value}"
    return ApiError(400, f"{message} (parameter={param}{shown})", param)


def invalid(
    kind: str, where: str, message: str, given: Any, context: str | ValueError = ""
) -> ApiError:
    """Make the error for a body that fails validation; `where` is the path of the field."""
    details: dict[str, Any] = {"type": kind, "loc": where, "msg": message, "input": _shown(given)}
    if context:
        details["ctx"] = {"error": context}
    return EarlyError(400, f"1 validation error:\n  {details}", where, "Bad Request")


def _shown(value: Any) -> Any:
    """Return a value for a message; of a container only its type and size."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


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
    """Give errors vLLM's form, unknown routes FastAPI's, and all answers their headers."""
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
