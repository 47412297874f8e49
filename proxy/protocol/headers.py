"""Heads as bytes: a client's headers for an instance, an instance's headers for the client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from secrets import token_hex
from typing import Final

from proxy.protocol.errors import LoopError
from proxy.protocol.memo import Memo

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
    b"content-encoding",
    b"expect",
    b"via",
    b"x-request-id",
    b"x-data-parallel-rank",
    b"x-kv-cache-source-host-port",
    b"transfer_encoding",
    b"content_length",
}
_NOT_FORWARDED_PREFIX = b"x-prefiller-"
"""llm-d's and vLLM's headers that select an engine or rank; a client may not set them."""
_NOT_NOMINATED = frozenset({b"authorization", b"content-type", b"cookie"})
"""Headers that a client's Connection header cannot declare as hop-by-hop."""
_OURS = HOP_BY_HOP | {
    b"content-length",
    b"x-request-id",
}
_OURS_PREFIX = b"x-cache-proxy-"
ACTS_BEYOND: Final[Mapping[str, tuple[bytes, ...]]] = {
    "kept or sent again by browsers, for all that comes from the address": (
        *(b"set-cookie", b"set-cookie2", b"set-login", b"clear-site-data", b"use-as-dictionary"),
        *(b"strict-transport-security", b"public-key-pins", b"expect-ct", b"origin-agent-cluster"),
        *(b"accept-ch", b"critical-ch", b"origin-trial", b"activate-storage-access"),
        *(b"service-worker-allowed", b"observe-browsing-topics", b"supports-loading-mode"),
    ),
    "sends clients elsewhere, or has them load or report something": (
        *(b"alt-svc", b"alternates", b"refresh", b"link", b"speculation-rules"),
        *(b"sourcemap", b"x-sourcemap", b"nel", b"report-to", b"reporting-endpoints"),
        *(b"attribution-reporting-register-source", b"attribution-reporting-register-trigger"),
    ),
    "asks for a key or password in the proxy's name": (
        *(b"www-authenticate", b"authentication-info"),
    ),
    "lets other pages read or embed": (
        *(b"access-control-allow-origin", b"access-control-allow-credentials"),
        *(b"access-control-expose-headers", b"access-control-allow-private-network"),
        *(b"timing-allow-origin", b"cross-origin-resource-policy"),
    ),
    "has a web server before the proxy answer with a file of its own": (
        *(b"x-accel-redirect", b"x-sendfile", b"x-lighttpd-send-file", b"x-reproxy-url"),
    ),
}
"""Headers of an engine's answer that act on more than that answer, by what they do: its client
takes the proxy for who says so. They are removed."""
_BEYOND = frozenset(name for names in ACTS_BEYOND.values() for name in names)
_PLAIN_CONNECTION = frozenset({b"", b"close", b"keep-alive"})
_GOES: Memo[bytes, bool] = Memo(512)
"""Whether headers of these names are forwarded to an instance; clients send the same few."""
_COMES: Memo[bytes, bool] = Memo(512)
"""The same of an instance's headers and the client."""
_KEPT_NAME_BYTES = 64
"""A longer name is not remembered."""
NOSNIFF: Final = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
"""With these a browser runs nothing of an answer in the proxy's own name."""
_NOSNIFF_LINES = b"".join(f"{name}: {value}\r\n".encode() for name, value in NOSNIFF.items())
_NO_PAGES = frozenset(
    kind + charset
    for kind in (b"application/json", b"text/event-stream")
    for charset in (b"", b"; charset=utf-8", b";charset=utf-8")
)
"""Types of which a browser runs nothing. Of two in one line, or in two, it takes the last."""
_OWN = b"cache-proxy-" + token_hex(4).encode()
"""This process in a Via header (RFC 9110, 7.6.3)."""
_ALWAYS = b"Accept-Encoding: identity\r\nVia: 1.1 %b\r\n" % _OWN
_LOOP = "the request has come through this proxy before: one of its instances leads back to it"
_ROUTE_PARTS: Memo[tuple[str, str, str, str], tuple[bytes, bytes, bytes]] = Memo(1024)
_NOTHING: frozenset[bytes] = frozenset()
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
"""Names of the headers with a client's key, or an instance's."""
_KEY_LINES = re.compile(rb"(?im)^(?:%b):.*\n" % b"|".join(sorted(CREDENTIALS)))


