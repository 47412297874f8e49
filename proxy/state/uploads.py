"""Incoming bodies, on the event loop: they wait for room, and the largest pays.

`core/admission/upload_room.py` decides. A body is here from the moment at which its request is
served until it is read, unpacked and examined. What waits behind that is the queue's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from proxy.core.admission.upload_room import Round, Upload, UploadRoom
from proxy.net.timeouts import Alarm, Limit
from proxy.protocol.errors import NoRoomError
from proxy.telemetry.log import Throttle, more

MOST_BYTES = 32 << 20
"""Bodies that are not admitted yet have so much memory together; a larger one is alone."""
WAIT_S = 10.0
"""A body that has no room after this time is refused."""
LOOK_S = 0.25
"""Interval of checks for bodies that have had their time, while others wait."""
_FULL = "body: the buffer for bodies is full, and this one is the largest or slowest"
_log = logging.getLogger(__name__)


class Holding(Limit):
    """A body's place among the others; raises NoRoomError where it has to go."""

    __slots__ = ("_come", "_uploads", "upload")

    def __init__(self, uploads: Uploads, upload: Upload, come: Callable[[], int]) -> None:
        super().__init__(math.inf)
        self._uploads, self.upload, self._come = uploads, upload, come

    def __enter__(self) -> Self:
        super().__enter__()
        self._uploads.began(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uploads.ended(self)
        try:
            super().__exit__(kind, error, trace)
        except TimeoutError as late:
            raise NoRoomError(_FULL) from late

    @property
    def come_bytes(self) -> int:
        """Bytes received of the body."""
        return self._come()

    def resize(self, size: int) -> None:
        """The body has another size than its client sent: it was packed."""
        self._uploads.resize(self.upload, size)

    def has(self, size: int) -> bool:
        """Whether there is room for a body of this size; else it has to `wait`."""
        wanted = size - self.upload.held
        return wanted <= 0 or self._uploads.ask(self.upload, wanted)

    async def wait(self) -> None:
        """Wait for room; raises NoRoomError after WAIT_S."""
        await self._uploads.wait(self.upload)


class Uploads:
    """The bodies that are not admitted yet."""

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self.room = UploadRoom(max_bytes)
        self._holdings: dict[Upload, Holding] = {}
        self._waits: dict[Upload, asyncio.Future[None]] = {}
        self._alarm: Alarm | None = None
        self._throttle = Throttle()

    def holding(self, owner: str, come: Callable[[], int]) -> Holding:
        """A place for a body; `come` says how much of it is here."""
        return Holding(self, self.room.enter(owner, come(), self._now_s()), come)

    def began(self, holding: Holding) -> None:
        """Add a body under way; if the hard limit is exceeded, one body ends at once."""
        self._holdings[holding.upload] = holding
        self._end_excess()

    def ended(self, holding: Holding) -> None:
        """Remove a body that is parsed, refused or gone."""
        self._holdings.pop(holding.upload, None)
        self.room.leave(holding.upload)
        if self._waits:
            self._grant()

    def ask(self, upload: Upload, wanted: int) -> bool:
        """Whether there is room for so much more of a body now; else it is to `wait`."""
        if upload not in self._holdings:
            return False  # it has to go
        self.room.ask(upload, wanted)
        self._grant()
        return not upload.wanted

    async def wait(self, upload: Upload) -> None:
        """Wait for the room that was asked for; raises NoRoomError."""
        turn = self._waits[upload] = asyncio.get_running_loop().create_future()
        if self._alarm is None:
            self._look()  # else it is looked at soon: once for all that wait
        try:
            with Limit(WAIT_S):
                await turn
        except TimeoutError as error:
            raise NoRoomError("body: the buffer for bodies is full") from error
        finally:
            del self._waits[upload]

    def resize(self, upload: Upload, held: int) -> None:
        """Set a body's size; if the hard limit is exceeded, one body ends at once."""
        self.room.resize(upload, held)
        self._end_excess()

    def shed(self) -> None:
        """Memory is short: the largest and slowest bodies end, until half is left."""
        most = self.room.held_bytes // 2
        while self.room.held_bytes > most and self._end(self.room.worst(self._now_s())):
            pass

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _grant(self) -> None:
        for upload in self.room.granted(self._now_s()):
            turn = self._waits.get(upload)
            if turn is not None and not turn.done():
                turn.set_result(None)

    def _look(self) -> None:
        """While bodies wait, end those that have had their time, as far as it takes."""
        now_s = self._now_s()
        for upload, holding in self._holdings.items():
            self.room.moved(upload, holding.come_bytes, now_s)
        self._grant()
        over = Round(self.room, now_s)
        while self._waits and self._end(over.overdue()):
            self._grant()
        if self._waits and self._alarm is None:
            self._alarm = Alarm(LOOK_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._look()

    def _end_excess(self) -> None:
        while self.room.is_over and self._end(self.room.worst(self._now_s())):
            pass

    def _end(self, upload: Upload | None) -> bool:
        """End a body, which frees its place at once; False: there is none."""
        holding = None if upload is None else self._holdings.pop(upload, None)
        if holding is None:
            return False
        held_bytes, now_s = self.room.held_bytes, self._now_s()
        self.room.leave(holding.upload)
        holding.reschedule(now_s)
        if (before := self._throttle.turn("full", now_s)) is not None:
            _log.warning(
                "bodies that are not complete have %d of %d MiB: the largest and slowest end%s",
                held_bytes >> 20,
                self.room.max_bytes >> 20,
                more(before),
            )
        return True
