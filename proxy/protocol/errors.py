"""Errors: of a client's request with status and body, of an instance with a kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from proxy.core.types import FailureKind, Outcome
from proxy.protocol.endpoints import Dialect

CONTENT_CODINGS = ("zstd", "gzip", "deflate")
"""Content codings of a request's body that the proxy unpacks."""

DRAIN_RETRY_S = 1
"""Retry-After of a draining proxy: a successor, or a neighbour behind the balancer, can serve
soon."""

NAMED_MODELS, _NAME_CHARS = 20, 128
"""Most models that an error names, and most characters of each."""
TOO_HOT_RETRY_S = 8
"""Retry-After of a request that was ended for the heat of its instance: a cap shows by then."""


def openai_error(
    message: str, kind: str, code: str | int, param: str | None = None
) -> dict[str, object]:
    """The OpenAI error object, the value of `error` in a body.

    `kind` is its `type`, `code` is for programs, `param` names the request's field at fault.
    """
    return {"message": message, "type": kind, "param": param, "code": code}


_KINDS_OF_MESSAGES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's `type` of an error by its status; of others see `messages_error`."""
STATUS_OF_KIND = {kind: status for status, kind in _KINDS_OF_MESSAGES.items()} | {
    "server_error": 500,
    "rate_limit_exceeded": 429,
    "server_is_overloaded": 503,
    "slow_down": 503,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
}
"""The status that the name of an engine's error stands for: Anthropic's types, the Responses API's
codes."""


def messages_error(
    message: str, status: int, code: str | int | None = None, request_id: str | None = None
) -> dict[str, object]:
    """The body of an error of Anthropic's API. `code` is for programs, and ours."""
    other = "invalid_request_error" if status < 500 else "api_error"
    detail: dict[str, object] = {"type": _KINDS_OF_MESSAGES.get(status, other), "message": message}
    if code is not None:
        detail["code"] = code
    body: dict[str, object] = {"type": "error", "error": detail}
    return body if request_id is None else body | {"request_id": request_id}


def error_body(
    dialect: Dialect,
    status: int,
    message: str,
    kind: str,
    *,
    code: str | None = None,
    param: str | None = None,
) -> dict[str, object]:
    """The body of an error in a dialect's form. `kind` is OpenAI's `type`."""
    if dialect is Dialect.MESSAGES:
        return messages_error(message, status, code)
    return {"error": openai_error(message, kind, code or status, param)}


def overloaded(message: str, status: int) -> dict[str, object]:
    """The body of an answer that refuses a request for lack of capacity.

    `message`, `type` and `code` are at the top level, beside the OpenAI error object.
    """
    kind = "service_unavailable"
    own = {"message": message, "type": kind, "code": status}
    return {**own, "error": openai_error(message, kind, status)}


class ProxyError(Exception):
    """An error that the proxy answers itself, without an instance's answer."""

    status = 500
    type = "internal_error"
    code: str | None = None
    """Code for programs; by default the status."""
    outcome = Outcome.UPSTREAM_ERROR
    retry_after_s: int | None = None
    """The Retry-After header; every 503 has one."""
    fields: Mapping[str, str] = {}
    """Further header fields of the answer."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self, dialect: Dialect = Dialect.OPENAI) -> dict[str, object]:
        """The body of the answer, in a dialect's form."""
        given = self.status, self.message, self.type
        return error_body(dialect, *given, code=self.code, param=self.param)


class BadRequestError(ProxyError):
    """The request is invalid; nothing was forwarded."""

    status = 400
    type = "invalid_request_error"
    outcome = Outcome.BAD_REQUEST


class UnauthorizedError(BadRequestError):
    """The request has no key, or an unknown one."""

    status = 401
    fields: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}
    type = "authentication_error"


class NotForClientsError(BadRequestError):
    """The path is for operators."""

    status = 404


class NoSuchPathError(BadRequestError):
    """Engines do not serve this path."""

    status = 404


class UnsaltedError(BadRequestError):
    """The prompt would be computed without its tenant's salt."""

    status = 403
    type = "permission_error"


class ResponseNotFoundError(BadRequestError):
    """No instance holds the stored response that the request is about."""

    status = 404
    code = "response_not_found"


