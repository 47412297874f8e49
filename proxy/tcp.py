"""Socket options that notice a peer which has vanished without a word."""

from __future__ import annotations

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


def watch(sock: socket.socket) -> None:
    """Set them, where the system knows them. Connections inherit those of their listener."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the peer may have gone already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
