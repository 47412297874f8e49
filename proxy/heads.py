"""Heads as bytes: a client's headers as an instance gets them, an instance's as the client does."""

from __future__ import annotations

from collections.abc import Iterable

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"accept-encoding",
    b"expect",
    b"x-request-id",
    # An engine's own routing: a client would choose its rank, or whom it fetches KV from.
    b"x-data-parallel-rank",
    b"x-prefiller-host-port",
    b"x-prefiller-url",
    b"x-kv-cache-source-host-port",
}
_OURS = HOP_BY_HOP | {
    b"content-length",
    b"x-request-id",
    b"x-cache-proxy-instance",
    b"x-cache-proxy-route",
    b"x-cache-proxy-reason",
}
_PLAIN_CONNECTION = frozenset({b"", b"close", b"keep-alive"})
_IDENTITY = b"Accept-Encoding: identity\r\n"


_NOTHING: frozenset[bytes] = frozenset()


def forwarded(
    fields: Iterable[tuple[bytes, bytes]],
    request_id: str,
    hidden: frozenset[bytes] = _NOTHING,
    added: bytes = b"",
) -> bytes:
    """A client's headers as lines for an instance: end-to-end ones. The first is the request id.

    `hidden`: further names (lower case) that do not go on; `added`: lines that do.
    """
    lines = [b"X-Request-Id: ", request_id.encode(), b"\r\n", _IDENTITY, added]
    named: set[bytes] = set()
    for name, value in fields:
        lower = name.lower()
        if lower not in _NOT_FORWARDED:
            if lower not in hidden:
                lines += (name, b": ", value, b"\r\n")
        elif lower == b"connection":
            named |= _tokens(value)
    if named - _PLAIN_CONNECTION:
        kept = [(n, v) for n, v in fields if n.lower() not in named]
        kept = [f for f in kept if f[0].lower() != b"connection"]
        return forwarded(kept, request_id, hidden, added)
    return b"".join(lines)


def with_request_id(headers: bytes, request_id: str) -> bytes:
    """The same lines under another id: legs and repetitions must not share one."""
    return b"X-Request-Id: %b" % request_id.encode() + headers[headers.index(b"\r\n") :]


def request_head(method: str, path: str, host: bytes, headers: bytes, body: bytes | None) -> bytes:
    """A whole request head. `headers`: lines, each with its end."""
    if body is not None:
        length = b"Content-Length: %d\r\n" % len(body)
    else:
        length = b"" if method in ("GET", "HEAD", "OPTIONS") else b"Content-Length: 0\r\n"
    line = f"{method} {path} HTTP/1.1\r\nHost: ".encode()
    return b"".join((line, host, b"\r\n", headers, length, b"\r\n"))


def answer_lines(fields: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """An instance's end-to-end headers (names in lower case) as parts of lines for the client."""
    lines: list[bytes] = []
    named: set[bytes] = set()
    for name, value in fields:
        if name not in _OURS:
            lines += (name, b": ", value, b"\r\n")
        elif name == b"connection":
            named |= _tokens(value)
    if named - _PLAIN_CONNECTION:
        return answer_lines((n, v) for n, v in fields if n not in named and n != b"connection")
    return lines


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip() for token in value.lower().split(b",")}
