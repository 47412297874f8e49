"""Replicas: this proxy's part in what the replicas of one fleet tell each other over a bus.

One task tells what is new here and hears what is new elsewhere, every TICK_S. No request waits for
it. Where the bus is gone this replica goes on alone: what others have told is dropped as one after
SILENT_S, and what is to be told gathers in the journal.

This replica reads its own batches too. So their age is known on one clock, and a missing one shows
that the log is another one: it was emptied, or another server has taken over. Then the position in
it means nothing. Reading starts again there, and all rows are told anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.core.routing.router import Router
from proxy.core.sharing.apply import SILENT_S, WRITERS_MAX, Others, Steps
from proxy.core.sharing.batch import Batch
from proxy.core.sharing.journal import Journal
from proxy.net.bus.base import Bus, BusError, Heard
from proxy.net.bus.form import BatchError, BatchForm, Decoded, Place, Places
from proxy.net.timeouts import Clock
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.metrics import PREFIX, single

TICK_S: Final = 0.025
QUIET_TICK_S, QUIET_S = 0.1, 1.0
"""The tick once nothing has changed for QUIET_S."""
SLICE_S: Final = 0.001
"""After so much time other tasks have a turn, while much is taken in."""
RETRY_S, RETRY_MOST_S = 0.05, 2.0
LEAVE_S: Final = 1.0
"""Time limit of the last batch."""
UNECHOED_MAX: Final = 1024
"""Own batches that have not come back; the time of an older one is not known any more."""
WARNED_MAX: Final = 64
"""Writers of which it was logged what is wrong with their batches."""
DEFECT: Final = "an error in this proxy, which the log has"
_RESULTS = ("sent", "failed", "own", "applied", "rows_only", "torn", "form", "range", "unheard")
_log = logging.getLogger(__name__)


class State(IntEnum):
    """What this replica knows of the others."""

    ALONE = 0
    """The bus does not answer: nothing."""
    JOINING = 1
    """It answers, and this replica's own batches have not come back in time yet."""
    SHARED = 2


