"""Evictions from hot instances: the requests to evict, their targets, and the reasons to stay.

Pure: a driver says what runs on an instance, and performs the rows that it gets. Evictions are
limited by the wait that they save, the migration bandwidth, and a share of the running requests per
minute. An emergency or an operator's order is limited by the bandwidth only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from proxy.core.admission.gate import ANY_MODEL
from proxy.core.known.fleet_state import FleetState
from proxy.core.thermal.fleet_control import EMERGENCY, FleetControl
from proxy.core.thermal.readings import HeatLimits
from proxy.core.thermal.victims import MoveBudget, Victim, is_worth_moving, most_evictions
from proxy.core.types import Instance, Reject, RequestFacts

MINUTE_S, MOST_LEFT = 60.0, 4096
BYTES_PER_TOKEN = 131_072
"""Bytes of KV per token, for the migration bandwidth: an 8B model with 8 KV heads in 16 bits."""
FLEET_BYTES_PER_S = 20e9
"""The founding document's bound on what evictions move, over the whole fleet."""
NO_BANDWIDTH = "the bandwidth of moves is used up"
NO_PLACE = "no other instance may take it now"
SHORT_WAIT = "the wait for its place is shorter than the move"


class Places(Protocol):
    """The router, as far as evictions ask it."""

    known: FleetState

    def would_go(self, facts: RequestFacts, left: str, now_s: float) -> Instance | Reject:
        """The instance that a stream would migrate to now."""


class Running:
    """A request on a hot instance; `why_fixed`: the reason that it cannot migrate."""

    __slots__ = ("facts", "victim", "why_fixed")

    def __init__(self, victim: Victim, facts: RequestFacts, why_fixed: str | None) -> None:
        self.victim, self.facts, self.why_fixed = victim, facts, why_fixed


class Wanted(NamedTuple):
    """Evictions wanted from an instance: their number and policy (None: control's choice).

    `is_forced`: whatever the wait is that it saves, and how many have left within a minute.
    """

    most: int
    policy: str | None
    is_forced: bool


class Eviction:
    """A request that was chosen to leave. `why_not`: why it stays; None: it leaves.

    `target`: where it is expected to go on, by today's loads; `move_s`: what its KV would take to
    there, seconds. Both are None where it is ended instead, or nobody would take it.
    """

    __slots__ = ("instance", "move_s", "target", "victim", "why_not")

    def __init__(
        self,
        instance: str,
        victim: Victim,
        target: str | None,
        move_s: float | None,
        why_not: str | None,
    ) -> None:
        self.instance, self.victim = instance, victim
        self.target, self.move_s, self.why_not = target, move_s, why_not

    @property
    def is_end(self) -> bool:
        """Whether the request is ended because it cannot migrate."""
        return self.why_not is None and not self.victim.is_movable


class Evictions:
    """Chooses who leaves the instances of a router, under a fleet's thermal control."""

    def __init__(self, router: Places, control: FleetControl) -> None:
        self._router, self._control = router, control
        self.may_abort = False
        """Requests that cannot be moved may be ended: in an emergency, or by an order."""
        self.budget = MoveBudget(FLEET_BYTES_PER_S)
        self._left: dict[str, deque[float]] = {}

    def keep(self, names: Sequence[str]) -> None:
        """Forget every instance but these."""
        self._left = {name: left for name, left in self._left.items() if name in names}

    def wanted(self, name: str, limits: HeatLimits, now_s: float) -> Wanted:
        """The evictions that an instance's limits ask for: by control, or by an order."""
        order = self._control.status(name).order
        policy = None if order is None else order.order.policy
        is_forced, count = self._control.state(name) == EMERGENCY, limits.evict
        if count and not is_forced and policy is None:
            count = min(count, self._rest(name, now_s))
        return Wanted(count, policy, is_forced)

    def plan(
        self, name: str, running: Sequence[Running], wanted: Wanted, now_s: float
    ) -> list[Eviction]:
        """The requests to evict from an instance, in order."""
        victims = [one.victim for one in running]
        chosen = self._control.victims(
            name, victims, wanted.most, now_s, wanted.policy, may_abort=wanted.is_forced
        )
        by_victim = {id(one.victim): one for one in running}
        return [
            self._row(name, by_victim[id(victim)], now_s, is_forced=wanted.is_forced)
            for victim in chosen
        ]

    def take(self, row: Eviction, now_s: float) -> bool:
        """Whether a row is to be performed now; where it moves, its bandwidth is taken."""
        if row.why_not is not None:
            return False
        if row.is_end:
            return True
        tps = self._router.known.latency.transfer_tps(row.instance)
        link = None if tps is None else tps * BYTES_PER_TOKEN
        moved = float(row.victim.kv_tokens * BYTES_PER_TOKEN)
        if self.budget.take(row.instance, moved, now_s, link) > 0.0:
            row.why_not = NO_BANDWIDTH
            return False
        self._left_by(row.instance).append(now_s)
        return True

    def _row(self, name: str, one: Running, now_s: float, *, is_forced: bool) -> Eviction:
        victim, why = one.victim, one.why_fixed
        if why is not None:
            return Eviction(name, victim, None, None, None if is_forced and self.may_abort else why)
        target = self._router.would_go(one.facts, name, now_s)
        if isinstance(target, Reject):
            return Eviction(name, victim, None, None, NO_PLACE)
        move_s = self._router.known.latency.transfer_s(name, target.name, victim.kv_tokens)
        if not is_forced:
            busy = self._router.known.busy(name, ANY_MODEL, now_s)
            if not is_worth_moving(0.0 if busy is None else busy.free_in_s, move_s):
                return Eviction(name, victim, target.name, move_s, SHORT_WAIT)
        return Eviction(name, victim, target.name, move_s, None)

    def _rest(self, name: str, now_s: float) -> int:
        """Number of further evictions from an instance within this minute."""
        left = self._left_by(name)
        while left and now_s - left[0] >= MINUTE_S:
            left.popleft()
        return most_evictions(self._router.known.ledger.own(name).running_requests, len(left))

    def _left_by(self, name: str) -> deque[float]:
        left = self._left.get(name)
        if left is None:
            left = self._left[name] = deque(maxlen=MOST_LEFT)
        return left
