"""The schedule of a replay: when each request of a trace is due. Pure: times are arguments.

Two modes. Open loop: a request is due at its timestamp, one with dependencies at
max(timestamp, end of the last dependency + delay). Sessions: a fixed number of slots, each running
whole sessions (with their sub-agents) one after another, with the trace's delays but not its
timestamps.

All times are seconds from the start of the run.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from replayer.trace.loaders import TraceRequest
from replayer.trace.rows import TraceError, short

SHOWN_IN_CIRCLE = 8


@dataclass(frozen=True, slots=True)
class PaceRules:
    """`slots` None: open loop. `think_cap_s` bounds a delay, before the speed-up divides it.

    The first units of the slots start spread over `ramp_s`, which the speed-up divides too.

    With a cap in open loop, a dependent request that has a delay ignores its timestamp, because the
    timestamp contains the pause that the cap is to shorten.
    """

    slots: int | None = None
    speedup: float = 1.0
    think_cap_s: float | None = None
    ramp_s: float = 0.0

    def earliest_s(self, request: TraceRequest) -> float:
        """Return the earliest time at which a request is due, apart from its dependencies."""
        if self.slots is not None or request.arrival_s is None:
            return 0.0
        if self.think_cap_s is not None and request.delay_s is not None:
            return 0.0
        return request.arrival_s / self.speedup

    def pause_s(self, request: TraceRequest) -> float:
        """Return the pause between the end of a request's last dependency and its own start."""
        delay_s = request.delay_s or 0.0
        if self.think_cap_s is not None:
            delay_s = min(delay_s, self.think_cap_s)
        return delay_s / self.speedup


@dataclass(frozen=True, slots=True)
class Due:
    """A request and the time at which it should be sent."""

    request: TraceRequest
    intended_s: float


@dataclass(slots=True)
class _Waiting:
    request: TraceRequest
    order: int
    unit: int
    open_dependencies: int
    ready_s: float = 0.0


def units(requests: Sequence[TraceRequest]) -> list[int]:
    """Number the unit of each request: requests connected through sessions and `wait_for`.

    A session with its sub-agents is one unit; a request without either is a unit by itself.
    """
    parents: dict[str, str] = {}

    def root(key: str) -> str:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = parents[parent]
            key = parent
        return key

    for request in requests:
        own = f"request {request.request_id}"
        sessions = [s for s in (request.session_id, request.parent_session_id) if s is not None]
        others = [f"request {other}" for other in request.wait_for]
        for other in (*(f"session {session}" for session in sessions), *others):
            parents[root(other)] = root(own)
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(root(f"request {request.request_id}"), len(numbers))
        for request in requests
    ]


def check_order(requests: Sequence[TraceRequest]) -> None:
    """Refuse requests that wait for one another in a cycle."""
    try:
        TopologicalSorter({r.request_id: r.wait_for for r in requests}).prepare()
    except CycleError as error:
        names = [short(name) for name in error.args[1]]
        middle = ["..."] if len(names) > SHOWN_IN_CIRCLE else []
        circle = " -> ".join([*names[:SHOWN_IN_CIRCLE], *middle])
        raise TraceError(f"wait_for: must not form a circle: {circle}") from None


class Pace:
    """The schedule of one run. Dependencies that are not among `requests` count as ended."""

    def __init__(self, requests: Sequence[TraceRequest], rules: PaceRules) -> None:
        """Take the requests in file order; `wait_for` must be free of cycles."""
        self._rules = rules
        known = {request.request_id for request in requests}
        self._waiting: dict[str, _Waiting] = {}
        self._dependents: dict[str, list[str]] = {}
        self._units: dict[int, list[_Waiting]] = {}
        self._left: dict[int, int] = {}
        self._heap: list[tuple[float, int, str]] = []
        for order, (request, unit) in enumerate(zip(requests, units(requests), strict=True)):
            needed = {other for other in request.wait_for if other in known}
            waiting = _Waiting(request, order, unit, len(needed))
            self._waiting[request.request_id] = waiting
            self._units.setdefault(unit, []).append(waiting)
            self._left[unit] = self._left.get(unit, 0) + 1
            for other in needed:
                self._dependents.setdefault(other, []).append(request.request_id)
        self._queue = deque(self._units)
        slots = len(self._queue) if rules.slots is None else rules.slots
        for slot in range(slots):
            self._release_unit(slot * rules.ramp_s / slots / rules.speedup)

    @property
    def finished(self) -> bool:
        """Whether every request has ended or was skipped."""
        return not self._waiting

    def next_due_s(self) -> float | None:
        """Return when the next request is due; None if that depends on requests in flight."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, until_s: float) -> list[Due]:
        """Remove and return the requests due by `until_s`, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= until_s:
            intended_s, _order, request_id = heapq.heappop(self._heap)
            due.append(Due(self._waiting[request_id].request, intended_s))
        return due

    def finish(self, request_id: str, end_s: float, *, ok: bool) -> list[TraceRequest]:
        """Note the end of a request; returns its dependents, which are skipped, if it failed."""
        finished = self._waiting.pop(request_id)
        skipped = [] if ok else self._skip_dependents(request_id)
        for other in self._dependents.get(request_id, ()) if ok else ():
            waiting = self._waiting.get(other)
            if waiting is not None:
                waiting.open_dependencies -= 1
                waiting.ready_s = max(waiting.ready_s, end_s + self._rules.pause_s(waiting.request))
                if not waiting.open_dependencies:
                    self._push(waiting)
        self._left[finished.unit] -= 1 + len(skipped)
        if not self._left[finished.unit]:
            self._release_unit(end_s)
        return skipped

    def _release_unit(self, now_s: float) -> None:
        if not self._queue:
            return
        for waiting in self._units.pop(self._queue.popleft()):
            waiting.ready_s = now_s
            if not waiting.open_dependencies:
                self._push(waiting)

    def _push(self, waiting: _Waiting) -> None:
        intended_s = max(waiting.ready_s, self._rules.earliest_s(waiting.request))
        heapq.heappush(self._heap, (intended_s, waiting.order, waiting.request.request_id))

    def _skip_dependents(self, request_id: str) -> list[TraceRequest]:
        skipped = []
        pending = deque(self._dependents.get(request_id, ()))
        while pending:
            waiting = self._waiting.pop(pending.popleft(), None)
            if waiting is not None:
                skipped.append(waiting.request)
                pending.extend(self._dependents.get(waiting.request.request_id, ()))
        return skipped
