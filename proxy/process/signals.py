"""Signals that are kept while the process starts: by themselves they would end it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

KEPT: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def keep() -> None:
    """Let these wait until `let_in`. Call it first of all, before any thread starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, KEPT)


def let_in() -> None:
    """Have what waits handled, and what comes: each has a handler by now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, KEPT)


@contextmanager
def told_by(numbers: Iterable[signal.Signals]) -> Iterator[socket.socket]:
    """A socket without a wait from which these are read, a byte each; for a process without a loop.

    Those that were kept are let in.
    """
    told, tells = socket.socketpair()
    with told, tells:
        told.settimeout(0.0)
        tells.settimeout(0.0)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(tells.fileno())
        let_in()
        try:
            yield told
        finally:
            signal.set_wakeup_fd(-1)
