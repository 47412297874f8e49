"""Socket options that detect a vanished peer, bound reads and delay acknowledgements."""

from __future__ import annotations

import select
import socket
import sys
from contextlib import suppress

IDLE_S, INTERVAL_S, PROBES = 30, 10, 3
"""TCP keep-alive: the kernel probes a silent peer after 30 s, and closes the connection 30 s
later."""
UNTAKEN_MS = 60_000
"""The connection is closed if the peer acknowledges no bytes, or keeps its window closed, for this
long."""
_OPTIONS = (
    ("TCP_KEEPIDLE", IDLE_S),
    ("TCP_KEEPINTVL", INTERVAL_S),
    ("TCP_KEEPCNT", PROBES),
    ("TCP_USER_TIMEOUT", UNTAKEN_MS),
)
_LAST_DATA_AT = 52
"""Place of `tcpi_last_data_recv` in Linux's `tcp_info`: milliseconds since bytes came last."""
READ_BYTES = 64 << 10
"""Socket buffer for reads of an instance's answer; the kernel doubles it. That much may wait for a
client that does not read, beside its transport's 64 KiB."""


def bound_reads(sock: socket.socket) -> None:
    """Limit the kernel's receive buffer; when it is full, the instance waits for the client."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)


def acknowledge_late(sock: socket.socket) -> None:
    """Let the kernel acknowledge only every second piece of a stream, which saves CPU.

    The kernel does so by itself if both sides send, but a stream has one direction: its
    acknowledgements are a tenth of the cost of a relayed event. A sender that waits for one
    (Nagle's algorithm, which vLLM switches off) waits 40 ms, once; then the kernel acknowledges at
    once again (measured).
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_QUICKACK"):
        with suppress(OSError):  # the peer may have gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)


def acknowledge_now(sock: socket.socket) -> None:
    """Acknowledge what has come, which the kernel else puts off on a kept connection.

    An HTTP server that leaves Nagle's algorithm on (such as Dynamo's frontend) keeps the first
    event back until the head is acknowledged: 40 ms of TTFT.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_QUICKACK"):
        with suppress(OSError):  # the peer may have gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def has_news(sock: socket.socket | None) -> bool:
    """Whether a read would find bytes, an end or an error now; False for None (closed)."""
    if sock is None:
        return False
    look = select.poll()
    look.register(sock, select.POLLIN)
    return bool(look.poll(0))


TELLS_LAST_DATA = hasattr(socket, "TCP_INFO")
"""Whether the system tells when bytes have come last (`is_heard_within`)."""


def is_heard_within(sock: socket.socket | None, seconds: float) -> bool:
    """Whether bytes have come in these last seconds; False where the system does not tell."""
    if sock is None or not TELLS_LAST_DATA:
        return False
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_AT + 4)
    except OSError:  # no TCP, or closed
        return False
    if len(told) < _LAST_DATA_AT + 4:
        return False
    last_ms = int.from_bytes(told[_LAST_DATA_AT : _LAST_DATA_AT + 4], sys.byteorder)
    return last_ms <= 1000 * seconds


def watch(sock: socket.socket) -> None:
    """Set keep-alive and user timeout, if the system has them; connections inherit a listener's."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the peer may have gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
