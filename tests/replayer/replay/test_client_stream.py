"""The scanner says the same however the bytes are cut, and counts no role event as a token."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.client import StreamScanner
from tests.support.sse_server import event, sse

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
ANSWER = b"".join(
    [
        event({"delta": {"role": "assistant", "content": ""}}),
        b": a comment\n\n",
        event({"delta": {"content": "one "}}),
        event({"delta": {"content": 'two "data: [DONE]" é'}}),
        event({"delta": {}, "finish_reason": "length"}),
        sse({"choices": [], "usage": USAGE}),
        b"data: [DONE]\r\n\r\n",
    ]
)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=20))
def test_any_cutting_of_the_bytes_gives_the_same_answer(places):
    bounds = sorted({0, *places, len(ANSWER)})
    scanner = StreamScanner()
    for start, end in pairwise(bounds):
        scanner.feed(ANSWER[start:end], float(end))
    assert scanner.text.decode() == 'one two "data: [DONE]" é'
    assert (scanner.prompt_tokens, scanner.completion_tokens, scanner.cached_tokens) == (9, 4, 3)
    assert scanner.done
    assert (scanner.finish_reason, scanner.error) == ("length", None)
    assert len(scanner.gaps_s) == 1


def test_times_are_those_of_events_with_content():
    scanner = StreamScanner()
    scanner.feed(event({"delta": {"role": "assistant", "content": ""}}), 1.0)
    before = scanner.first_token_s
    for now_s in (2.0, 2.5, 4.0):
        scanner.feed(event({"delta": {"content": "x"}}), now_s)
    assert (before, scanner.first_token_s, scanner.last_token_s) == (None, 2.0, 4.0)
    assert list(scanner.gaps_s) == [0.5, 1.5]


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "a"}},
        {"delta": {"reasoning_content": "a"}},
        {"delta": {"reasoning": "a"}},
        {"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}},
        {"text": "a"},
    ],
)
def test_content_reasoning_and_tool_calls_are_all_first_tokens(choice):
    scanner = StreamScanner()
    scanner.feed(event(choice), 1.0)
    assert scanner.first_token_s == 1.0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'data: {"error":{"message":"engine died","type":"x"}}\n\n', "engine died"),
        (b'data: {"error":"engine died"}\n\n', "engine died"),
        (b"data: {half\n\n", "event is not JSON: b'{half'"),
        (b"data: [1]\n\n", "event is not an object: b'[1]'"),
    ],
)
def test_an_error_inside_the_stream_is_kept(data, said):
    scanner = StreamScanner()
    scanner.feed(data, 1.0)
    assert scanner.error == said


def test_usage_null_is_not_usage():
    scanner = StreamScanner()
    scanner.feed(b"data: " + orjson.dumps({"choices": [], "usage": None}) + b"\n\n", 1.0)
    assert scanner.completion_tokens is None
