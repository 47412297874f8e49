"""What the scanner says of an answer, and that it says so however the bytes were cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocol.framing import wrap
from proxy.protocol.streams.sse import (
    MOST_USAGES,
    TAIL_BYTES,
    FirstEvent,
    Scanner,
    carries_content,
    first_event,
    is_error_event,
    usage_member,
)
from tests.support.examples import examples

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


def event(**body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(id="c", choices=[{"index": 0, "delta": fields}])


ROLE = delta(role="assistant", content="")
TEXT = delta(content="word")
USAGE_CHUNK = event(choices=[], usage=USAGE)
KEEP_ALIVE = b": keep-alive\n\n"
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def usage_of(answer: bytes | None) -> Any:
    """The member `usage` of what a scanner found; None where that is no JSON."""
    try:
        return orjson.loads(answer or b"{}").get("usage")
    except orjson.JSONDecodeError:
        return None


def orjson_object(data: bytes | None) -> dict[str, Any]:
    """A JSON object; empty where the bytes are none."""
    try:
        told = orjson.loads(data or b"")
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def scanned(stream: bytes, cuts: list[int] | None = None) -> Scanner:
    scanner, start = Scanner(), 0
    for cut in [*sorted(cuts or ()), len(stream)]:
        scanner.feed(stream[start:cut])
        start = cut
    return scanner


def said(scanner: Scanner) -> tuple[object, ...]:
    usage = usage_of(scanner.usage())
    return scanner.events, scanner.size, scanner.has_content, scanner.is_done, usage


LIE = {"prompt_tokens": 64, "completion_tokens": 1}
planted = st.recursive(
    st.sampled_from(["usage", '"usage":{"prompt_tokens":64}', 'data: {"usage":{}}\n\n', 1, LIE]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["usage", '"usage', "a", "tools"]), inner, max_size=3)
    ),
    max_leaves=12,
)
"""Values that a client may have echoed, but for one: a member `usage` of the answer itself."""
pieces = st.sampled_from(
    [
        ROLE,
        TEXT,
        USAGE_CHUNK,
        KEEP_ALIVE,
        DONE,
        delta(content="\n\ndata: [DONE]\n\n"),
        delta(content='{"usage":{"prompt_tokens":1}}'),
        delta(content="long " * 2000),
        event(choices=[], usage={"prompt_tokens": 1, "a": {"b": {"c": 1}}}),
        b"event: message_stop\ndata: {}\n\n",
        b"\n",
        b"\n\n\n",
        b"data: {\n",
    ]
)


class TestAnyCut:
    @settings(max_examples=examples(150))
    @given(st.lists(pieces, max_size=12).map(b"".join), st.data())
    def test_the_same_bytes_say_the_same(self, stream: bytes, data: st.DataObject) -> None:
        cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=20))
        assert said(scanned(stream, cuts)) == said(scanned(stream))

    @settings(max_examples=20)
    @given(st.lists(pieces, max_size=5).map(b"".join))
    def test_byte_by_byte(self, stream: bytes) -> None:
        assert said(scanned(stream, list(range(len(stream))))) == said(scanned(stream))

    @settings(max_examples=20)
    @given(st.lists(pieces, max_size=5).map(b"".join))
    def test_asking_in_between_changes_nothing(self, stream: bytes) -> None:
        asked = Scanner()
        for start in range(0, len(stream), 100):
            asked.feed(stream[start : start + 100])
            said(asked)
        assert said(asked) == said(scanned(stream))

    def test_one_empty_piece_is_nothing(self) -> None:
        scanner = Scanner()
        scanner.feed(b"")
        assert said(scanner) == (0, 0, False, False, None)


class TestContent:
    @pytest.mark.parametrize(
        ("expected", "stream"),
        [
            (False, ROLE),
            (False, KEEP_ALIVE),
            (False, DONE),
            (False, USAGE_CHUNK),
            (False, delta(content=None, tool_calls=[], reasoning="", refusal=None)),
            (False, event(choices=[{"text": ""}])),
            (False, event(type="content_block_start", content_block={"type": "text", "text": ""})),
            (True, TEXT),
            (True, ROLE + TEXT),
            (True, delta(content="\n")),
            (True, delta(content='"')),
            (True, delta(reasoning_content="hm")),
            (True, delta(reasoning="hm")),
            (True, delta(refusal="no")),
            (True, delta(tool_calls=[{"index": 0, "function": {"name": "f"}}])),
            (True, event(choices=[{"text": "word"}])),
            (True, event(type="content_block_delta", delta={"type": "text_delta", "text": "w"})),
            (True, event(type="content_block_delta", delta={"thinking": "hm"})),
            (True, event(type="content_block_delta", delta={"partial_json": '{"a"'})),
            (True, event(type="response.output_text.delta", delta="w")),
            (True, b'data: {"choices": [{"delta": {"content" : "spaced"}}]}\n\n'),
        ],
        ids=repr,
    )
    def test_what_is_content(self, expected: bool, stream: bytes) -> None:
        assert scanned(stream).has_content is expected

    def test_it_is_seen_with_the_piece_that_completes_it(self) -> None:
        at = TEXT.index(b"word")
        scanner = Scanner()
        for byte in range(at):
            scanner.feed(TEXT[byte : byte + 1])
        assert not scanner.has_content
        scanner.feed(TEXT[at : at + 1])
        assert scanner.has_content

    def test_a_long_first_chunk_does_not_hide_it(self) -> None:
        ids = event(prompt_token_ids=list(range(50_000)), choices=[])
        stream = ids + TEXT
        assert scanned(stream, list(range(0, len(stream), 1000))).has_content


class TestEvents:
    @pytest.mark.parametrize(
        ("events", "stream"),
        [
            (0, b""),
            (0, TEXT[:-1]),
            (1, TEXT),
            (4, ROLE + TEXT + USAGE_CHUNK + DONE),
            (1, b"event: message_stop\ndata: {}\n\n"),
            (1, delta(content="\n\n\n\n")),
            (2, b"\n\n\n\n"),
            (1, b"\n\n\n"),
        ],
    )
    def test_are_counted_by_their_ends(self, events: int, stream: bytes) -> None:
        assert scanned(stream).events == events


class TestEnd:
    @pytest.mark.parametrize(
        ("expected", "stream"),
        [
            (False, TEXT),
            (False, delta(content="data: [DONE]")),
            (False, delta(content="\ndata: [DONE]\n\n")),
            (False, delta(content="\nevent: message_stop")),
            (False, b"data: [DON"),
            (True, DONE),
            (True, TEXT + DONE),
            (True, TEXT + b"data:[DONE]\n\n"),
            (True, TEXT + DONE[:-2]),
            (True, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
            (True, b"event: response.completed\ndata: {}\n\n"),
            (True, b"event: response.incomplete\ndata: {}\n\n"),
            (True, b"event: response.failed\ndata: {}\n\n"),
            (True, b"event: response.cancelled\ndata: {}\n\n"),
            (False, b"event: response.created\ndata: {}\n\n"),
            (True, b"event: response.completed\ndata: " + b"x" * 100_000 + b"\n\n"),
        ],
        ids=lambda value: repr(value)[:60],
    )
    def test_markers_count_where_a_line_begins(self, expected: bool, stream: bytes) -> None:
        assert scanned(stream).is_done is expected

    @pytest.mark.parametrize("cut", range(len(DONE)))
    def test_split_at_every_place(self, cut: int) -> None:
        assert scanned(TEXT + DONE, [len(TEXT) + cut]).is_done

    def test_a_marker_in_text_is_none_wherever_the_window_begins(self) -> None:
        """Also when the bytes in view happen to begin with it."""
        for fill in range(4 * TAIL_BYTES - 80, 4 * TAIL_BYTES + 80):
            text = b'data: {"content":"' + b"x" * fill
            scanner = Scanner()
            scanner.feed(text)
            scanner.feed(b"data: [DONE]" + b"y" * (TAIL_BYTES - 12))
            scanner.feed(b"z")
            assert not scanner.is_done


class TestUsage:
    @pytest.mark.parametrize(
        ("usage", "stream"),
        [
            (None, TEXT + DONE),
            (None, event(choices=[], usage=None)),
            (None, delta(content='{"usage":{"prompt_tokens":1}}')),
            (None, delta(content='\\"usage\\":{"prompt_tokens":1}')),
            (None, USAGE_CHUNK[:-8]),
            (None, USAGE_CHUNK + TEXT + DONE),
            (None, USAGE_CHUNK + event(usage=None) + DONE),
            (None, event(choices=[{"delta": {}, "usage": USAGE}]) + DONE),
            (None, event(choices=[{"delta": {"tool_calls": [{"usage": USAGE}]}}]) + DONE),
            (None, event(type="response.completed", response={"usage": USAGE})),
            (None, event(tools=[{"type": "function", "usage": USAGE}])),
            (None, event(**{'"usage': USAGE, "z": 1}) + DONE),
            (None, orjson.dumps({"tools": [{"x": {"usage": USAGE}}], "object": "response"})),
            (None, orjson.dumps({"choices": [], "tools": [{"usage": USAGE}]})),
            (None, orjson.dumps([{"usage": USAGE}])),
            (USAGE, TEXT + USAGE_CHUNK + DONE),
            (USAGE, TEXT + USAGE_CHUNK + KEEP_ALIVE + DONE),
            (USAGE, (TEXT + USAGE_CHUNK + DONE).replace(b"\n", b"\r\n")),
            (USAGE, TEXT + USAGE_CHUNK),
            (USAGE, event(type="message_delta", usage=USAGE) + STOP),
            (USAGE, event(type="message_delta", usage=USAGE) + PING + STOP + PING + DONE),
            (None, event(type="message_delta", usage=USAGE) + TEXT + STOP),
            (USAGE, event(usage={"prompt_tokens": 1}) + USAGE_CHUNK + DONE),
            (USAGE, event(tools=[{"usage": {}}], usage=USAGE) + DONE),
            (USAGE, event(usage=USAGE, logprobs=[{"token": "usage"}]) + DONE),
            (USAGE, event(usage=USAGE, prompt_token_ids=list(range(100_000))) + DONE),
            (USAGE, orjson.dumps({"usage": USAGE, "prompt_token_ids": list(range(100_000))})),
            (USAGE, orjson.dumps({"choices": [{"message": {"content": "x" * 10_000}}]})[:-1]
             + b',"usage":' + orjson.dumps(USAGE) + b"}"),
            (USAGE, orjson.dumps({"usage": USAGE}, option=orjson.OPT_INDENT_2)),
            ({"a": {"b": {"c": 1}}}, event(usage={"a": {"b": {"c": 1}}})),
        ],
        ids=lambda value: repr(value)[:60],
    )  # fmt: skip
    def test_is_the_last_events_own_member(
        self, usage: dict[str, Any] | None, stream: bytes
    ) -> None:
        assert usage_of(scanned(stream).usage()) == usage
        cuts = list(range(0, len(stream), 1000))
        assert usage_of(scanned(stream, cuts).usage()) == usage

    @settings(max_examples=examples(100))
    @given(planted, st.sampled_from(["tools", "metadata", "output", "x"]))
    def test_of_a_response_only_its_own_is_found(self, value: Any, key: str) -> None:
        """That of a Responses API's stream is a member of the last event's response."""
        opening = b'{"response":{'
        for fields in ({key: value}, {key: value, "usage": USAGE}, {"usage": USAGE, key: value}):
            stream = event(response=fields, type="response.completed") + DONE
            for beside in (stream, event(**{key: value}, response=fields) + DONE):
                found = orjson_object(scanned(beside).usage(opening)).get("response", {})
                assert found.get("usage") in (None, USAGE)
                assert "usage" in fields or "usage" not in found

    @pytest.mark.parametrize("before", [0, 10_000, 1_000_000])
    def test_long_events_before_it_do_not_hide_it(self, before: int) -> None:
        stream = delta(content="x" * before) + USAGE_CHUNK + DONE
        assert usage_of(scanned(stream, list(range(0, len(stream), 5000))).usage()) == USAGE

    def test_not_where_the_fast_path_has_passed_an_event_since(self) -> None:
        scanner = scanned(ROLE + TEXT + USAGE_CHUNK)
        assert any(scanner.takes(wrap(TEXT)) for _ in range(2))
        assert scanner.usage() is None
        scanner.feed(DONE)
        assert usage_of(scanner.usage()) is None
        assert scanner.is_done

    @settings(max_examples=examples(200))
    @given(planted, st.sampled_from(["tools", "metadata", "choices", "x"]), st.booleans())
    def test_none_that_a_client_wrote_is_found(self, value: Any, key: str, streams: bool) -> None:
        """Whatever is echoed below a member of the answer, before or behind the engine's own."""
        for fields in ({key: value}, {key: value, "usage": USAGE}, {"usage": USAGE, key: value}):
            answer = event(**fields) + DONE if streams else orjson.dumps(fields)
            assert usage_of(scanned(answer).usage()) in (None, USAGE)
            if "usage" not in fields:
                assert usage_of(scanned(answer).usage()) is None

    @pytest.mark.parametrize("cut", range(0, len(USAGE_CHUNK + DONE), 7))
    def test_none_is_lost_where_old_bytes_are_dropped(self, cut: int) -> None:
        """Whatever has arrived of it at that moment."""
        before = delta(content="x" * 5 * TAIL_BYTES)
        scanner = scanned(before + USAGE_CHUNK + DONE, [len(before) + cut])
        assert usage_of(scanner.usage()) == USAGE
        assert scanner.is_done

    def test_limit_an_object_longer_than_the_tail_may_be_missed_but_never_cut(self) -> None:
        usage = {"prompt_tokens": 1, "detail": "x" * 5 * TAIL_BYTES}
        found = scanned(event(usage=usage), list(range(0, 5 * TAIL_BYTES, 100))).usage()
        assert usage_of(found) in (None, usage)


