"""MemoryBus: a log within one process, for tests of what is built on a bus."""

from __future__ import annotations

from typing import ClassVar

from proxy.net.bus.base import READ_AT_ONCE, BusError, Heard


class Log:
    """The batches of one stream, and the number of the first one.

    `error`: with which every exchange fails; empty: none does.
    """

    def __init__(self) -> None:
        self.first = 1
        self.batches: list[bytes] = []
        self.error = ""

    def empty(self, first: int = 1) -> None:
        """Lose all batches; the next one has this number."""
        self.first, self.batches = first, []


class MemoryBus:
    """One reader of a stream. All of one URL and stream share a log."""

    logs: ClassVar[dict[tuple[str, str], Log]] = {}

    def __init__(self, url: str, stream: str) -> None:
        self.log = self.logs.setdefault((url, stream), Log())
        self._read = self._own = 0

    async def exchange(self, batch: bytes | None) -> Heard:
        """See `Bus`."""
        log = self.log
        if log.error:
            raise BusError(log.error)
        if batch is not None:
            log.batches.append(batch)
            self._own = log.first + len(log.batches) - 1
        begin = max(0, self._read + 1 - log.first)
        found = log.batches[begin : begin + READ_AT_ONCE]
        if found:
            self._read = log.first + begin + len(found) - 1
        return Heard(found, len(found) < READ_AT_ONCE)

    def start_again(self) -> None:
        """See `Bus`."""
        self._read = self._own - 1

    async def close(self) -> None:
        """See `Bus`."""
