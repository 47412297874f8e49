"""The proxy's own errors: the OpenAI object, statuses, and when to come again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.core.types import FailureKind
from proxy.protocol.endpoints import Dialect
from proxy.protocol.errors import BadRequestError, ProxyError, UpstreamFailure


def below(kind: type[ProxyError]) -> Iterator[type[ProxyError]]:
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == kind.__module__:
            yield from below(one)


@pytest.mark.parametrize("kind", [*below(ProxyError)])
def test_every_error_has_the_openai_object(kind: type[ProxyError]) -> None:
    error = kind("words", param="p").body()["error"]
    assert isinstance(error, dict)
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("words", "p")
    assert error["code"] == (kind.code or kind.status)
    assert (kind.status == 503) == (kind.retry_after_s is not None)


TYPES = {
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
    "request_too_large", "rate_limit_error", "api_error", "overloaded_error", "timeout_error",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*below(ProxyError)])
def test_every_error_has_anthropics_form_too(kind: type[ProxyError]) -> None:
    body = kind("words", param="p").body(Dialect.MESSAGES)
    error = body["error"]
    assert isinstance(error, dict)
    assert (body["type"], error["message"]) == ("error", "words")
    assert error["type"] in TYPES
    assert (error["type"] in ("api_error", "overloaded_error", "timeout_error")) == (
        kind.status >= 500
    )
    assert kind("words").body(Dialect.RESPONSES) == kind("words").body()


def test_a_code_of_its_own_is_the_objects_only() -> None:
    assert BadRequestError("x", code="too_deep").body()["error"] == {
        "message": "x",
        "type": "invalid_request_error",
        "param": None,
        "code": "too_deep",
    }
    assert BadRequestError("x").code is None


def test_a_failure_raised_again_keeps_no_frames() -> None:
    try:
        raise UpstreamFailure(
            FailureKind.BUSY, "full", status=503, body=b"b", headers={"A": "1"}, limit_s=2.0
        )
    except UpstreamFailure as error:
        first = error
    again = first.again()
    assert first.__traceback__ is not None
    assert again.__traceback__ is None
    assert vars(again) == vars(first)
    assert str(again) == str(first) == "busy: full"