class UnknownModelError(BadRequestError):
    """No instance lists the model."""

    status = 404
    code = "model_not_found"

    @classmethod
    def of(cls, model: str, known: Collection[str]) -> UnknownModelError:
        """The error of a request for another model than these."""
        named = [name[:_NAME_CHARS] for name in sorted(known)]
        more = f" and {len(named) - NAMED_MODELS} more" if len(named) > NAMED_MODELS else ""
        there = f"Known here: {', '.join(named[:NAMED_MODELS])}{more}." if named else ""
        return cls(f"The model `{model}` does not exist. {there}".rstrip(), param="model")


class LoopError(ProxyError):
    """The request has come through this proxy before: an instance is a proxy that leads back."""

    status = 508
    type = "upstream_error"
    code = "loop_detected"


class ModelAwayError(ProxyError):
    """The model is known, but no instance that serves it answers."""

    status = 503
    retry_after_s = 5
    type = "service_unavailable"


class MethodNotAllowedError(BadRequestError):
    """The path is known, but not with this method."""

    status = 405

    @classmethod
    def of(cls, method: str, allowed: Iterable[str]) -> MethodNotAllowedError:
        """The error of a request with another method than these."""
        named = ", ".join(allowed)
        error = cls(f"method: {method} is not allowed for this path; allowed: {named}")
        error.fields = {"Allow": named}
        return error


class BodyTimeoutError(BadRequestError):
    """The body was not complete within `--body-timeout`."""

    status = 408


class BodyTooLargeError(BadRequestError):
    """The body is over `--max-body-bytes`."""

    status = 413


class UnsupportedEncodingError(BadRequestError):
    """The body's compression is not supported, so the prompt cannot be read."""

    status = 415
    fields: Mapping[str, str] = {"Accept-Encoding": ", ".join(CONTENT_CODINGS)}


class UpstreamLostError(ProxyError):
    """Every instance that was tried failed before the first byte."""

    status = 502
    type = "upstream_error"


class BadUpstreamError(UpstreamLostError):
    """The last instance's answer cannot be passed on: it is not HTTP, or a redirect."""

    code = "bad_upstream"


class NoRoomError(ProxyError):
    """The proxy has no socket left for an instance; one is free in about 1 s."""

    status = 503
    retry_after_s = 1
    type = "service_unavailable"


class StoppingError(ProxyError):
    """The proxy is stopping, and its drain time is over."""

    status = 503
    retry_after_s = DRAIN_RETRY_S
    code = "proxy_stopping"
    type = "service_unavailable"
    outcome = Outcome.PROXY_STOPPED


class TooHotError(ProxyError):
    """The request was ended to cool the GPUs of its instance (`--thermal-may-abort`)."""

    status = 503
    retry_after_s = TOO_HOT_RETRY_S
    code = "too_hot"
    type = "service_unavailable"
    outcome = Outcome.UPSTREAM_TRUNCATED


class UpstreamTimeoutError(ProxyError):
    """An instance took longer than a named timeout allows."""

    status = 504
    type = "upstream_timeout"
    outcome = Outcome.UPSTREAM_TIMEOUT


DEFECTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that the proxy's own code raises over an unexpected answer of an engine."""


class UpstreamFailure(Exception):  # noqa: N818 - a failure to route around, not yet an error
    """An instance did not serve a request. With `status` it answered; that answer may be passed on.

    `limit_s`: the time limit that was reached, in seconds; `limit`: the option that holds it,
    without `--` and `-timeout`.
    """

    def __init__(  # noqa: PLR0913 - a value has as many fields as it has
        self,
        kind: FailureKind,
        detail: str,
        *,
        status: int | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
        limit: str = "ttft",
    ) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.status = status
        self.body = body
        self.headers = headers or {}
        self.limit_s, self.limit = limit_s, limit

    def again(self) -> UpstreamFailure:
        """A copy to raise while this one is kept.

        A raised error holds the frames that it passed, which hold the object that keeps the error:
        a reference cycle.
        """
        return UpstreamFailure(
            self.kind,
            self.detail,
            status=self.status,
            body=self.body,
            headers=self.headers,
            limit_s=self.limit_s,
            limit=self.limit,
        )