ERROR = b'data: {"error":{"message":"gone","code":500}}\n\n'
NAMED = b'event: error\ndata: {"type":"error","error":{"type":"api_error"}}\n\n'


class TestErrors:
    @pytest.mark.parametrize(
        ("expected", "stream"),
        [
            (True, TEXT + ERROR),
            (True, TEXT + NAMED),
            (True, TEXT + NAMED.replace(b": ", b":", 2)),
            (True, TEXT + NAMED.replace(b"\n", b"\r\n")),
            (True, TEXT + NAMED.partition(b"\n")[2]),
            (True, TEXT + NAMED + DONE),
            (True, b'event: response.failed\ndata: {"type":"response.failed"}\n\n'
             .replace(b"{", b'{"response":{"error":null},', 1)),
            (False, TEXT + DONE),
            (False, TEXT + event(error=None, choices=[])),
            (False, TEXT + delta(content=NAMED.decode())),
            (False, TEXT + delta(content='{"type":"error"}')),
            (False, b"event: error_free\ndata: {}\n\n"),
            (False, event(type="content_block_delta", delta={"type": "error"})),
        ],
        ids=lambda value: repr(value)[:60],
    )  # fmt: skip
    def test_an_error_ends_a_stream(self, expected: bool, stream: bytes) -> None:
        scanner = scanned(stream)
        assert (scanner.error() is not None) is expected
        assert scanner.is_done is (expected or DONE in stream)

    @pytest.mark.parametrize("size", [10, 20_000, 300_000])
    def test_a_long_one_is_found_too(self, size: int) -> None:
        data = orjson.dumps({"response": {"tools": "x" * size, "error": {"code": "server_error"}}})
        found = scanned(TEXT + b"event: response.failed\ndata: " + data + b"\n\n").error()
        assert found
        assert data.startswith(found)


