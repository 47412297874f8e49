"""Which answers are replaced unseen: by status, by first event, by an engine's own error."""

from __future__ import annotations

import pytest

from proxy.core.types import FailureKind
from proxy.net.upstream.response_check import (
    hollow,
    in_band_error,
    is_plainly_good,
    is_refusal,
    look_at,
    look_for_length,
)
from proxy.protocol.endpoints import OTHER, endpoint_of
from proxy.protocol.errors import UpstreamFailure
from tests.support.harness import DONE, STREAM_HEAD, chunk, event, plain
from tests.support.upstream_peer import Peer, serving

NO_MODEL = b'{"error":{"message":"The model `m` does not exist."}}'


def error_event(text: str) -> bytes:
    return STREAM_HEAD + chunk(b'data: {"error":%s}\n\n' % text.encode()) + DONE


def named(name: str, data: str) -> bytes:
    return STREAM_HEAD + chunk(b"event: %b\ndata: %b\n\n" % (name.encode(), data.encode())) + DONE


SERVER_ERROR, BUSY = FailureKind.SERVER_ERROR, FailureKind.BUSY


async def judged(answer: bytes, *, close: bool = False) -> FailureKind | None:
    """What is wrong with an answer; what was looked at must still be there to be passed on."""
    async with serving(Peer([answer], close=close).serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        try:
            await look_at(reply)
        except UpstreamFailure as failure:
            return failure.kind
        else:
            if reply.is_stream:
                assert b"".join(reply.body).startswith((b"data: ", b"event: error"))
            else:
                body = answer.partition(b"\r\n\r\n")[2]
                assert await reply.read(1 << 20) == body
            return None
        finally:
            reply.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (plain(b"{}"), None),
        (plain(b"{}", "400 Bad Request"), None),
        (plain(b"{}", "501 Not Implemented"), None),
        (plain(b'{"error":"no such path"}', "404 Not Found"), None),
        (plain(NO_MODEL, "404 Not Found"), FailureKind.NO_MODEL),
        (plain(b"{}", "500 Oops"), FailureKind.SERVER_ERROR),
        (plain(b"{}", "429 Slow Down"), FailureKind.BUSY),
        (plain(b"{}", "503 Busy"), FailureKind.BUSY),
        (plain(b"", "302 Found", "Location: http://x/\r\n"), FailureKind.REDIRECT),
        (STREAM_HEAD + chunk(event("a")) + DONE, None),
        (error_event('{"message":"died","code":500}'), FailureKind.SERVER_ERROR),
        (error_event('{"message":"full","code":503}'), FailureKind.BUSY),
        (error_event('{"message":"your fault","code":400}'), None),
        (error_event('{"message":"your fault","type":"invalid_request_error"}'), None),
        (named("error", '{"type":"error","error":{"type":"api_error"}}'), SERVER_ERROR),
        (named("error", '{"type":"error","error":{"type":"overloaded_error"}}'), BUSY),
        (named("error", '{"type":"error","error":{"type":"rate_limit_error"}}'), BUSY),
        (named("error", '{"type":"error","error":{"type":"request_too_large"}}'), None),
        (named("error", '{"type":"error","code":"server_error","message":"x"}'), SERVER_ERROR),
        (named("error", '{"type":"error","code":"rate_limit_exceeded"}'), BUSY),
        (named("error", '{"type":"error","code":"invalid_prompt"}'), None),
        (named("error", '{"type":"error","code":null,"error":7}'), SERVER_ERROR),
        (named("error", "[]"), SERVER_ERROR),
    ],
)
async def test_what_is_replaced(answer: bytes, kind: FailureKind | None) -> None:
    assert await judged(answer) is kind


async def test_a_stream_that_ends_before_its_first_event() -> None:
    assert await judged(STREAM_HEAD + b"0\r\n\r\n") is FailureKind.RESET


