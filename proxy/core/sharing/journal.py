"""Journal: what a replica has to tell the others.

Rows are the difference to what it told last. Events are noted until the next batch: of prompts by
`BlockUses` (core.routing.lifecycle), of sessions' turns by the router. As long as no batch can be
told they gather, and of too many the oldest go.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from proxy.core.accounts.instances import InstanceState, InstanceStates
from proxy.core.accounts.lease import Lease, Numbers
from proxy.core.kvcache.engine_cache import Use
from proxy.core.kvcache.sessions import MARK, Stay
from proxy.core.latency.model import Reserved
from proxy.core.sharing.batch import (
    ALL_PREFILLS,
    MOST_EVENTS,
    MOST_HASHES,
    MOST_PREFILLS,
    MOST_TURNS,
    Batch,
    Course,
    Event,
    Prefill,
    Prompt,
    Row,
    Turn,
)
from proxy.core.types import RequestFacts

WHOLE_S: Final = 0.5
"""How often all rows are told, changed or not: so a lost batch is repaired, and silence seen."""
KEPT_HASHES: Final = 1 << 19
"""Hashes that gather while no batch can be told, 4 MiB."""
KEPT_EVENTS, KEPT_TURNS = 1 << 16, 1 << 14
MICROSECONDS = 1e6


class _Told:
    """What a row was made of; equal to that of a row that says the same."""

    __slots__ = ("keys", "numbers", "recent_at_s", "turn_s")

    def __init__(
        self, numbers: Numbers, keys: tuple[int, ...], recent_at_s: float, turn_s: float
    ) -> None:
        self.numbers, self.keys = numbers, keys
        self.recent_at_s, self.turn_s = recent_at_s, turn_s

    def is_as(self, other: _Told) -> bool:
        """Whether two rows say the same."""
        return (
            self.numbers == other.numbers
            and self.keys == other.keys
            and self.recent_at_s == other.recent_at_s
            and self.turn_s == other.turn_s
        )


class Journal:
    """What one replica tells of its instances. `writer`: its name, of its process alone."""

    def __init__(self, states: InstanceStates, writer: str) -> None:
        self.writer = writer
        self._states = states
        self._number = 0
        self._told: dict[str, _Told] = {}
        self._whole_s = -math.inf
        self._events: deque[Event] = deque()
        self._hashes = 0
        """Of all events."""
        self._uses: dict[Use, int] = {}
        """Open uses with their numbers."""
        self._turns: deque[Turn] = deque(maxlen=KEPT_TURNS)
        self._running: dict[Lease, int] = {}
        """Open turns with their numbers, by the leases of their requests."""
        self._begun = 0

    def began(self, course: Course, use: Use, facts: RequestFacts) -> None:
        """A prompt is to be computed in a cache, or has come there: BEGUN or RECEIVED."""
        self._begun += 1
        self._uses[use] = self._begun
        hashes, tokens = facts.block_hashes, facts.prompt_tokens
        if len(hashes) > MOST_HASHES:
            hashes = hashes[:MOST_HASHES]
        prompt = Prompt(use.cache.name, hashes, facts.block_tokens, tokens, facts.tenant)
        self._note(Event(course, self._begun, prompt, 0.0))

    def went_on(self, course: Course, use: Use, amount: float = 0.0) -> None:
        """More of a use; one that is RELEASED or has ENDED is over."""
        is_over = course is Course.RELEASED or course is Course.ENDED
        number = self._uses.pop(use, None) if is_over else self._uses.get(use)
        if number is not None:
            self._note(Event(course, number, None, amount))

    def _note(self, event: Event) -> None:
        self._events.append(event)
        self._hashes += _hashes(event)
        while self._hashes > KEPT_HASHES or len(self._events) > KEPT_EVENTS:
            self._hashes -= _hashes(self._events.popleft())

    def placed(self, lease: Lease, stay: Stay, tenant: str) -> None:
        """A request is a turn of a session."""
        if not stay.key or stay.key.startswith(MARK):
            return  # nobody else can know it: it has no name, or one that this process has counted
        self._begun += 1
        self._running[lease] = number = self._begun
        at, shared = stay.cache.name, stay.shared_tokens
        self._turns.append(Turn(number, stay.key, at, stay.tokens, shared, tenant))

    def moved(self, lease: Lease, name: str) -> None:
        """A request's turn goes on at another instance."""
        if (number := self._running.get(lease)) is not None:
            self._turns.append(Turn(number, "", name, None, 0, ""))

    def over(self, lease: Lease, tokens: int | None) -> None:
        """A request's turn is over; `tokens`: of its context, None if it failed."""
        if (number := self._running.pop(lease, None)) is not None:
            self._turns.append(Turn(number, "", "", tokens, 0, ""))

    def batch(self, now_s: float) -> Batch | None:
        """What is new since the last batch; None where that is nothing."""
        is_whole = now_s - self._whole_s >= WHOLE_S
        if is_whole:
            self._whole_s = now_s
        rows: list[Row] = []
        told: dict[str, _Told] = {}
        states = list(self._states)
        most = max(1, min(MOST_PREFILLS, ALL_PREFILLS // max(1, len(states))))
        for state in states:
            new, last = _now(state), self._told.get(state.name)
            told[state.name] = new
            if is_whole or last is None or not new.is_as(last):
                rows.append(_row(state, new, now_s, most))
        self._told = told
        if not (rows or self._events or self._turns or is_whole):
            return None
        self._number += 1
        events, turns = self._first_events(), self._first_turns()
        uses = tuple(self._uses.values()) if is_whole else ()
        running = tuple(self._running.values()) if is_whole else ()
        said = self.writer, self._number
        return Batch(*said, tuple(rows), events, turns, is_whole, uses, running)

    @property
    def has_more(self) -> bool:
        """Whether not all events were in the last batch."""
        return bool(self._events or self._turns)

    def _first_events(self) -> tuple[Event, ...]:
        found: list[Event] = []
        hashes = 0
        while self._events and len(found) < MOST_EVENTS:
            hashes += _hashes(self._events[0])
            if hashes > MOST_HASHES:
                break
            found.append(self._events.popleft())
            self._hashes -= _hashes(found[-1])
        return tuple(found)

    def _first_turns(self) -> tuple[Turn, ...]:
        found: list[Turn] = []
        while self._turns and len(found) < MOST_TURNS:
            found.append(self._turns.popleft())
        return tuple(found)

    def take_back(self, batch: Batch) -> None:
        """A batch may not have been told: its events are told again, and all rows."""
        for event in reversed(batch.events):
            self._events.appendleft(event)
            self._hashes += _hashes(event)
        for turn in reversed(batch.turns):
            if len(self._turns) < KEPT_TURNS:
                self._turns.appendleft(turn)
        self.tell_all()

    def tell_all(self) -> None:
        """Make the next batch a whole one."""
        self._whole_s = -math.inf

    def last(self) -> Batch:
        """The batch that says that this replica is gone, and all that it has with it."""
        self._number += 1
        said = self.writer, self._number
        return Batch(*said, (), (), (), is_whole=True, uses=(), running=(), is_gone=True)


def _hashes(event: Event) -> int:
    return 0 if event.prompt is None else len(event.prompt.hashes)


def _now(state: InstanceState) -> _Told:
    times = state.times
    if times is None:
        return _Told(state.account.own(), (), 0.0, -math.inf)
    keys = tuple([key for key in times.pending if key > 0])
    return _Told(state.account.own(), keys, times.recent_at_s, times.turn_s)


def _row(state: InstanceState, told: _Told, now_s: float, most: int) -> Row:
    times = state.times
    if times is None:
        return Row(state.name, told.numbers, (), 0.0, 0.0, 0.0, math.inf)
    own = times.own_pending()
    if len(own) > most:
        own[most - 1 :] = [_summed(own[most - 1 :])]
    prefills = tuple([_prefill(one, now_s) for one in own])
    return Row(
        state.name,
        told.numbers,
        prefills,
        times.recent,
        times.recent_s,
        now_s - times.recent_at_s,
        now_s - times.turn_s,
    )


def _summed(rest: list[Reserved]) -> Reserved:
    """The rest of a long queue as one prefill, which has no key of its own."""
    work_s, share_s = math.fsum([one[1] for one in rest]), math.fsum([one[2] for one in rest])
    return 0, work_s, share_s, rest[0][3]


def _prefill(one: Reserved, now_s: float) -> Prefill:
    """A key may come back with another prefill, which has begun later."""
    key, work_s, share_s, since_s = one
    mark = since_s if key else work_s
    return Prefill((key, round(mark * MICROSECONDS)), work_s, share_s, now_s - since_s)
