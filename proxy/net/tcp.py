"""Socket options that notice a peer which has vanished without a word."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

IDLE_S, INTERVAL_S, PROBES = 30, 10, 3
"""TCP keep-alive: a silent peer is asked after 30 s, and given up 30 s later."""
UNTAKEN_MS = 60_000
"""Bytes that the peer has not taken for so long, or a window closed for so long, end it."""
_OPTIONS = (
    ("TCP_KEEPIDLE", IDLE_S),
    ("TCP_KEEPINTVL", INTERVAL_S),
    ("TCP_KEEPCNT", PROBES),
    ("TCP_USER_TIMEOUT", UNTAKEN_MS),
)
READ_BYTES = 64 << 10
"""What one read of an instance's answer can bring, twice with the kernel's own margin: so much may
wait for a client that reads nothing, beside its transport's 64 KiB."""


def bound_reads(sock: socket.socket) -> None:
    """Bound the kernel's buffer; when it is full the instance waits for the client."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)


def acknowledge_late(sock: socket.socket) -> None:
    """Let the kernel acknowledge every second piece of a stream only, which saves CPU.

    It does so by itself where both sides talk, but a stream goes one way: its acknowledgements are
    a tenth of what a relayed event costs. A sender that waits for one (Nagle's
    algorithm, which engines switch off) waits 40 ms, once, as it does for the first piece of each
    answer on a kept connection anyway: then the kernel goes back to its habit (seen so).
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_QUICKACK"):
        with suppress(OSError):  # the peer may have gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)


def has_news(sock: socket.socket | None) -> bool:
    """Whether a read would find something now: bytes, an end, an error. None is one that broke."""
    if sock is None:
        return False
    look = select.poll()
    look.register(sock, select.POLLIN)
    return bool(look.poll(0))


def watch(sock: socket.socket) -> None:
    """Set them, where the system knows them. Connections inherit those of their listener."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the peer may have gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
