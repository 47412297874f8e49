"""Heartbeats: harmless to clients that dispatch at blank lines, and to those that split there."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.endpoints import Dialect
from proxy.protocol.streams.heartbeat import heartbeat
from proxy.protocol.streams.sse import Scanner

KNOWN = [dialect for dialect in Dialect if dialect is not Dialect.OPENAI]
json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "model", "created", "x"]), inner, max_size=3)
    ),
    max_leaves=9,
)


def data_of(beat: bytes) -> Any:
    (line,) = [line for line in beat.split(b"\n") if line.startswith(b"data: ")]
    return orjson.loads(line[6:])


@given(st.sampled_from(KNOWN), json.map(orjson.dumps) | st.binary(max_size=40), st.integers(0, 99))
def test_each_is_one_event_with_data_behind_any_first_event(
    dialect: Dialect, first: bytes, events: int
) -> None:
    beat = heartbeat(dialect, first, events)
    assert beat.endswith(b"\n\n")
    assert beat.count(b"\n\n") == 1
    assert isinstance(data_of(beat), dict)


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS])
def test_a_chunk_is_one_of_its_stream_and_says_nothing(dialect: Dialect) -> None:
    shared = {"id": "c1", "object": "o", "created": 7, "model": "m"}
    first = orjson.dumps(shared | {"choices": [{"delta": {"role": "assistant"}}], "usage": None})
    chunk = data_of(heartbeat(dialect, first, 3))
    (choice,) = chunk.pop("choices")
    assert chunk == shared
    nothing: dict[str, Any] = {"delta": {}} if dialect is Dialect.CHAT else {"text": ""}
    assert choice == nothing | {"index": 0, "logprobs": None, "finish_reason": None}


@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.COMPLETIONS, Dialect.OPENAI])
@pytest.mark.parametrize("name", ["id", "object", "created", "model", "choices", "x"])
@pytest.mark.parametrize(
    "value",
    [
        b"[" * 300 + b"]" * 300,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"18446744073709551616",
        b"-9223372036854775809",
        b"1e400",
        b"null",
        b'"x"',
    ],
)
def test_no_member_of_an_engine_stops_it(dialect: Dialect, name: str, value: bytes) -> None:
    first = b'{"choices":[],"%b":%b}' % (name.encode(), value)
    beat = heartbeat(dialect, first, 0)
    if beat != b": keepalive\n\n":
        chunk = data_of(beat)
        assert not any(isinstance(chunk[one], list | dict) for one in ("id", "created", "model"))


@pytest.mark.parametrize("dialect", Dialect)
def test_its_scanner_takes_it_for_no_content_and_no_end(dialect: Dialect) -> None:
    scanner = Scanner()
    scanner.feed(heartbeat(dialect, b"", 0))
    assert not scanner.has_content
    assert not scanner.is_done
    assert scanner.error() is None
    assert scanner.usage() is None


def test_the_dialects_own_events_are_used_where_they_have_one() -> None:
    assert heartbeat(Dialect.MESSAGES, b"", 4) == b'event: ping\ndata: {"type":"ping"}\n\n'
    told = data_of(heartbeat(Dialect.RESPONSES, b"", 4))
    assert told == {"type": "keepalive", "sequence_number": 4}


def test_a_stream_of_an_unknown_kind_gets_a_chunk_where_it_has_chunks() -> None:
    first = {"id": "t", "object": "transcription.chunk", "choices": [{"delta": {"content": "x"}}]}
    chunk = data_of(heartbeat(Dialect.OPENAI, orjson.dumps(first), 0))
    assert (chunk["object"], chunk["choices"][0]["delta"]) == ("transcription.chunk", {})
    assert heartbeat(Dialect.OPENAI, b'{"type":"speech.audio.delta"}', 4) == b": keepalive\n\n"
