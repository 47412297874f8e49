"""Long events: what one of them costs is bounded, and what is found is the same in any reads.

Calls are counted, not time. A search in C is one call however long it takes; for those the tests
say where they look: at both ends of a long event, and not at its middle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.types import Unmoved
from proxy.protocol.streams.legs import FirstLeg, LaterLeg
from proxy.protocol.streams.movable import Plan
from proxy.protocol.streams.sse import (
    CARRY_BYTES,
    LONG_BYTES,
    Scanner,
    carries_content,
    end_of_stream,
    ends_of,
    events_end,
    names_the_end,
    object_of,
    usage_member,
)
from proxy.protocol.streams.trail import Resumption, Trail, TrailMemory
from tests.support.examples import examples
from tests.support.work import calls_of

MEBIBYTE = 1 << 20
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'
TOKEN = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},'
    b'"finish_reason":null,"token_ids":[5]}],"prompt_token_ids":[1,2]}\n\n'
)
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
UNITS = [
    b'"usage" ',
    b'{"usage":1},',
    b'"usage":null,',
    b'\\"usage"',
    b'"usage":{',
    b'"content"',
    b'"',
    b'\\"',
    b"\n:",
    b"event:\n",
    b"event: error\n",
    b"\ndata:",
    b'"finish_reason":"abor',
    b'"token_ids":[1],',
    b"{",
    b" ",
]


def trail(stop_chars: int = 0) -> Trail:
    plan = Plan(b"", None, 0, stop_chars, is_chat=True, shows_ids=False)
    return Trail(plan, TrailMemory(), None)


def first_leg() -> FirstLeg:
    leg = FirstLeg(trail())
    leg.edit(TOKEN)
    return leg


def later_leg() -> LaterLeg:
    it = first_leg().trail
    at = it.resumption()
    assert isinstance(at, Resumption)
    it.resume(at)
    return LaterLeg(it)


def long_event(unit: bytes, begin: bytes = b"", end: bytes = b"", size: int = MEBIBYTE) -> bytes:
    """One event, of these bytes over and over between others."""
    return b'data: {"a":' + begin + unit * (size // len(unit)) + end + b"}\n\n"


def seen_before() -> Scanner:
    scanner = Scanner()
    scanner.feed(TEXT)
    return scanner


@pytest.mark.long
@pytest.mark.parametrize("unit", UNITS, ids=repr)
@pytest.mark.parametrize(
    "made",
    [
        lambda: seen_before().feed,
        lambda: Scanner().feed,
        lambda: first_leg().edit,
        lambda: later_leg().edit,
        lambda: usage_member,
        lambda: carries_content,
        lambda: end_of_stream,
        lambda: names_the_end,
    ],
    ids=["scanner", "first", "leg", "later", "usage", "content", "end", "name"],
)
def test_one_event_is_few_calls_whatever_is_in_it(
    made: Callable[[], Callable[[bytes], object]], unit: bytes
) -> None:
    """Its own end comes with the next event, as in one read."""
    assert calls_of(partial(made(), long_event(unit))) <= 400
    assert calls_of(partial(made(), long_event(unit, size=LONG_BYTES) + TEXT)) <= 400


@pytest.mark.parametrize("unit", [*UNITS, b"\n", b"\r\n", b":\n", b"data: [DONE]\n", b"event: a\n"])
def test_the_usage_of_an_answer_is_few_calls(unit: bytes) -> None:
    """Also where it comes in one piece, and whatever stands behind its end."""
    body = orjson.dumps({"usage": USAGE, "tools": "x"})
    assert calls_of(partial(usage_member, body[:-1] + b',"a":' + unit * 30_000 + b"}")) <= 3000
    assert calls_of(partial(usage_member, body + unit * 30_000)) <= 3000


def test_blank_lines_hide_no_usage() -> None:
    assert usage_member(orjson.dumps({"usage": USAGE}) + b"\n" * 50_000) is not None


def text_is_seen(event: bytes) -> bool:
    scanner = Scanner()
    scanner.feed(event)
    return scanner.has_content


def is_lost(event: bytes) -> bool:
    leg = first_leg()
    leg.edit(event)
    return bool(leg.lost)


def has_failed(event: bytes) -> bool:
    scanner = seen_before()
    scanner.feed(event)
    return scanner.error() is not None


MARKS: list[tuple[bytes, Callable[[bytes], object]]] = [
    (b'"content":"x",', text_is_seen),
    (b'"delta": "x",', text_is_seen),
    (b'"tool_calls":[{', lambda event: carries_content(ends_of(event))),
    (b"\ndata: [DONE]\n", lambda event: end_of_stream(event) > 0),
    (b"\nevent: response.completed\n", names_the_end),
    (b'\ndata: {"error":{"code":500}}\n', has_failed),
    (b'"finish_reason":"abort",', is_lost),
    (b'"finish_reason":"error",', is_lost),
]


@pytest.mark.parametrize(("mark", "sees"), MARKS)
def test_the_middle_is_not_looked_at(mark: bytes, sees: Callable[[bytes], object]) -> None:
    fill = b"x" * (3 * CARRY_BYTES)
    assert not sees(b'data: {"a":"' + fill + mark + fill + b'"}\n\n')
    assert sees(b'data: {"a":"' + fill + fill + mark + b"\n\n")
    assert sees(b'data: {"a":"' + fill + fill + mark + b"\n\n" + b": more\n\n" * 500)
    if b"DONE" not in mark:  # which a blank line follows
        assert sees(b'data: {"a":"' + mark + fill + fill + b'"}\n\n')
        half = b"x" * CARRY_BYTES
        assert sees(b'data: {"a":"' + half + mark + half + b'"}\n\n')


def bodies(stream: bytes, size: int) -> list[bytes]:
    """Whole events as a relay hands them on that reads so many bytes at once."""
    held, got = b"", []
    for at in range(0, len(stream), size):
        held += stream[at : at + size]
        end = events_end(held, max(0, len(held) - size - 2))
        if end:
            got.append(held[:end])
            held = held[end:]
    return [*got, held] if held else got


def found(stream: bytes, size: int) -> tuple[object, ...]:
    scanner, ends, named = Scanner(), 0, False
    for body in bodies(stream, size):
        scanner.feed(body)
        ends += end_of_stream(body) > 0
        named |= names_the_end(body)
    usage = object_of(scanner.usage() or b"").get("usage")
    said = scanner.events, scanner.size, scanner.has_content, scanner.is_done, usage
    return *said, scanner.error() is None, ends, named


FILL = [b"x" * n for n in (10, LONG_BYTES - 40, LONG_BYTES, LONG_BYTES + 40, 5 * CARRY_BYTES)]
parts = st.sampled_from(
    [
        TEXT,
        b": c\n\n",
        b"data: {}\n\n",
        *[b'data: {"a":"%b"}\n\n' % fill for fill in FILL],
        *[b'data: {"a":"%b","content":"x"}\n\n' % fill for fill in FILL],
        *[b'event: response.completed\r\ndata: {"a":"%b"}\r\n\r\n' % fill for fill in FILL],
        *[b'data: {"a":"%b","usage":{"prompt_tokens":3}}\n\n' % fill for fill in FILL],
        DONE,
    ]
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(parts, min_size=1, max_size=5).map(b"".join))
def test_reads_of_any_size_find_the_same(stream: bytes) -> None:
    assert found(stream, 1 << 16) == found(stream, 30_011) == found(stream, 4099)


@given(st.integers(0, 400_000), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_no_event_is_lost_to_the_count(size: int, end: bytes) -> None:
    scanner = Scanner()
    scanner.feed(b"data: " + b"x" * size + end + b"data: {}\n\n" * 3)
    assert scanner.events == 3 + (end == b"\n\n")
    assert scanner.size == size + 6 + len(end) + 30


def test_ids_of_a_prompt_hide_no_usage() -> None:
    ids = list(range(1_000_000))
    event = b"data: %b\n\n" % orjson.dumps({"usage": USAGE, "prompt_token_ids": ids})
    for data in ([event], [event[at : at + 65536] for at in range(0, len(event), 65536)]):
        scanner = Scanner()
        for piece in data:
            scanner.feed(piece)
        assert orjson.loads(scanner.usage() or b"{}")["usage"] == USAGE
    assert orjson.loads(usage_member(event[6:]) or b"{}")["usage"] == USAGE


@pytest.mark.parametrize("inner", [b"]" * 9, b"1]}," * 9, b'"' * 9, b"{" * 9, b"1,2,3"])
def test_no_usage_is_made_up_by_what_is_left_out(inner: bytes) -> None:
    """Without its middle a list that a client wrote could look as if it had ended before."""
    lie = b'{"usage":{"prompt_tokens":64},"x":[[' + b"1," * (2 * CARRY_BYTES)
    fill = inner + b"2," * (2 * CARRY_BYTES) + b"3"
    for closing in (b"]]}", b"]}", b"}", b"]]}]}", b"]]]}"):
        event = b'data: {"tools":[' + lie + fill + closing + b"}\n\n"
        scanner = Scanner()
        scanner.feed(event)
        told = scanner.usage()
        try:
            whole: Any = orjson.loads(event[6:])
        except orjson.JSONDecodeError:
            continue
        assert told is None or "usage" not in orjson.loads(told) or "usage" in whole


def test_a_long_prompts_ids_are_kept_and_left_out() -> None:
    ids = b",".join([b"%d" % n for n in range(300_000)])
    event = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
        b'"finish_reason":null,"token_ids":[]}],"prompt_token_ids":[%b]}\n\n'
    )
    leg = FirstLeg(trail())
    got = leg.edit(event % ids)
    assert got == (event % b"").replace(b"[]", b"null")
    assert leg.trail.prompt == ids
    assert leg.trail.why is None


def test_a_later_legs_long_prompt_is_not_parsed() -> None:
    ids = b",".join([b"%d" % n for n in range(300_000)])
    event = (
        b'data: {"id":"d","choices":[{"index":0,"text":"b","finish_reason":null,'
        b'"prompt_token_ids":[%b],"token_ids":[6]}]}\n\n'
    )
    leg = later_leg()
    (written,) = leg.edit(event % ids).split(b"\n\n")[:-1]
    assert orjson.loads(written[6:])["choices"][0]["delta"] == {"content": "b"}
    assert leg.edit(long_event(b"x", b'"', b'"', 3 * MEBIBYTE)) == b""
    assert leg.lost == "error"


def test_a_long_event_whose_text_would_be_wanted_is_not_followed() -> None:
    """Its stream has stop strings; only its prompt's ids are left out before it is parsed."""
    leg = FirstLeg(trail(stop_chars=3))
    ids = b"1," * 200_000 + b"1"
    leg.edit(TOKEN.replace(b"[1,2]", b"[%b]" % ids))
    assert (leg.trail.why, leg.trail.said) == (None, "a")
    leg.edit(TOKEN.replace(b'"a"', b'"%b"' % (b"a" * LONG_BYTES)))
    assert leg.trail.why is Unmoved.NO_IDS
