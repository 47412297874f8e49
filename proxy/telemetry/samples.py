"""Samples: the last ended requests in plain numbers, for what plans the fleet.

A sample has no id, tenant, instance or text. Only requests whose prompt was read are kept, so those
without a known key displace none.
"""

from __future__ import annotations

from typing import Final

from proxy.telemetry.record import RequestRecord
from proxy.telemetry.request_log import RecordSink

ROWS_AT_ONCE: Final = 1000
"""Samples of one answer, some 100 bytes each. Objects would take ten times as long to write."""
FIELDS: Final = (
    *("sequence", "t_proxy_recv", "isl_tokens", "hit_tokens", "new_tokens", "osl_tokens"),
    *("queue_s", "ttft_s", "tpot_s", "outcome"),
)
"""What a row has. Names and values are those of the request log."""
Row = tuple[object, ...]


class Samples(RecordSink):
    """A ring of the last `most` samples, numbered from 1 on by their sequence; 0: off.

    `started_at`: unix seconds; with another one sequences have begun anew. `last`: the newest
    sequence, 0 while there is none.
    """

    __slots__ = ("_most", "_rows", "last", "started_at")

    def __init__(self, most: int, started_at: float) -> None:
        self._most, self.started_at, self.last = most, started_at, 0
        self._rows: list[Row] = []

    @property
    def is_on(self) -> bool:
        """Whether samples are kept."""
        return self._most > 0

    @property
    def first(self) -> int:
        """The oldest sequence that is left, or the first one to come."""
        return self.last - len(self._rows) + 1

    def write(self, record: RequestRecord) -> None:
        """Keep one request in place of the oldest, unless its prompt was not read."""
        if record.isl_tokens is None:
            return
        self.last += 1
        row = (
            self.last,
            record.t_proxy_recv,
            record.isl_tokens,
            record.hit_tokens,
            record.new_tokens,
            record.osl_tokens,
            record.queue_s(),
            record.ttft_s(),
            record.tpot_s(),
            record.outcome,
        )
        if len(self._rows) < self._most:
            self._rows.append(row)
        else:
            self._rows[(self.last - 1) % self._most] = row

    def after(self, sequence: int) -> list[Row]:
        """The oldest samples beyond a sequence, `ROWS_AT_ONCE` at most."""
        first = max(sequence + 1, self.first)
        numbers = range(first, min(first + ROWS_AT_ONCE, self.last + 1))
        return [self._rows[(n - 1) % self._most] for n in numbers]
