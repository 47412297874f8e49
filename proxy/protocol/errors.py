"""What can go wrong, once: a client's error has a status and a body, an instance's a kind."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.core.types import FailureKind, Outcome

DRAIN_RETRY_S = 1
"""A draining proxy has a successor, or a neighbour behind the same balancer."""


def openai_error(
    message: str, kind: str, code: str | int, param: str | None = None
) -> dict[str, object]:
    """The object that clients of OpenAI's API look for under `error`.

    `kind` is its `type`, `code` for programs, `param` the field of the request that is at fault.
    """
    return {"message": message, "type": kind, "param": param, "code": code}


def overloaded(message: str, status: int) -> dict[str, object]:
    """The body of an answer that refuses what cannot be served now.

    `message`, `type` and `code` stand at its top, and the OpenAI error object beside them.
    """
    kind = "service_unavailable"
    own = {"message": message, "type": kind, "code": status}
    return {**own, "error": openai_error(message, kind, status)}


class ProxyError(Exception):
    """An answer the proxy gives itself instead of an instance's."""

    status = 500
    type = "internal_error"
    code: str | None = None
    """For programs; by default the status."""
    outcome = Outcome.UPSTREAM_ERROR
    retry_after_s: int | None = None
    """What Retry-After says; every 503 has one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        code = self.code or self.status
        return {"error": openai_error(self.message, self.type, code, self.param)}


class BadRequestError(ProxyError):
    """The request cannot be understood; nothing was forwarded."""

    status = 400
    type = "invalid_request_error"
    outcome = Outcome.BAD_REQUEST


class UnauthorizedError(BadRequestError):
    """No key, or none that is known."""

    status = 401
    type = "authentication_error"


class NotForClientsError(BadRequestError):
    """The path is an operator's."""

    status = 404


class MethodNotAllowedError(BadRequestError):
    """The path is known, but not with this method: it is one that is posted to."""

    status = 405


class BodyTimeoutError(BadRequestError):
    """The body did not come within `--body-timeout`."""

    status = 408


class BodyTooLargeError(BadRequestError):
    """The body is over `--max-body-bytes`."""

    status = 413


class UnsupportedEncodingError(BadRequestError):
    """The body is compressed; the prompt could not be looked at."""

    status = 415


class UpstreamLostError(ProxyError):
    """Every instance that was tried failed before the first byte."""

    status = 502
    type = "upstream_error"


class BadUpstreamError(UpstreamLostError):
    """The last instance answered what may not be passed on: no HTTP, or a redirection."""

    code = "bad_upstream"


class NoRoomError(ProxyError):
    """The proxy has no socket left for an instance: until a request ends, in about a second."""

    status = 503
    retry_after_s = 1
    type = "service_unavailable"


class StoppingError(ProxyError):
    """The proxy is stopping, and the drain's time is over."""

    status = 503
    retry_after_s = DRAIN_RETRY_S
    code = "proxy_stopping"
    type = "service_unavailable"
    outcome = Outcome.PROXY_STOPPED


class UpstreamTimeoutError(ProxyError):
    """An instance took longer than a named timeout allows."""

    status = 504
    type = "upstream_timeout"
    outcome = Outcome.UPSTREAM_TIMEOUT


DEFECTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What our own code raises over an engine's words that it did not expect."""


class UpstreamFailure(Exception):  # noqa: N818 - a failure to route around, not yet an error
    """One instance could not answer. With `status`, it answered so: the answer may be passed on.

    `limit_s`: the time limit that it met, seconds.
    """

    def __init__(
        self,
        kind: FailureKind,
        detail: str,
        *,
        status: int | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.status = status
        self.body = body
        self.headers = headers or {}
        self.limit_s = limit_s

    def again(self) -> UpstreamFailure:
        """A copy, to be raised while this one is kept.

        A raised error holds the frames that it went through, and those hold what keeps it.
        """
        return UpstreamFailure(
            self.kind,
            self.detail,
            status=self.status,
            body=self.body,
            headers=self.headers,
            limit_s=self.limit_s,
        )