class TestFirstData:
    @pytest.mark.parametrize("before", [b"", KEEP_ALIVE, PING, PING + KEEP_ALIVE])
    def test_it_is_kept_whatever_follows(self, before: bytes) -> None:
        start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
        scanner = scanned(before + start + TEXT)
        scanner.feed(delta(content="x" * 50_000))
        assert scanner.first_data == b'{"type":"message_start"}'

    def test_a_long_one_is_not(self) -> None:
        assert scanned(event(prompt_token_ids=[1] * 5000) + TEXT).first_data == b""


class TestFirstEvent:
    @pytest.mark.parametrize(
        ("head", "expected"),
        [
            (b"", None),
            (TEXT[:-1], None),
            (KEEP_ALIVE, None),
            (KEEP_ALIVE + TEXT[:-1], None),
            (b"\n\n\n\n", None),
            (TEXT, TEXT[:-2]),
            (TEXT + ERROR, TEXT[:-2]),
            (KEEP_ALIVE * 3 + TEXT, TEXT[:-2]),
            (b": comment\n" + TEXT, TEXT[:-2]),
            (b"\n\n" + TEXT, TEXT[:-2]),
            (b"event: a\ndata: {}\n\n", b"event: a\ndata: {}"),
        ],
        ids=repr,
    )
    def test_comments_are_passed_over(self, head: bytes, expected: bytes | None) -> None:
        assert first_event(head) == expected

    @pytest.mark.parametrize(
        ("expected", "head"),
        [
            (True, ERROR),
            (True, KEEP_ALIVE + ERROR),
            (True, b": comment\n" + ERROR),
            (True, b'data:{ "error" : "text"}\n\n'),
            (True, b'event: error\ndata: {"type":"error","error":{}}\n\n'),
            (True, b"event: message\n" + ERROR),
            (False, ROLE),
            (False, delta(content='{"error":1}')),
            (False, event(id="c", error=None)),
            (False, b"event: error_free\ndata: {}\n\n"),
            (True, b'data: {"type": "error","code":"server_error"}\n\n'),
            (False, b'data: {"type":"error_free"}\n\n'),
            (False, DONE),
        ],
        ids=repr,
    )
    def test_an_error_is_told_from_a_chunk(self, expected: bool, head: bytes) -> None:
        found = first_event(head)
        assert found is not None
        assert is_error_event(found) is expected


