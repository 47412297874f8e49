"""The scanner says the same however the bytes are cut, and counts no role event as a token."""

from itertools import pairwise
from json import dumps as any_json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay import client as module
from replayer.replay.client import MOST_TOKENS, StreamScanner
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
        (b"data: [1]\n\n", "event is of another form: Expected `object`, got `array`"),
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


ODD_EVENTS = [
    {"choices": ["x"]},
    {"choices": 5},
    {"choices": {"text": "a"}},
    {"choices": [{"text": 5}]},
    {"choices": [{"delta": [1]}]},
    {"choices": [{"delta": {"content": 5}}]},
    {"choices": [{"delta": {"tool_calls": {"function": 1}}}]},
    {"choices": [{"text": "a", "finish_reason": {"a": [1]}}]},
    {"choices": [{"text": "a", "finish_reason": "x" * 1000}]},
    {"usage": [1]},
    {"usage": {"prompt_tokens": "9"}},
    {"usage": {"prompt_tokens": -1}},
    {"usage": {"completion_tokens": 1.5}},
    {"usage": {"completion_tokens": 1e308}},
    {"usage": {"completion_tokens": MOST_TOKENS + 1}},
    {"usage": {"completion_tokens": True}},
    {"usage": {"prompt_tokens_details": 7}},
    {"usage": {"prompt_tokens_details": {"cached_tokens": [3]}}},
]


@pytest.mark.parametrize("odd", ODD_EVENTS, ids=lambda one: orjson.dumps(one).decode()[:60])
def test_an_event_of_another_form_is_an_error_of_its_answer(odd):
    scanner = StreamScanner()
    scanner.feed(event({"text": "a"}) + sse(odd) + event({"text": "b"}), 1.0)
    assert str(scanner.error).startswith("event is of another form: ")
    assert "\n" not in str(scanner.error)
    assert scanner.text == b"ab"
    assert counts(scanner) == (None, None, None)


def counts(scanner):
    return scanner.prompt_tokens, scanner.completion_tokens, scanner.cached_tokens


NAMES = st.sampled_from(
    [
        *("choices", "usage", "error", "text", "delta", "finish_reason", "content", "tool_calls"),
        *("reasoning", "prompt_tokens", "completion_tokens", "prompt_tokens_details"),
        *("cached_tokens", "message", "x"),
    ]
)
NUMBERS = st.integers() | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=4),
    max_leaves=12,
)
CHOICE = st.fixed_dictionaries({}, optional={"text": JSON, "delta": JSON, "finish_reason": JSON})
COUNTS = {"prompt_tokens": JSON, "completion_tokens": JSON, "prompt_tokens_details": JSON}
EVENT = JSON | st.fixed_dictionaries(
    {},
    optional={
        "choices": JSON | st.lists(CHOICE, max_size=2),
        "usage": JSON | st.fixed_dictionaries({}, optional=COUNTS),
        "error": JSON,
    },
)


def dumps(value):
    """As servers may write it: also NaN, and integers of any size."""
    return any_json(value).encode()


@given(st.lists(EVENT.map(dumps) | st.binary(max_size=40), max_size=4))
def test_no_event_ends_a_run(events):
    scanner = StreamScanner()
    for one in events:
        scanner.feed(b"data: " + one + b"\n", 1.0)
    assert all(
        one is None or (type(one) is int and 0 <= one <= MOST_TOKENS) for one in counts(scanner)
    )
    assert scanner.error is None or len(scanner.error) <= module.ERROR_CHARS
    orjson.dumps([scanner.error, scanner.finish_reason, scanner.text.decode()])


@pytest.mark.parametrize(
    "place",
    [
        b'{"x":%b}',
        b'{"error":%b}',
        b'{"choices":[{"delta":{"content":%b}}]}',
        b'{"choices":[{"delta":{"tool_calls":%b}}]}',
    ],
)
@pytest.mark.parametrize("depth", [200, 900, 1000, 100_000])
def test_no_depth_ends_a_run(place, depth):
    scanner = StreamScanner()
    scanner.feed(b"data: " + place % (b"[" * depth + b"]" * depth) + b"\n", 1.0)
    if depth > 10_000:
        assert str(scanner.error).startswith("event is nested too deep: ")
    assert not scanner.is_too_large


@pytest.mark.parametrize(
    ("limit", "piece", "said"),
    [
        ("MOST_EVENT_BYTES", b"x", "an event has over 1000 bytes"),
        ("MOST_EVENT_BYTES", sse({"x": "y" * 1000}), "an event has over 1000 bytes"),
        ("MOST_TEXT_BYTES", event({"text": "y" * 100}), "the text has over 1000 bytes"),
        ("MOST_CHUNKS", event({"text": "y"}), "over 1000 events have text"),
    ],
)
def test_what_has_no_end_is_read_up_to_a_limit(monkeypatch, limit, piece, said):
    monkeypatch.setattr(module, limit, 1000)
    scanner = StreamScanner()
    for _ in range(1001):
        if scanner.is_too_large:
            break
        scanner.feed(piece, 1.0)
    assert scanner.is_too_large
    assert scanner.error == said
    assert len(scanner.text) < 2000


def test_a_line_that_is_cut_often_is_whole():
    scanner = StreamScanner()
    for at in range(len(ANSWER)):
        scanner.feed(ANSWER[at : at + 1], 1.0)
    assert counts(scanner) == (9, 4, 3)
    assert scanner.error is None
