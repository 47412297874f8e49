"""Documents of peers: refused before they are parsed, where that would take long."""

from __future__ import annotations

import threading

import orjson
import pytest

from proxy.net.peer_documents import (
    LINE_BYTES,
    LOOP_BYTES,
    MOST_LINES,
    MOST_WANTED,
    WANTED_BYTES,
    TooMuchError,
    parsed,
    read_json,
    wanted_lines,
)

MIB = 1 << 20
COSTLY = {
    "empty objects": b"[" + b"{}," * 300_000 + b"1]",
    "empty arrays": b"[" + b"[]," * 300_000 + b"1]",
    "objects": b"[" + b'{"a":1},' * 120_000 + b"1]",
    "names": b"{" + b",".join(b'"k%d":1' % n for n in range(80_000)) + b"}",
    "numbers": b"[" + b"1," * 500_000 + b"1]",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_what_is_costly_is_not_parsed(kind: str) -> None:
    assert orjson.loads(COSTLY[kind])
    with pytest.raises(TooMuchError):
        read_json(COSTLY[kind])


@pytest.mark.parametrize(
    "value",
    [
        {"data": [{"id": f"m{n}", "object": "model", "permission": [{}]} for n in range(1000)]},
        {"tokens": list(range(150_000))},
        {"text": "a" * MIB},
    ],
)
def test_what_honest_engines_send_is_read(value: object) -> None:
    assert read_json(orjson.dumps(value)) == value


def test_of_lines_only_those_that_are_wanted_and_short_are_kept() -> None:
    long = b"a{" + b"x" * LINE_BYTES + b"} 1"
    assert wanted_lines(b"a 1\nb 2\n%b\nab 3\na 4" % long, (b"a",)) == [b"a 1", b"ab 3"]
    assert len(wanted_lines(b"a 1\n" * 10_000, (b"a",))) == MOST_WANTED
    assert wanted_lines(b"a 1\n" + b"\n" * MOST_LINES, (b"a",)) == []
    wide = b"a" * LINE_BYTES + b"\n"
    assert len(wanted_lines(wide * 1000, (b"a",))) == WANTED_BYTES // LINE_BYTES


async def test_a_long_exposition_is_parsed_in_a_thread() -> None:
    def where(raw: bytes) -> tuple[int, int]:
        return len(raw), threading.get_ident()

    here = threading.get_ident()
    assert await parsed(where, b"x" * LOOP_BYTES) == (LOOP_BYTES, here)
    size, there = await parsed(where, b"x" * (LOOP_BYTES + 1))
    assert (size, there == here) == (LOOP_BYTES + 1, False)