def forwarded(
    fields: Iterable[tuple[bytes, bytes]],
    request_id: str,
    hidden: frozenset[bytes] = _NOTHING,
) -> bytes:
    """A client's end-to-end headers as lines for an instance, after X-Request-Id.

    Raises LoopError for a request that this process has sent itself.

    `hidden`: further names (lower case) that are not forwarded.
    """
    lines = [b"X-Request-Id: ", request_id.encode(), b"\r\n", _ALWAYS]
    named: set[bytes] = set()
    came = b""
    known = _GOES.known
    for name, value in fields:
        if (goes := known.get(name)) is None:
            goes = _goes_on(name)
        if goes:
            if not hidden or name.lower() not in hidden:
                lines += (name, b": ", value, b"\r\n")
        elif (lower := name.lower()) == b"connection":
            named |= _tokens(value)
        elif lower == b"via":
            came += _via(value)
    named -= _NOT_NOMINATED
    if named - _PLAIN_CONNECTION:
        named.add(b"connection")
        kept = [(n, v) for n, v in fields if n.lower() not in named]
        return forwarded(kept, request_id, hidden)
    lines[3] = came + _ALWAYS
    return b"".join(lines)


def _via(value: bytes) -> bytes:
    """A Via header of proxies before this one; raises LoopError where it is among them."""
    if _OWN in value:
        raise LoopError(_LOOP)
    return b"Via: %b\r\n" % value


def credentials(lines: bytes) -> bytes:
    """The header lines that carry a key for an instance."""
    return b"".join(_KEY_LINES.findall(lines))


def keyed(lines: bytes, auth: bytes) -> bytes:
    """The header lines with the key of the line `auth` in place of any other, if there is one."""
    if not auth:
        return lines
    lower = lines.lower()
    if b"authorization:" in lower or b"x-api-key:" in lower:  # seldom, and the search is slow
        lines = _KEY_LINES.sub(b"", lines)
    return lines + auth


def _goes_on(name: bytes) -> bool:
    """Whether a header is forwarded to an instance."""
    lower = name.lower()
    goes = lower not in _NOT_FORWARDED and not lower.startswith(_NOT_FORWARDED_PREFIX)
    return _GOES.keep(name, goes) if len(name) <= _KEPT_NAME_BYTES else goes


def with_request_id(headers: bytes, request_id: str) -> bytes:
    """The header lines with another request id: legs and retries must not share one."""
    return b"X-Request-Id: %b" % request_id.encode() + headers[headers.index(b"\r\n") :]


def request_head(method: str, path: str, host: bytes, headers: bytes, body: bytes | None) -> bytes:
    """A whole request head. `headers`: lines, each with its line end."""
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
    known = _COMES.known
    for name, value in fields:
        if (comes := known.get(name)) is None:
            comes = _comes_back(name)
        if comes:
            lines += (name, b": ", value, b"\r\n")
        elif name == b"connection":
            named |= _tokens(value)
    if named - _PLAIN_CONNECTION:
        return answer_lines((n, v) for n, v in fields if n not in named and n != b"connection")
    return lines


def _comes_back(name: bytes) -> bool:
    """Whether an instance's header is passed on to the client."""
    comes = not (name in _OURS or name.startswith(_OURS_PREFIX) or name in _BEYOND)
    return _COMES.keep(name, comes) if len(name) <= _KEPT_NAME_BYTES else comes


def page_lines(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Lines to put before these, where a browser might take the answer for a page; else none."""
    kinds = [value for name, value in fields if name == b"content-type"]
    return b"" if len(kinds) == 1 and kinds[0].lower() in _NO_PAGES else _NOSNIFF_LINES


def route_lines(
    instance: str, route_class: str, place: str, reason: str, hit_tokens: int, prompt_tokens: int
) -> bytes:
    """X-Cache-Proxy-* lines for the client; all but the numbers is remembered."""
    key = instance, route_class, place, reason
    parts = _ROUTE_PARTS.known.get(key)
    if parts is None:
        head = (
            f"X-Cache-Proxy-Instance: {instance}\r\nX-Cache-Proxy-Route: {route_class}\r\n"
            f"X-Cache-Proxy-Reason: {place}"
        )
        made = (
            f"{head} ".encode(),
            f" cached; {reason}\r\n".encode(),
            f"{head}; {reason}\r\n".encode(),
        )
        parts = _ROUTE_PARTS.keep(key, made)
    if not prompt_tokens:
        return parts[2]
    return b"%b%b of %b%b" % (parts[0], _short(hit_tokens), _short(prompt_tokens), parts[1])


def why_placed(place: str, hit_tokens: int, prompt_tokens: int, reason: str) -> str:
    """X-Cache-Proxy-Reason of an answer: why D, what of the prompt it has, why P or none."""
    lines = route_lines("", "", place, reason, hit_tokens, prompt_tokens)
    return lines.decode().splitlines()[-1].partition(": ")[2]


def _short(tokens: int) -> bytes:
    return b"%d" % tokens if tokens < 1000 else b"%dk" % ((tokens + 500) // 1000)


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip() for token in value.lower().split(b",")}
