"""Socket options, as the kernel has them afterwards."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from proxy.net import tcp

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


def test_a_silent_peer_is_asked(pair: Pair) -> None:
    sock = pair[0]
    tcp.watch(sock)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == tcp.IDLE_S
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == tcp.INTERVAL_S
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == tcp.PROBES
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == tcp.UNTAKEN_MS


def test_what_one_read_can_bring_is_bounded(pair: Pair) -> None:
    """The kernel doubles what it is told, for its own bookkeeping."""
    tcp.bound_reads(pair[0])
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * tcp.READ_BYTES


def test_acknowledgements_are_put_off(pair: Pair) -> None:
    tcp.acknowledge_late(pair[0])
    assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0
    tcp.acknowledge_now(pair[0])
    assert pair[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


@pytest.mark.parametrize("what", ["bytes", "an end"])
def test_news(pair: Pair, what: str) -> None:
    client, accepted = pair
    assert not tcp.has_news(client)
    if what == "bytes":
        accepted.sendall(b"x")
    else:
        accepted.shutdown(socket.SHUT_WR)
    assert tcp.has_news(client)


def test_a_connection_that_broke_has_none() -> None:
    assert not tcp.has_news(None)


def test_other_families_are_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        tcp.watch(ours)
        tcp.bound_reads(ours)
        tcp.acknowledge_late(ours)
        tcp.acknowledge_now(ours)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_when_bytes_came_last(pair: Pair) -> None:
    client, accepted = pair
    accepted.send(b"x")
    assert client.recv(1) == b"x"
    assert tcp.is_heard_within(client, 60.0)
    assert not tcp.is_heard_within(client, -1.0)
    assert not tcp.is_heard_within(None, 60.0)
    client.close()
    assert not tcp.is_heard_within(client, 60.0)
    one, other = socket.socketpair()
    with one, other:
        assert not tcp.is_heard_within(one, 60.0), "no TCP"