async def test_a_refusal_brings_its_body_and_when_to_come_again() -> None:
    refusal = plain(b'{"busy":1}', "503 Busy", "Retry-After: 7\r\nX-Other: 1\r\n")
    async with serving(Peer([refusal]).serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        assert not is_plainly_good(reply)
        with pytest.raises(UpstreamFailure) as raised:
            await look_at(reply)
        reply.close()
    failure = raised.value
    assert (failure.status, failure.body) == (503, b'{"busy":1}')
    assert failure.headers == {"Content-Type": "application/json", "Retry-After": "7"}


GOOD_CHAT = plain(b'{"choices":[{"message":{"content":"a"}}]}')
GOOD_STREAM = STREAM_HEAD + chunk(event("a")) + DONE


async def why(path: str, answer: bytes, *, streams: bool | None) -> UpstreamFailure | None:
    async with serving(Peer([answer]).serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        while not reply.is_over and await reply.more():
            pass
        row = OTHER if path == "/own" else endpoint_of(path)
        found = hollow(row, reply, has_key=False, streams=streams)
        reply.close()
        return found


@pytest.mark.parametrize(
    ("path", "answer", "streams"),
    [
        ("/v1/chat/completions", plain(b"", "204 No Content"), False),
        ("/v1/chat/completions", plain(b"{}", "299 Odd"), True),
        ("/v1/completions", plain(b'{"status":"queued"}', "202 Accepted"), False),
        ("/v1/messages", plain(b"{}", "206 Partial Content"), False),
        ("/v1/embeddings", plain(b"", "204 No Content"), False),
        ("/v1/chat/completions", GOOD_CHAT, True),
        ("/v1/chat/completions", GOOD_STREAM, False),
        ("/v1/messages", GOOD_STREAM, False),
        ("/v1/responses", plain(b'{"output":[]}'), True),
    ],
)
async def test_what_is_no_answer_of_its_path(path: str, answer: bytes, *, streams: bool) -> None:
    found = await why(path, answer, streams=streams)
    assert found is not None
    assert found.kind is FailureKind.HOLLOW
    assert not is_refusal(found), "no client can be the cause of it"


@pytest.mark.parametrize(
    ("path", "answer", "streams"),
    [
        ("/v1/chat/completions", GOOD_CHAT, False),
        ("/v1/chat/completions", GOOD_CHAT, None),
        ("/v1/chat/completions", GOOD_STREAM, True),
        ("/v1/audio/transcriptions", plain(b'{"text":"a"}'), True),
        ("/v1/audio/transcriptions", GOOD_STREAM, False),
        ("/v1/responses/resp_1", plain(b"", "204 No Content"), False),
        ("/v1/responses/resp_1", GOOD_STREAM, False),
        ("/own", plain(b"", "204 No Content"), True),
        ("/own", plain(b"{}", "202 Accepted"), False),
        ("/own", GOOD_STREAM, False),
    ],
)
async def test_what_may_be_an_answer_of_its_path(
    path: str, answer: bytes, *, streams: bool | None
) -> None:
    assert await why(path, answer, streams=streams) is None


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        (b'{"error":{"code":503}}', 503, FailureKind.BUSY),
        (b'{"error":{"code":404}}', 404, FailureKind.SERVER_ERROR),
        (b'{"error":{"code":true}}', 500, FailureKind.SERVER_ERROR),
        (b'{"error":{"code":200}}', 500, FailureKind.SERVER_ERROR),
        (b'{"error":{"code":"503"}}', 500, FailureKind.SERVER_ERROR),
        (b'{"error":"gone"}', 500, FailureKind.SERVER_ERROR),
        (b'{"error":', 500, FailureKind.SERVER_ERROR),
    ],
)
def test_an_error_inside_of_a_200(text: bytes, status: int, kind: FailureKind) -> None:
    """Only a number that is an error status counts as one."""
    failure = in_band_error(b"data: " + text)
    assert (failure.status, failure.kind, failure.body) == (status, kind, text)


@pytest.mark.parametrize(
    ("said", "is_too_long"),
    [
        (b"This model's maximum context length is 8192 tokens. However, your prompt ...", True),
        (b"The decoder prompt (length 9) is longer than the maximum model length of 8", True),
        (b"max_tokens=9000 cannot be greater than max_model_len=8192", True),
        (b"The input (9 tokens) is longer than the model's context length (8 tokens).", True),
        (b"the request exceeds the available context size", True),
        (b'{"error":{"message":"too many","param":"input_tokens"}}', True),
        (b"prompt is too long: 210000 tokens > 200000 maximum", True),
        (b"Invalid 'tools' format", False),
        (b"", False),
    ],
)
async def test_a_refusal_for_the_length_of_the_context(said: bytes, is_too_long: bool) -> None:
    answer = plain(said, "400 Bad Request")
    async with serving(Peer([answer]).serve) as upstream:
        reply = await upstream.send("POST", "/v1/x", b"", b"{}")
        if is_too_long:
            with pytest.raises(UpstreamFailure) as raised:
                await look_for_length(reply)
            failure = raised.value
            told = failure.kind, failure.status, failure.body
            assert told == (FailureKind.TOO_LONG, 400, said)
        else:
            await look_for_length(reply)
            assert await reply.read(1 << 20) == said
        reply.close()
