"""Where the pieces of an instance's answer come out: what nearly each of them needs, in one call.

A stream is a piece every 20 ms, and what costs is not the work on one but to fetch what it touches
back into the processor's caches. So this is one object between a connection to an instance and the
one to its client, and compiled: no other code of ours runs for a piece that says nothing but
content. It knows neither connection: bytes go where its owner says.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.sse import Scanner


def _drop(data: bytes) -> None:
    """Nobody is there yet, or any more."""


def _nothing() -> int:
    return 0


class Tap:
    """One connection's reads, which it finds in `buffer`. What it does not pass on goes to `rest`.

    Its two methods are those of `asyncio.BufferedProtocol`.
    """

    __slots__ = ("_buffer", "_full", "_gone", "_scanner", "_waiting", "_write", "rest")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.rest: Callable[[bytes], None] = _drop
        self._scanner: Scanner | None = None
        self._write: Callable[[bytes], object] = _drop
        self._waiting: Callable[[], int] = _nothing
        self._full: Callable[[], object] = _nothing
        self._gone: Callable[[], object] = _nothing

    def open(
        self,
        scanner: Scanner,
        write: Callable[[bytes], object],
        waiting: Callable[[], int],
        full: Callable[[], object],
        gone: Callable[[], object],
    ) -> None:
        """Until it is shut, pieces that `scanner` takes are written, as they are.

        `waiting` says how many bytes the receiver has not taken yet, and if there are any, `full`
        looks whether they are too many. `gone`: a write was refused (RuntimeError).
        """
        self._scanner, self._write, self._waiting = scanner, write, waiting
        self._full, self._gone = full, gone

    def shut(self) -> None:
        """Everything goes to `rest`."""
        if self._scanner is not None:
            self._scanner = None
            self._write, self._waiting = _drop, _nothing
            self._full = self._gone = _nothing

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next read goes; used before anything else can read."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were read from the instance."""
        data: bytes = self._buffer[:nbytes].tobytes()
        scanner = self._scanner
        if scanner is None or not scanner.takes(data):
            self.rest(data)
            return
        try:
            self._write(data)
        except RuntimeError:
            self._gone()
            return
        if self._waiting():
            self._full()
