"""Which headers pass, in both directions, and how a request's head is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.net.upstream.response import Head
from proxy.protocol.errors import LoopError
from proxy.protocol.headers import (
    ACTS_BEYOND,
    answer_lines,
    credentials,
    forwarded,
    keyed,
    page_lines,
    request_head,
    route_lines,
    why_placed,
    with_request_id,
)

ALWAYS = forwarded([], "r-1").removeprefix(b"X-Request-Id: r-1\r\n")
OURS = b"X-Request-Id: r-1\r\n" + ALWAYS


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        (b"Authorization", True),
        (b"X-Session-ID", True),
        (b"Host", False),
        (b"HOST", False),
        (b"Content-Length", False),
        (b"Content_Length", False),
        (b"Transfer-Encoding", False),
        (b"TE", False),
        (b"Upgrade", False),
        (b"Keep-Alive", False),
        (b"Proxy-Authorization", False),
        (b"Accept-Encoding", False),
        (b"X-Request-Id", False),
        (b"X-Prefiller-Host-Port", False),
        (b"X-Data-Parallel-Rank", False),
    ],
)
def test_what_of_a_client_goes_on(name: bytes, goes: bool) -> None:
    for _ in range(2):  # decided, and then remembered
        lines = forwarded([(name, b"v"), (b"A", b"b")], "r-1")
        assert lines == OURS + (name + b": v\r\n" if goes else b"") + b"A: b\r\n"


def test_via_names_this_process_behind_the_others_and_a_loop_is_refused() -> None:
    assert ALWAYS.startswith(b"Accept-Encoding: identity\r\nVia: 1.1 cache-proxy-")
    own = ALWAYS.split()[-1]
    others = [(b"Via", b"1.1 nginx"), (b"A", b"b"), (b"via", b"1.1 cache-proxy-00000000")]
    via = [line for line in forwarded(others, "r-1").split(b"\r\n") if line.startswith(b"Via")]
    assert via == [b"Via: 1.1 " + name for name in (b"nginx", b"cache-proxy-00000000", own)]
    for value in (own, b"1.1 nginx, 1.1 " + own + b" (comment)"):
        with pytest.raises(LoopError):
            forwarded([*others, (b"VIA", value)], "r-1")


def test_what_connection_names_stays_here() -> None:
    fields = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"X-Other", b"2")]
    assert forwarded(fields, "r-1") == OURS + b"X-Other: 2\r\n"


@pytest.mark.parametrize("name", [b"Authorization", b"Content-Type", b"Cookie"])
def test_what_an_instance_needs_cannot_be_named_away(name: bytes) -> None:
    fields = [(b"Connection", name), (name, b"v")]
    assert forwarded(fields, "r-1") == OURS + name + b": v\r\n"


def test_hidden_lines() -> None:
    fields = [(b"Authorization", b"Bearer mine"), (b"A", b"b")]
    assert forwarded(fields, "r-1", frozenset({b"authorization"})) == OURS + b"A: b\r\n"


def test_the_proxys_key_is_in_place_of_any_other() -> None:
    lines = b"AUTHORIZATION: Bearer mine\r\nA: x-api-key: b\r\nx-api-key: mine\r\nB: c\r\n"
    auth = b"Authorization: Bearer k\r\n"
    assert keyed(lines, auth) == b"A: x-api-key: b\r\nB: c\r\n" + auth
    assert keyed(lines, b"") == lines
    assert credentials(lines) == b"AUTHORIZATION: Bearer mine\r\nx-api-key: mine\r\n"


def test_a_leg_has_an_id_of_its_own() -> None:
    assert with_request_id(OURS + b"A: b\r\n", "r-1-p") == (
        b"X-Request-Id: r-1-p\r\n" + ALWAYS + b"A: b\r\n"
    )


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [
        ("POST", b"{}", b"Content-Length: 2\r\n"),
        ("POST", None, b"Content-Length: 0\r\n"),
        ("DELETE", None, b"Content-Length: 0\r\n"),
        ("GET", None, b""),
        ("HEAD", None, b""),
    ],
)
def test_a_head(method: str, body: bytes | None, length: bytes) -> None:
    head = request_head(method, "/v1/x", b"h:1", b"A: b\r\n", body)
    assert head == b"%b /v1/x HTTP/1.1\r\nHost: h:1\r\nA: b\r\n%b\r\n" % (method.encode(), length)


def test_what_of_an_instance_a_client_sees() -> None:
    fields = [
        (b"content-type", b"text/event-stream"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"3"),
        (b"connection", b"keep-alive, x-hop"),
        (b"x-hop", b"1"),
        (b"x-cache-proxy-route", b"a lie"),
        (b"server", b"uvicorn"),
    ]
    assert b"".join(answer_lines(fields)) == (
        b"content-type: text/event-stream\r\nserver: uvicorn\r\n"
    )


@pytest.mark.parametrize(
    ("place", "hit", "prompt", "said"),
    [
        ("home", 41_200, 43_499, "home 41k of 43k cached; d_idle"),
        ("prefix", 999, 1000, "prefix 999 of 1k cached; d_idle"),
        ("load", 0, 12, "load 0 of 12 cached; d_idle"),
        ("holder", 0, 0, "holder; d_idle"),
    ],
)
def test_why_it_ran_there(place: str, hit: int, prompt: int, said: str) -> None:
    assert why_placed(place, hit, prompt, "d_idle") == said


def test_where_it_ran() -> None:
    assert route_lines("i0", "WARM", "home", "d_idle", 41_000, 43_000) == (
        b"X-Cache-Proxy-Instance: i0\r\nX-Cache-Proxy-Route: WARM\r\n"
        b"X-Cache-Proxy-Reason: home 41k of 43k cached; d_idle\r\n"
    )


BEYOND = [name for names in ACTS_BEYOND.values() for name in names]


def test_nothing_of_an_instance_acts_on_the_proxys_own_origin() -> None:
    """What clients of such APIs read comes as it is."""
    wanted = [
        (name, b"x")
        for name in (
            *(b"server", b"date", b"retry-after", b"location", b"allow", b"cache-control"),
            *(b"content-disposition", b"content-language", b"content-encoding", b"vary", b"etag"),
            *(
                b"openai-organization",
                b"openai-processing-ms",
                b"openai-version",
                b"x-accel-buffering",
            ),
            *(b"x-ratelimit-remaining-requests", b"anthropic-ratelimit-tokens-reset", b"x-mine"),
            *(b"deprecation", b"server-timing", b"traceparent", b"content-security-policy"),
        )
    ]
    others = [(name, b"x") for name in (*BEYOND, b"x-cache-proxy-session", b"x-cache-proxy-x")]
    mixed = [field for pair in zip(wanted, others, strict=False) for field in pair]
    mixed += [*wanted[len(others) :], *others[len(wanted) :]]
    assert b"".join(answer_lines(mixed)) == b"".join(b"%b: %b\r\n" % field for field in wanted)


@pytest.mark.parametrize(
    ("kinds", "is_bare"),
    [
        ([b"application/json"], True),
        ([b"application/json; charset=utf-8"], True),
        ([b"text/event-stream; charset=utf-8"], True),
        ([b"Text/Event-Stream"], True),
        ([b"text/html"], False),
        ([b"text/HTML; charset=x"], False),
        ([b"image/svg+xml"], False),
        ([b"application/xhtml+xml"], False),
        ([b"text/xml"], False),
        ([b"text/plain"], False),
        ([b"audio/mpeg"], False),
        ([b"application/json, text/html"], False),
        ([b"application/json;x=y, text/html"], False),
        ([b"application/json", b"text/html"], False),
        ([b"application/jsonhtml"], False),
        ([b"application/json\ttext/html"], False),
        ([b""], False),
        ([], False),
    ],
)
def test_what_may_be_a_page_runs_nothing(kinds: list[bytes], is_bare: bool) -> None:
    """In the proxy's name. The first `nosniff` is the one that counts, whatever the engine says."""
    own = [(b"x-content-type-options", b"no"), *((b"content-type", kind) for kind in kinds)]
    head = Head(b"HTTP/1.1 200 OK\r\n\r\n", 200, own)
    guard = b"X-Content-Type-Options: nosniff\r\nContent-Security-Policy: sandbox\r\n"
    lines = head.after_version.partition(b"\r\n")[2]
    assert lines == (b"" if is_bare else guard) + b"".join(answer_lines(own))
    assert page_lines(own) == (b"" if is_bare else guard)


def test_the_page_names_each_header_that_is_removed() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text("utf-8").lower()
    assert [name for name in BEYOND if f"`{name.decode()}`" not in page] == []
