"""The sender of Mooncake transfers: a pure state machine, one per engine.

A finished prefill leg is pinned under its transfer id until a pull has taken it or the abort
timeout has passed. Each pull occupies one of few sender slots. A pull for an id that is not pinned
keeps its slot until the leg finishes or times out, so such orphan pulls delay valid ones. vLLM >=
0.16 does the same with its 20 sender tasks and 480 s. NIXL has no sender slots: the receiver reads
P's memory, even after P has released the blocks.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import count

from replayer.engine.costs import TransferCost
from replayer.engine.types import Pull, PullServed, SimRequest, Unpinned

SenderEvent = PullServed | Unpinned


@dataclass(slots=True, eq=False)
class _Slot:
    """One pull in a sender slot; `source` is None while the prefill leg is unknown."""

    pull: Pull
    due_s: float
    source: SimRequest | None = None


@dataclass(slots=True, eq=False)
class _Pin:
    transfer_id: str
    request: SimRequest


class Sender:
    """Pins, sender slots and their timers. Times in engine seconds."""

    def __init__(
        self,
        cost: TransferCost,
        slots: int,
        abort_timeout_s: float,
        *,
        reads_anything: bool = False,
    ) -> None:
        self._cost = cost
        self._slots = slots
        self._timeout_s = abort_timeout_s
        self._reads_anything = reads_anything
        self._pins: dict[str, _Pin] = {}
        self._active: set[_Slot] = set()
        self._queue: deque[Pull] = deque()
        self._timers: list[tuple[float, int, _Slot | _Pin]] = []
        self._order = count()
        self._events: list[SenderEvent] = []
        self.bytes_sent = 0
        self.expired = 0
        self.failed = 0
        self.stale = 0
        """Pulls of released KV with NIXL: the receiver reads what that memory holds by then."""

    @property
    def pinned(self) -> list[SimRequest]:
        """Prefill legs whose KV is kept for a pull."""
        return [pin.request for pin in self._pins.values()]

    @property
    def busy_slots(self) -> int:
        """Sender slots in use, orphans included."""
        return len(self._active)

    def next_s(self) -> float:
        """Time at which the next transfer, pin or orphan ends; infinity if there is none."""
        if self._events:
            return -math.inf
        return self._timers[0][0] if self._timers else math.inf

    def pin(self, transfer_id: str, request: SimRequest, now_s: float) -> None:
        """Keep a finished prefill leg's KV, or serve the pull that already waits for it."""
        for slot in self._active:
            if slot.source is None and slot.pull.transfer_id == transfer_id:
                self._transfer(slot, request, now_s)
                return
        self._unpin(self._pins.pop(transfer_id, None), now_s)
        pin = _Pin(transfer_id, request)
        self._pins[transfer_id] = pin
        self._set_timer(now_s + self._timeout_s, pin)

    def pull(self, pull: Pull, now_s: float) -> None:
        """Take a slot for a pull, or queue it until one is free."""
        if len(self._active) >= self._slots:
            self._queue.append(pull)
            return
        slot = _Slot(pull, now_s + self._timeout_s)
        self._active.add(slot)
        pin = self._pins.pop(pull.transfer_id, None)
        if pin is None and self._reads_anything:
            self._active.discard(slot)
            self.stale += 1
            self._events.append(PullServed(now_s, pull, ok=True))
        elif pin is None:
            self._set_timer(slot.due_s, slot)
        else:
            self._transfer(slot, pin.request, now_s)

    def advance(self, now_s: float) -> list[SenderEvent]:
        """Handle the timers due by `now_s`; return the events since the last call, in order."""
        while self._timers and self._timers[0][0] <= now_s:
            at_s, _order, owner = heapq.heappop(self._timers)
            if isinstance(owner, _Slot):
                # A slot whose leg came late still has its first timer in the heap.
                if owner.due_s == at_s and owner in self._active:
                    self._finish_pull(owner, at_s)
            elif self._pins.get(owner.transfer_id) is owner:
                self.expired += 1
                self._unpin(self._pins.pop(owner.transfer_id), at_s)
        events, self._events = self._events, []
        return events

    def _set_timer(self, at_s: float, owner: _Slot | _Pin) -> None:
        heapq.heappush(self._timers, (at_s, next(self._order), owner))

    def _unpin(self, pin: _Pin | None, at_s: float) -> None:
        if pin is not None:
            self._events.append(Unpinned(at_s, pin.request))

    def _transfer(self, slot: _Slot, source: SimRequest, now_s: float) -> None:
        slot.source = source
        slot.due_s = now_s
        if _enough(slot.pull, source):
            slot.due_s += self._cost.transfer_s(slot.pull.tokens)
        self._set_timer(slot.due_s, slot)

    def _finish_pull(self, slot: _Slot, at_s: float) -> None:
        self._active.discard(slot)
        source, tokens = slot.source, slot.pull.tokens
        ok = source is not None and _enough(slot.pull, source)
        if source is not None:
            source.sent_tokens = tokens if ok else 0
            self._events.append(Unpinned(at_s, source))
        self._events.append(PullServed(at_s, slot.pull, ok))
        self.failed += not ok
        if ok and tokens:
            self.bytes_sent += tokens * self._cost.bytes_per_token
        if self._queue:
            self.pull(self._queue.popleft(), at_s)


def _enough(pull: Pull, source: SimRequest) -> bool:
    """Whether the leg has as many tokens as the pull asks for; vLLM refuses the pull if not."""
    return pull.tokens <= source.job.prompt_tokens