class Replicas(Collector):
    """The exchange with the other replicas, and its metrics; a task runs it.

    `about`: of the others, what they say of themselves; without this one.
    """

    def __init__(self, bus: Bus, form: BatchForm, router: Router, clock: Clock) -> None:
        self.id = secrets.token_hex(8)
        self.state = State.JOINING
        self.lag_s = math.inf
        """Age of the last own batch that came back, when it did."""
        self.resets = 0
        self.about: dict[str, str] = {}
        self.unknown = 0
        """Instances of the last batch with rows that are not known here."""
        self._bus, self._form, self._known, self._clock = bus, form, router.known, clock
        self._journal = Journal(self._known.fleet.states, self.id)
        self._others = Others(self._known, self.id)
        self._results = dict.fromkeys(_RESULTS, 0)
        self._sent_s: OrderedDict[int, float] = OrderedDict()
        now_s = clock.now_s()
        self._ticked_s = self._changed_s = self._answered_s = now_s
        self._echoed_s = -math.inf
        """When the last own batch that came back was sent."""
        self._placed: list[Place] = []
        self._at = Places(())
        self._is_stale = False
        """What others have told holds no longer."""
        self._is_behind = False
        """There is more to hear. Nothing is told then before its tick: it would be heard, too."""
        self._told_s = -math.inf
        self._slice_s = 0.0
        """When other tasks have a turn; the loop's own clock stands still until then."""
        self._failures = 0
        self._cause = ""
        self._since_s = 0.0
        """When the state changed last."""
        self._warned: OrderedDict[str, None] = OrderedDict()
        router.share(self._journal)

    async def run(self) -> None:
        """Exchange until cancelled; redis-py loses a cancellation now and then."""
        task = asyncio.current_task()
        while task is None or not task.cancelling():
            is_at_once = await self.tick()
            await asyncio.sleep(0.0 if is_at_once else self._pause_s())

    def _pause_s(self) -> float:
        if self._failures:
            wait_s = min(RETRY_MOST_S, RETRY_S * 2.0 ** min(self._failures - 1, 10))
            return wait_s * random.uniform(0.5, 1.0)
        is_quiet = self._clock.now_s() - self._changed_s > QUIET_S
        return QUIET_TICK_S if is_quiet else TICK_S

    async def tick(self) -> bool:
        """One exchange; returns whether there is more to tell or to hear at once."""
        try:
            return await self._tick()
        except (*DEFECTS, RuntimeError, MemoryError):  # nothing that is told may end the process
            if DEFECT not in self._warned:
                self._warned[DEFECT] = None
                _log.exception("share: an exchange failed")
            self._fail(DEFECT)
            self._journal.tell_all()
            self._know_state(self._clock.now_s())
            return False

    def _fail(self, cause: str) -> None:
        self._failures += 1
        self._cause = cause

    async def _tick(self) -> bool:
        now_s = self._clock.now_s()
        if now_s - self._ticked_s > SILENT_S:
            self._is_stale = True  # this process was stopped
            self._journal.tell_all()
        await self._drop_stale()
        self._ticked_s = now_s
        is_due = not self._is_behind or now_s - self._told_s >= TICK_S
        batch = self._journal.batch(now_s) if is_due else None
        self._told_s = now_s if is_due else self._told_s
        has_more = False
        try:
            heard = await self._exchange(batch)
        except BusError as error:
            self._fail(str(error))
        else:
            self._answered_s = self._clock.now_s()
            has_more = await self._take(heard, batch)
            self._failures = 0
        await self._settle()
        return has_more

    async def _exchange(self, batch: Batch | None) -> Heard:
        """Send a batch and read; what may not have been sent is told again. Raises BusError."""
        data = self._encoded(batch)
        sent_s = self._clock.now_s()
        try:
            heard = await self._bus.exchange(data)
        except BusError:
            if batch is not None:
                self._journal.take_back(batch)
                self._results["failed"] += 1
            raise
        if batch is not None and data is not None:
            self._results["sent"] += 1
            self._sent_s[batch.number] = sent_s
            if batch.has_news:
                self._changed_s = sent_s
            while len(self._sent_s) > UNECHOED_MAX:
                self._sent_s.popitem(last=False)
        return heard

    def _encoded(self, batch: Batch | None) -> bytes | None:
        if batch is None:
            return None
        try:
            return self._form.encode(batch, self._places())
        except BatchError as error:
            self._results["failed"] += 1
            self._warn(self.id, f"own batch is not sent: {error}")
            return None

    async def _take(self, heard: Heard, sent: Batch | None) -> bool:
        """Take in what was heard; returns whether there is more.

        As long as batches are read from a time when this replica did not listen, their rows say
        what is over.
        """
        places = self._places()
        self._is_behind = not heard.is_all
        has_rows = heard.is_all or self._clock.now_s() - self._echoed_s <= SILENT_S
        for data in heard.batches:
            await self._in_turns(self._apply(data, places, has_rows=has_rows))
        if heard.is_all and sent is not None and sent.number in self._sent_s:
            self._reset()
        return not heard.is_all or self._journal.has_more

    async def _in_turns(self, steps: Steps) -> None:
        """Do work in steps, in turns with other tasks."""
        for _ in steps:
            if time.monotonic() > self._slice_s:
                await asyncio.sleep(0)
                self._slice_s = time.monotonic() + SLICE_S

    def _reset(self) -> None:
        """The own batch has not come back: the log is another one than that of the position."""
        self.resets += 1
        self._sent_s.clear()
        self._bus.start_again()
        self._journal.tell_all()

    def _apply(self, data: bytes, places: Places, *, has_rows: bool) -> Steps:
        yield  # decoding is a step of its own
        now_s = self._clock.now_s()
        try:
            decoded = self._form.decode(data, places)
        except BatchError as error:
            self._results[error.kind] += 1
            self._warn(error.kind, f"a batch is ignored: {error}")
            return
        batch = decoded.batch
        if batch.writer == self.id:
            self._results["own"] += 1
            if (sent_s := self._sent_s.pop(batch.number, None)) is not None:
                self._echoed_s, self.lag_s = sent_s, now_s - sent_s
            return
        if not self._others.hears(batch.writer):
            self._results["unheard"] += 1
            self._warn("unheard", f"more than {WRITERS_MAX} others write: the rest is not heard")
            return
        self._results["applied" if decoded.is_readable else "rows_only"] += 1
        self._note(decoded)
        if batch.has_news:
            self._changed_s = now_s
        if not has_rows:
            batch = batch._replace(rows=(), is_whole=False)
        yield
        yield from self._others.steps(batch, now_s)

    def _note(self, decoded: Decoded) -> None:
        writer = decoded.batch.writer
        if not decoded.is_readable:
            text = "its prompts and sessions are not read: another --share-key, or another version"
            self._warn(writer, f"replica {writer}: {text}")
        if decoded.batch.is_whole:
            self.about[writer], self.unknown = decoded.about, decoded.unknown

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned[about] = None
            _log.warning("share: %s", text)
            if len(self._warned) > WARNED_MAX:
                self._warned.popitem(last=False)

    async def _drop_stale(self) -> None:
        if self._is_stale:
            await self._in_turns(self._others.drop_all(self._clock.now_s()))
            self._is_stale = False

    async def _settle(self) -> None:
        """Drop who is silent, and say so where the state has changed."""
        now_s = self._clock.now_s()
        await self._in_turns(self._others.drop_silent(now_s))
        if len(self.about) > self._others.writers:
            heard = {name for name, *_ in self._others.heard(now_s)}
            self.about = {name: about for name, about in self.about.items() if name in heard}
        self._know_state(now_s)
        await self._drop_stale()

    def _know_state(self, now_s: float) -> None:
        if now_s - self._echoed_s <= SILENT_S:
            state = State.SHARED
        elif self._failures and (self.state is not State.JOINING or self._is_unanswered(now_s)):
            state = State.ALONE
        else:
            state = State.JOINING
        if state is self.state:
            return
        self._is_stale |= self.state is State.SHARED
        self.state, self._since_s = state, now_s
        told = {
            State.ALONE: f"alone: {self._cause}",
            State.JOINING: "joining",
            State.SHARED: "shared",
        }
        _log.log(
            logging.WARNING if state is State.ALONE else logging.INFO, "share: %s", told[state]
        )

    @property
    def fault(self) -> tuple[str, float] | None:
        """Why it is alone, and since when in unix seconds; None where it is not."""
        if self.state is not State.ALONE:
            return None
        return f"share: alone: {self._cause}", self._clock.unix(self._since_s)

    def _is_unanswered(self, now_s: float) -> bool:
        return now_s - self._answered_s > SILENT_S

    def _places(self) -> Places:
        """The instances; the same object as long as they are the same."""
        members = self._known.fleet.members()
        found = [(m.instance.name, m.instance.url, m.state.start_s) for m in members]
        if found != self._placed:
            self._placed, self._at = found, Places(found)
        return self._at

    async def close(self) -> None:
        """Tell the others that this replica is gone, where they can hear it."""
        try:
            async with asyncio.timeout(LEAVE_S):
                if self.state is State.SHARED:
                    await self._bus.close()  # an exchange may have been cancelled
                    await self._bus.exchange(self._encoded(self._journal.last()))
        except (BusError, TimeoutError):
            pass  # they drop it once it is silent
        await self._bus.close()

    def told(self) -> dict[str, Any]:
        """The answer of GET /replicas."""
        now_s = self._clock.now_s()
        return {
            "id": self.id,
            "state": self.state.name.lower(),
            "lag_s": None if math.isinf(self.lag_s) else round(self.lag_s, 4),
            "unknown_instances": self.unknown,
            "others": [
                {
                    "id": name,
                    "about": self.about.get(name),
                    "heard_s_ago": round(age_s, 3),
                    "requests": requests,
                }
                for name, age_s, requests in self._others.heard(now_s)
            ],
        }

    def collect(self) -> Iterator[Metric]:
        """The metrics of sharing; see `Collector`."""
        yield single("share_state", "0 alone, 1 joining, 2 shared", self.state)
        yield single("share_replicas", "Other replicas that are heard", self._others.writers)
        lag_s = math.nan if math.isinf(self.lag_s) else self.lag_s
        yield single("share_lag_seconds", "Time until the last own batch came back", lag_s)
        text = "Batches told and heard, by what became of them"
        batches = CounterMetricFamily(f"{PREFIX}_share_batches", text, labels=["result"])
        for result, count in self._results.items():
            batches.add_metric([result], count)
        yield batches
        text = "Positions that were void: the log was emptied, or is another server's"
        yield CounterMetricFamily(f"{PREFIX}_share_resets", text, value=self.resets)
        text = "Prefill, inbound and decode tokens of other replicas"
        foreign = GaugeMetricFamily(f"{PREFIX}_foreign_tokens", text, labels=["upstream"])
        for state in self._known.fleet.states:
            numbers = state.account.foreign
            tokens = 0 if numbers is None else numbers[0] + numbers[2] + numbers[4]
            foreign.add_metric([state.name], tokens)
        yield foreign