PARTS = [b":", b": c", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b"data: x", b"event: e", b" "]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_the_first_event_is_the_same_however_it_is_cut(
    parts: list[bytes], data: st.DataObject
) -> None:
    """As read line by line from the whole."""
    head = b"".join(parts)
    *events, _ = head.replace(b"\r\n", b"\n").split(b"\n\n")
    lines = [[x for x in one.split(b"\n") if x and not x.startswith(b":")] for one in events]
    expected = next((b"\n".join(one) for one in lines if one), None)
    search, found, left = FirstEvent(), None, head
    while found is None and left:
        size = data.draw(st.integers(1, len(left)))
        piece, left = left[:size], left[size:]
        found = search.feed(piece)
    assert found == expected == first_event(head)


@pytest.mark.parametrize("comment", [b": c\n", b":\n\n", b": c\r\n", b":", b"\n"])
def test_nothing_of_comments_is_kept_until_the_first_event(comment: bytes) -> None:
    search = FirstEvent()
    for _ in range(100):
        assert search.feed(comment * 9) is None
        assert len(search._edge) + sum(map(len, search._begun)) <= 2 * len(comment)
    assert search.feed(b"\ndata: x\n\n") == b"data: x"


@given(
    st.lists(st.sampled_from(["content", "text", "reasoning", "role", "name"]), max_size=6),
    st.lists(st.sampled_from(["", "a", '"', "\\", "content", '"content":"']), min_size=6),
    st.sampled_from([b'":"', b'": "']),
)
def test_content_is_a_text_that_is_not_empty(
    names: list[str], texts: list[str], colon: bytes
) -> None:
    said = list(zip(names, texts, strict=False))
    joined = b",".join(orjson.dumps({name: text})[1:-1] for name, text in said)
    data = b"data: {" + joined.replace(b'":"', colon) + b"}\n\n"
    are_texts = ("content", "text", "reasoning")
    assert carries_content(data) == any(name in are_texts and text for name, text in said)


def test_a_text_that_has_only_begun_is_none_yet() -> None:
    assert not carries_content(TEXT[: TEXT.index(b"word")])
    assert carries_content(TEXT[: TEXT.index(b"ord")])


@pytest.mark.parametrize("behind", [1, 3, 4])
def test_a_usage_further_in_is_passed_over(behind: int) -> None:
    tools = [{"properties": {"usage": {"type": "object"}}}] * behind
    told = orjson.dumps({"id": "r", "usage": {"input_tokens": 5}, "tools": tools})
    found = usage_member(told)
    assert (found is not None) == (behind < MOST_USAGES)
    assert found is None or orjson.loads(found)["usage"] == {"input_tokens": 5}
    response = b'data: {"type":"response.completed","response":%b}\n\n' % told
    in_stream = scanned(TEXT + response).usage(b'{"response":{')
    assert (in_stream is not None) == (behind < MOST_USAGES)
