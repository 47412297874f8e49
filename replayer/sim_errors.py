"""Errors in vLLM's words, as recorded from 0.32: its own checks, and those of its body's fields."""

from __future__ import annotations

from typing import Any

import orjson

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "Service Unavailable"}


class ApiError(Exception):
    """An answer other than 200, shaped `{"error": {message, type, param, code}}`."""

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


def wrong(message: str, param: str, value: object = None) -> ApiError:
    """A value that vLLM itself refuses; where it names the value, so does this."""
    shown = "" if value is None else f", value={value}"
    return ApiError(400, f"{message} (parameter={param}{shown})", param)


def invalid(kind: str, where: str, message: str, given: Any, context: str = "") -> ApiError:
    """A body that does not fit its description; `where` is the path to the field."""
    told: dict[str, Any] = {"type": kind, "loc": where, "msg": message, "input": _shown(given)}
    if context:
        told["ctx"] = {"error": context}
    return ApiError(400, f"1 validation error:\n  {told}", where, "Bad Request")


def _shown(value: Any) -> Any:
    """A value; of a container its size alone."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value
