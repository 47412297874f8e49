"""Which answers under status 200 serve nobody, and which only look so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.endpoints import OTHER, Dialect, endpoint_of
from proxy.protocol.streams.hollow import (
    ends_hollow,
    is_short,
    is_short_stream,
    why_hollow,
    why_hollow_stream,
)
from proxy.protocol.streams.sse import Scanner

JSON, HTML = b"application/json", b"text/html; charset=utf-8"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DONE = b"data: [DONE]\n\n"


def chat(content: str, reason: str) -> bytes:
    message = b'{"role":"assistant","content":"%b"}' % content.encode()
    choice = b'{"index":0,"message":%b,"finish_reason":"%b"}' % (message, reason.encode())
    return b'{"id":"x","choices":[%b],"usage":{"prompt_tokens":1}}' % choice


def response(status: str, more: bytes) -> bytes:
    """A Responses answer that repeats something of its request, before its status or behind it."""
    told = b'"status":"%b"' % status.encode()
    return b'{"id":"resp_1","output":[{"status":"completed"}],%b,%b,"top_p":1.0}' % (more, told)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("", "stop")),
        (CHAT, chat("hi", "length")),
        (CHAT, chat(r"say \"finish_reason\":\"abort\"", "stop")),
        (CHAT, b'{"model":"abort" , "choices" : [ {"message":{"content":"a"}}]}'),
        (CHAT, chat('a","x":"error', "stop")),
        (CHAT, chat("a", "stop")[:-1] + b',"metadata":{"finish_reason":"abort"}}'),
        (CHAT, chat("a", "stop")[:-1] + b',"tools":[{"p":{"finish_reason":"abort"}}]}'),
        (RESPONSES, response("completed", b'"tools":[{"finish_reason":"abort"}]')),
        (RESPONSES, response("completed", b'"tools":[{"p":{"finish_reason":"error"}}]')),
        (RESPONSES, response("completed", b'"tools":[{"choices":[]}]')),
        (RESPONSES, response("completed", b'"metadata":{"status":"failed","a":"}}"}')),
        (RESPONSES, response("incomplete", b'"tools":[{"status":"cancelled"}]')),
        (TEXT, b'{"choices":[{"text":"","finish_reason":"stop","stop_reason":"abort"}]}'),
        ("/v1/messages", b'{"type":"message","content":[],"stop_reason":"end_turn"}'),
        ("/v1/messages/count_tokens", b'{"input_tokens":7}'),
        ("/v1/responses", b'{"id":"resp_1","status":"queued","output":[]}'),
        ("/v1/responses/resp_1", b'{"id":"resp_1","deleted":true}'),
        ("/v1/embeddings", b'{"data":[]}'),
        ("/tokenize", b'{"tokens":[]}'),
        ("/v1/audio/transcriptions", b"words as text"),
        ("/v1/audio/transcriptions", b'{"text":"{\\"detail\\":\\"x\\"}"}'),
        ("/v1/responses/resp_1", b'{"error":{"message":"it has failed"},"id":"resp_1"}'),
        ("/v1/rerank", b'{"detail":null,"results":[]}'),
        (CHAT, chat("", "tool_calls").replace(b'""', b'null,"tool_calls":[{"id":"c"}]')),
    ],
)
def test_answers_that_may_be_of_use(path: str, body: bytes) -> None:
    assert why_hollow(endpoint_of(path), JSON, body) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b""),
        (CHAT, b" {}\r\n"),
        (CHAT, b"null"),
        (CHAT, b'{"choices":[]}'),
        (CHAT, b'{"object":"error","message":"no","code":400}'),
        (CHAT, b"OK"),
        (CHAT, chat("hi", "abort")),
        (CHAT, chat("", "error")),
        (CHAT, b'{"choices":[{"text":"a","finish_reason": {"type": "abort","message":"x"}}]}'),
        (TEXT, b'{"choices" : [ ]}'),
        ("/v1/messages", b'{"error":{"message":"no"}}'),
        (RESPONSES, b'"ok"'),
        (RESPONSES, response("cancelled", b'"tools":[]')),
        (RESPONSES, response("failed", b'"metadata":{"a":"}\\"{"}')),
        (CHAT, b'{"choices":[{"finish_reason":"abort"}],"usage":{"a":{"b":[1]}},"x":"}]}"}'),
        ("/v1/embeddings", b"{}"),
        ("/tokenize", b""),
        (CHAT, b'{"detail":"Engine is sleeping"}'),
        (TEXT, b'{"id":"x","object":"text_completion","usage":{}}'),
        ("/v1/messages", b'{"type":"message","detail":[]}'),
        (RESPONSES, b'{"status":"sleeping"}'),
        ("/v1/embeddings", b'{"detail":"Engine is sleeping"}'),
        ("/v1/score", b'\n { "detail" : [{"msg":"x"}]}'),
        ("/tokenize", b'{"error":{"message":"asleep"}}'),
    ],
)
def test_answers_that_serve_nobody(path: str, body: bytes) -> None:
    assert why_hollow(endpoint_of(path), JSON, body) is not None


def test_a_page_is_no_answer_of_an_api() -> None:
    page = b"<html>" + b"x" * 1000
    assert why_hollow(endpoint_of(CHAT), HTML, page) == "it is a web page"
    assert why_hollow(endpoint_of("/v1/rerank"), HTML, page) is not None
    assert why_hollow(OTHER, HTML, page) is None, "nobody knows what an extra path answers"


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}\n\n'


def end(reason: str) -> bytes:
    return b'data: {"choices":[{"delta":{},"finish_reason":"%b"}]}\n\n' % reason.encode()


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_stream_that_ends_broken(reason: str, *, is_over: bool) -> None:
    head = b": hello\n\n" + ROLE + TOKEN + end(reason)
    assert why_hollow_stream(Dialect.CHAT, head, is_over=is_over) == f"finish reason {reason}"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_stream_of_nothing(*, is_over: bool) -> None:
    assert why_hollow_stream(Dialect.CHAT, DONE, is_over=is_over) is not None
    assert why_hollow_stream(Dialect.COMPLETIONS, b"data:[DONE]\n\n", is_over=is_over) is not None
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert why_hollow_stream(Dialect.MESSAGES, stop, is_over=is_over) is not None


@pytest.mark.parametrize("head", [ROLE + DONE, ROLE + ROLE + DONE])
def test_only_the_whole_stream_tells_that_it_has_no_token(head: bytes) -> None:
    assert why_hollow_stream(Dialect.CHAT, head, is_over=False) is None
    assert why_hollow_stream(Dialect.CHAT, head, is_over=True) is not None


@pytest.mark.parametrize(
    "head",
    [
        ROLE + TOKEN + DONE,
        ROLE + end("stop") + DONE,
        TOKEN + end("length") + DONE,
        TOKEN,
        b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n' + DONE,
    ],
)
def test_streams_that_may_be_of_use(head: bytes) -> None:
    assert why_hollow_stream(Dialect.CHAT, head, is_over=True) is None
    assert why_hollow_stream(Dialect.CHAT, head, is_over=False) is None


def test_a_stream_of_an_unknown_kind_is_not_judged() -> None:
    assert why_hollow_stream(Dialect.OPENAI, DONE, is_over=True) is None


def test_named_ends_with_a_reason_or_counts_are_answers() -> None:
    done = b'event: response.completed\ndata: {"response":{"status":"completed","output":[]}}\n\n'
    assert why_hollow_stream(Dialect.RESPONSES, done, is_over=False) is None
    assert ends_hollow(Dialect.RESPONSES, done, has_content=False) is None


def named(data: bytes, name: bytes = b"response.completed") -> bytes:
    return b'event: %b\ndata: {"response":%b,"sequence_number":7}\n\n' % (name, data)


def test_a_stream_of_responses_is_judged_by_its_own_status() -> None:
    told = [
        (response("completed", b'"tools":[{"finish_reason":"abort"}]'), None),
        (response("completed", b'"metadata":{"status":"failed"}'), None),
        (response("completed", b'"tools":[{"p":{"status":"cancelled"}}]'), None),
        (response("cancelled", b'"tools":[{"status":"completed"}]'), "status cancelled"),
    ]
    for data, why in told:
        for seen in (named(data), named(data)[-150:]):
            assert ends_hollow(Dialect.RESPONSES, seen, has_content=True) == why
        head = named(data, b"response.created") + named(data)
        assert why_hollow_stream(Dialect.RESPONSES, head, is_over=False) == why
    item = named(b'{"status":"failed"}', b"response.output_item.done").replace(b"response", b"item")
    item = item.replace(b"event: item.", b"event: response.")
    assert why_hollow_stream(Dialect.RESPONSES, item, is_over=False) is None, "a tool has failed"
    assert ends_hollow(Dialect.RESPONSES, item + named(told[0][0]), has_content=True) is None
    half = named(response("cancelled", b'"tools":[]'))[:-3]
    assert ends_hollow(Dialect.RESPONSES, half, has_content=True) is None, "nobody knows its end"


def test_many_matches_take_no_time() -> None:
    """A client could have an engine repeat thousands: each byte is looked at once."""
    tools = b'"tools":[' + b",".join([b'{"status":"failed"}'] * 3000) + b"]"
    assert why_hollow(endpoint_of(RESPONSES), JSON, response("completed", tools)) is None
    seen = named(response("completed", tools))
    assert ends_hollow(Dialect.RESPONSES, seen, has_content=True) is None
    head = (
        b"data: "
        + chat("hi", "stop")[:-1]
        + b',"t":[%b]}\n\n' % b",".join([b'{"p":{"finish_reason":"abort"}}'] * 3000)
    )
    assert why_hollow_stream(Dialect.CHAT, head, is_over=False) is None


CHUNKS = [
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"delta":{"content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
    b'data: {"choices":[{"text":"[DONE] \\"error\\" message_stop"}]}\n\n',
    b'data: {"error":{"message":"x"}}\n\n',
    b": ping\n\n",
    DONE,
]
MESSAGES = [
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{}}}\n\n',
    b'event: content_block_delta\ndata: {"delta":{"type":"text_delta","text":"a"}}\n\n',
    b'event: error\ndata: {"type":"error","error":{"message":"x"}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]
EVENTS = [
    b'event: response.created\ndata: {"response":{"status":"in_progress"}}\n\n',
    b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n',
    b'event: response.completed\ndata: {"response":{"status":"completed"}}\n\n',
    b'event: response.failed\ndata: {"response":{"status":"failed"}}\n\n',
]
OF_DIALECT = {
    Dialect.CHAT: CHUNKS,
    Dialect.COMPLETIONS: CHUNKS,
    Dialect.MESSAGES: MESSAGES,
    Dialect.RESPONSES: EVENTS,
}
SLOW = b': "error" "failed"\n\n'
"""A comment that says nothing, but has the traces of faults: nothing behind it is plainly good."""


@pytest.mark.parametrize("dialect", OF_DIALECT)
@given(st.data(), st.booleans(), st.booleans())
def test_a_stream_that_is_plainly_good_is_good(
    dialect: Dialect, data: st.DataObject, is_over: bool, may_move: bool
) -> None:
    pieces = st.lists(st.sampled_from(OF_DIALECT[dialect]), min_size=1, max_size=6)
    head = data.draw(pieces.map(b"".join))
    quick = why_hollow_stream(dialect, head, is_over=is_over, may_move=may_move)
    assert quick == why_hollow_stream(dialect, SLOW + head, is_over=is_over, may_move=may_move)


@pytest.mark.parametrize(
    ("body", "is_so"),
    [
        (chat("", "stop"), True),
        (chat("!", "stop"), True),
        (chat("yes", "stop"), True),
        (chat("", "stop").replace(b'""', b"null"), True),
        (b'{"choices":[{"text":"","finish_reason":"stop"}]}', True),
        (b'{"type":"message","content":[],"stop_reason":"end_turn"}', True),
        (b'{"output":[],"status":"completed"}', True),
        (chat("a whole sentence", "stop"), False),
        (chat(r"\n\n\n\n\n\n\n", "stop"), False),
        (chat("", "tool_calls").replace(b'""', b'null,"tool_calls":[{"id":"c"}]'), False),
        (chat("", "stop").replace(b'""', b'"","reasoning_content":"I think"'), False),
        (b'{"choices":[{"text":"abc"},{"text":"defg"}]}', False),
        (b'{"content":[{"type":"tool_use","input":{}}]}', False),
        (b'{"output":[{"type":"function_call","arguments":"{}"}]}', False),
    ],
)
def test_answers_with_next_to_nothing_in_them(body: bytes, *, is_so: bool) -> None:
    assert is_short(body) is is_so
    scanner = Scanner()
    scanner.feed(b"data: " + body + b"\n\n" + DONE)
    assert is_short_stream(scanner) is is_so


def test_a_stream_of_many_events_is_not_short_unless_it_has_no_content() -> None:
    for event, is_so in ((TOKEN, False), (ROLE, True)):
        scanner = Scanner()
        for _ in range(20):
            scanner.feed(event)
        scanner.feed(DONE)
        assert is_short_stream(scanner) is is_so
