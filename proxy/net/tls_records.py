"""The records of a TLS stream by their cleartext heads: where they end, and what they cost.

A record takes the time of RECORD_BYTES or more of its content, and one without content (an update
of keys, a ticket, an empty one) much more. What a connection's records take beyond their content is
bounded by a stock, which content and time fill again.
"""

from __future__ import annotations

HEAD_BYTES = 5
RECORD_BYTES, SMALL_RECORDS = 32, 8192
"""A stream of events has some 200 bytes in each record. So many records may be small in a row."""
HOLLOW_BYTES, HOLLOW_RATIO = 8192, 8
"""A record without content counts as so many bytes, and as so many times its own. OpenSSL takes
20 us for an update of keys, and 10 ms for 16 KiB of tickets."""
MOST_SPARE = SMALL_RECORDS * RECORD_BYTES
SPARE_PER_S = 512 * RECORD_BYTES
"""Whoever sends no more than 512 small records a second may do so for ever."""


class SmallRecordsError(ConnectionError):
    """Too many TLS records for their content."""


class TlsRecords:
    """The records of one direction of a connection.

    `ended`: how many of them had their last byte in what `cut` has returned last. `is_hollow`:
    whether one that was charged last had no content.
    """

    __slots__ = ("_filled_s", "_head", "_left", "_size", "_sizes", "_spare", "ended", "is_hollow")

    def __init__(self, now_s: float) -> None:
        self._filled_s = now_s
        self._head = b""
        self._left = self._size = self._sizes = 0
        self._spare = MOST_SPARE
        self.ended = 0
        self.is_hollow = False

    def cut(self, data: memoryview, at: int, most: int) -> int:
        """Where the next `most` records from `at` on end, or the data, if that is earlier."""
        size, left = len(data), self._left
        self.ended = self._sizes = 0
        while at < size:
            if not left:
                if (at := self._take_head(data, at)) < 0:
                    return size
                left = self._left
            end = at + left
            if end > size:
                self._left = end - size
                return size
            at, left = end, 0
            self.ended += 1
            self._sizes += self._size
            if self.ended == most:
                break
        self._left = 0
        return at

    def _take_head(self, data: memoryview, at: int) -> int:
        """Take the rest of a record's head; where its content begins, or -1: it goes on later."""
        head = self._head + bytes(data[at : at + HEAD_BYTES - len(self._head)])
        if len(head) < HEAD_BYTES:
            self._left, self._head = 0, head
            return -1
        at += HEAD_BYTES - len(self._head)
        self._head = b""
        self._left = self._size = head[3] << 8 | head[4]
        return at

    def charge(self, full: int, size: int, now_s: float) -> None:
        """Charge the ended ones, of which `full` had content, `size` bytes of it together.

        Raises SmallRecordsError beyond the stock.
        """
        spare = self._spare + size - self.ended * RECORD_BYTES
        hollow = self.ended - full
        self.is_hollow = hollow > 0
        if hollow > 0:
            spare -= hollow * HOLLOW_BYTES + max(0, self._sizes - size) * HOLLOW_RATIO
        if spare < 0:
            spare += int((now_s - self._filled_s) * SPARE_PER_S)
            self._filled_s = now_s
            if spare < 0:
                raise SmallRecordsError("too many TLS records of a few bytes")
        self._spare = min(MOST_SPARE, spare)
