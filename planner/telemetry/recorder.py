"""The last ticks, packed: 50,000 of them, some three days, take 30 MB."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from planner.telemetry.snapshot import Snapshot

MOST = 50_000


class Recorder:
    """Snapshots of ticks, the oldest first."""

    def __init__(self, most: int = MOST) -> None:
        self._packed: deque[bytes] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._packed)

    def add(self, snapshot: Snapshot | Mapping[str, Any]) -> None:
        """Keep one, or the document of one; the oldest goes where there are too many."""
        self._packed.append(zlib.compress(orjson.dumps(snapshot), 1))

    def every(self, step: int = 1) -> Iterator[dict[str, Any]]:
        """Every `step`-th of them, as documents."""
        for at in range(0, len(self._packed), step):
            yield orjson.loads(zlib.decompress(self._packed[at]))
