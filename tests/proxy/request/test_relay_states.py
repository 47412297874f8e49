"""The states of a relayed answer: which may follow which, and what each of them ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.types import MoveCause
from proxy.net.upstream.response import Head, Share, UpstreamResponse
from proxy.protocol.framing import wrap
from proxy.protocol.streams.sse import FastPath, Scanner
from proxy.request.client_response import ClientResponse
from proxy.request.relay import LAST_CHUNK, Relay, RelayState, StreamCutError

EVENT = b'data: {"choices":[{"delta":{"content":"w"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
FIELDS = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Instance:
    """A connection to an instance, which says what it is made to say."""

    share: Share | None = None

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.reads = FastPath(memoryview(bytearray(65536)))
        self.is_left = False
        self.reply = UpstreamResponse(self, is_head=False)
        self.reply.begin(Head(HEAD, 200, FIELDS))
        self.reads.rest = self.rest

    def rest(self, wire: bytes) -> None:
        self.reply.sink(wire)

    def say(self, *bodies: bytes) -> None:
        for body in bodies:
            wire = wrap(body)
            self.reads.get_buffer(0)[: len(wire)] = wire
            self.reads.buffer_updated(len(wire))

    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def leave(self, reply: UpstreamResponse) -> None:
        self.is_left = True

    def fast_path(self, reply: UpstreamResponse) -> FastPath | None:
        return self.reads

    def leave_fast_path(self, reply: UpstreamResponse) -> None:
        self.reads.leave()

    def hang_up(self, reply: UpstreamResponse) -> bool:
        return False


class Client:
    """A client's connection; `wrote` is what it has got behind the head."""

    writing_paused = False

    def __init__(self) -> None:
        self.wire = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.wire += data

    @property
    def wrote(self) -> bytes:
        return self.wire.partition(b"\r\n\r\n")[2]

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def force_close(self) -> None:
        self.is_closed = True


def relayed(path: str = "/v1/chat/completions") -> tuple[Relay, Instance, Client]:
    instance, client = Instance(), Client()
    request: Any = SimpleNamespace(
        transport=client,
        protocol=client,
        path=path,
        version=(1, 1),
        keep_alive=True,
        writer=SimpleNamespace(output_size=0),
    )
    response = ClientResponse(request, instance.reply, b"")
    scanner = Scanner()
    relay = Relay(request, instance.reply, response, scanner, lambda: 1 << 30)
    return relay, instance, client


def state(relay: Relay) -> RelayState:
    return relay.state


async def test_waiting_then_streaming_then_ended() -> None:
    relay, instance, client = relayed()
    assert state(relay) == RelayState.WAITING
    assert not relay.has_begun
    instance.say(EVENT)
    relay.begin()
    assert state(relay) == RelayState.STREAMING
    assert client.wrote == wrap(EVENT)
    instance.say(EVENT, EVENT, EVENT)
    instance.say(DONE)
    assert state(relay) == RelayState.ENDED
    whole = wrap(EVENT) * 4 + wrap(DONE) + LAST_CHUNK
    assert client.wrote == whole
    instance.say(EVENT)
    assert client.wrote == whole, "nothing passes behind the end, by the fast path neither"
    assert not instance.reply.keeps
    relay.cut(EVENT)
    assert state(relay) == RelayState.ENDED, "a whole answer is not cut"
    assert client.wrote == whole
    assert client.is_closed


async def test_a_named_last_event_makes_it_end_soon() -> None:
    relay, instance, client = relayed("/v1/messages")
    last = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    relay.begin()
    instance.say(EVENT, last)
    assert state(relay) == RelayState.ENDING
    instance.say(last)
    assert state(relay) == RelayState.ENDING
    instance.reply.sink(b"0\r\n\r\n")
    assert state(relay) == RelayState.ENDED
    assert client.wrote.endswith(LAST_CHUNK)


async def test_a_cut_answer_gets_one_last_event_and_no_clean_end() -> None:
    relay, instance, client = relayed()
    relay.begin()
    instance.say(EVENT)
    for _ in range(2):
        relay.cut(b"data: sorry\n\n")
        assert state(relay) == RelayState.CUT
        assert client.wrote == wrap(EVENT) + wrap(b"data: sorry\n\n")
    relay.close()
    assert instance.is_left


async def test_it_leaves_at_once_unless_its_client_reads_too_slowly() -> None:
    relay, instance, client = relayed()
    assert not relay.leave(MoveCause.DRAIN), "nobody has a byte of it"
    relay.begin()
    instance.say(EVENT)
    assert relay.leave(MoveCause.DRAIN)
    relay.stay()
    client.writing_paused = True
    instance.say(EVENT)
    assert relay.is_paused
    assert not relay.leave(MoveCause.DRAIN), "only once the client has read"


async def test_an_end_in_the_turn_in_which_the_time_is_up() -> None:
    """The task is cancelled by then, and wakes up to a stream that is whole."""
    relay, instance, client = relayed()
    running = asyncio.get_running_loop().create_task(relay.run(0.05, 0.0))
    await asyncio.sleep(0)
    instance.say(EVENT)
    expire = relay._limit._expire  # type: ignore[union-attr]
    expire()
    instance.say(DONE)
    await running
    assert client.wrote == wrap(EVENT) + wrap(DONE) + LAST_CHUNK


@pytest.mark.parametrize("ends", [True, False])
async def test_silence(ends: bool) -> None:
    """After the scanner's word for an end it is ended late, else it is cut."""
    relay, instance, client = relayed()
    instance.say(EVENT, b"event: message_stop\ndata: {}\n\n" if ends else EVENT)
    if ends:
        await relay.run(0.01, 0.0)
        assert state(relay) == RelayState.ENDED
        assert client.wrote.endswith(LAST_CHUNK)
    else:
        with pytest.raises(StreamCutError):
            await relay.run(0.01, 0.0)
        assert state(relay) == RelayState.STREAMING


STATES = list(RelayState)
ALLOWED = {(0, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4)}


@pytest.mark.parametrize("now", STATES)
@pytest.mark.parametrize("then", STATES)
async def test_steps(now: RelayState, then: RelayState) -> None:
    relay, _, _ = relayed()
    relay.state = now
    if (now, then) in ALLOWED:
        relay._move(then)
        assert state(relay) == then
    else:
        with pytest.raises(AssertionError):
            relay._move(then)
