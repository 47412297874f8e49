"""Discovery: asks every source of `--discover`, and hands what they tell to the one door.

What a source told last stays while it tells nothing, or no instance that may be used. Health
decides then who serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.config.in_force import OptionsInForce
from proxy.config.values import InstanceSpec
from proxy.fleet.discovery.base import DiscoveryError, Found, Source
from proxy.fleet.membership import DISCOVERY, Answer, Membership, Verdict
from proxy.net.addresses import refused
from proxy.net.timeouts import Clock, Limit
from proxy.protocol.errors import DEFECTS
from proxy.telemetry.log import Throttle, log_each, more
from proxy.telemetry.metrics import PREFIX

FIRST_S = 3.0
"""The start waits for so long for what the sources tell first."""
PAUSE_S, MOST_PAUSE_S = 0.5, 3.0
"""Pause between two connections to a source; each failure in a row doubles it, up to the second."""
AGAIN_S = 1.0
"""An instance that cannot come yet is offered again after this time."""
CHECKS = 32
"""Addresses that are checked in one turn of the loop; one takes up to 50 us."""
_ODD = "it tells what the proxy cannot take"
_DEFECTS = (*DEFECTS, OSError, RuntimeError)
"""Nothing that a source tells may end the periodic tasks, and so the process."""
_NONE = "it tells no instance that may be used"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """One source, and what is known by it."""

    source: Source
    told_s: float
    """When it told, or proved, its instances last; first: when the proxy began."""
    last: dict[str, InstanceSpec] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    """URLs that it names and that may not be used."""
    fault: str | None = None
    """Why `last` is old; None while it is not."""


class Discovery:
    """The instances that sources find. `count_refused` is called once for each refused address."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        members: Membership,
        options: OptionsInForce,
        clock: Clock,
        count_refused: Callable[[str], None],
    ) -> None:
        self._members, self._options, self._clock = members, options, clock
        self._count_refused = count_refused
        now_s = clock.now_s()
        self._asked = {text: _Asked(source, now_s) for text, source in sources.items()}
        self._is_told = asyncio.Event()
        """Set where the fleet is not offered yet what a source has told."""
        self._has_waiting = False
        """Whether an instance cannot come yet: its name or address drains, or has another owner."""
        self._late: set[str] = set()
        """Names that the fleet has not taken of the last offer."""
        self._throttle = Throttle()

    @property
    def faults(self) -> dict[str, str]:
        """Why what a source told last is old, by source."""
        return {text: asked.fault for text, asked in self._asked.items() if asked.fault}

    @property
    def fault(self) -> tuple[str, float] | None:
        """The first of them for /health, and since when nothing was told, in unix seconds."""
        for text, why in self.faults.items():
            return f"discovery {text}: {why}", self._clock.unix(self._asked[text].told_s)
        return None

    def ages_s(self) -> dict[str, float]:
        """How long ago each source told its instances."""
        now_s = self._clock.now_s()
        return {text: max(0.0, now_s - asked.told_s) for text, asked in self._asked.items()}

    async def begin(self) -> None:
        """Ask every source once, for FIRST_S at most, and bring in what they tell."""
        async with asyncio.TaskGroup() as group:
            for text in self._asked:
                group.create_task(self._look(text))
        await self._offer()

    async def run(self) -> None:
        """Follow every source until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._offering())
            for text in self._asked:
                group.create_task(self._follow(text))

    async def _look(self, text: str) -> None:
        try:
            with Limit(FIRST_S):
                found = await self._asked[text].source.look()
            await self._told(text, found)
        except TimeoutError:
            self._failed(text, f"no answer in {FIRST_S:g} s")
        except DiscoveryError as error:
            self._failed(text, str(error))
        except _DEFECTS as error:
            self._failed(text, _ODD, error)

    async def _follow(self, text: str) -> None:
        pause_s = PAUSE_S
        while True:
            try:
                await self._asked[text].source.follow(lambda found: self._told(text, found))
                pause_s = PAUSE_S
            except DiscoveryError as error:
                self._failed(text, str(error))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            except _DEFECTS as error:
                self._failed(text, _ODD, error)
                pause_s = MOST_PAUSE_S
            await asyncio.sleep(pause_s)

    async def _offering(self) -> None:
        while True:
            with suppress(TimeoutError), Limit(AGAIN_S):
                await self._is_told.wait()
            if self._is_told.is_set() or self._has_waiting:
                await self._offer()

    def _failed(self, text: str, why: str, defect: Exception | None = None) -> None:
        """Log why what a source told last stays: one line per cause, and now and then again.

        Of a `defect` the traceback too.
        """
        asked = self._asked[text]
        asked.fault = why
        suppressed = self._throttle.turn((text, why), self._clock.now_s())
        if suppressed is not None:
            stay = f"the last set of {len(asked.last)} stays" if asked.last else "no instance yet"
            said = text, why, stay, more(suppressed)
            _log.warning("discovery %s: %s; %s%s", *said, exc_info=defect)

    async def _told(self, text: str, found: Found) -> None:
        """Take what a source tells; where none of it may be used, what it told last stays."""
        asked = self._asked[text]
        refusals = await self._refusals([*found.instances, *asked.last.values()])
        usable = {s.name: s for s in found.instances if s.url not in refusals}
        self._note_refused(text, {s.url for s in found.instances} & refusals.keys(), refusals)
        kept = {
            name: spec
            for name, spec in asked.last.items()
            if name not in found.leaving and spec.url not in refusals
        }
        if usable or not (kept or found.instances):
            asked.last, asked.told_s = usable, self._clock.now_s()
            has_come_back = asked.fault is not None
            if has_come_back and self._throttle.turn((text, None), asked.told_s) is not None:
                _log.info("discovery %s: it tells its instances again: %d", text, len(usable))
            asked.fault = None
        else:
            asked.last = kept
            self._failed(text, _NONE)
        self._is_told.set()

    async def _refusals(self, specs: Iterable[InstanceSpec]) -> dict[str, str]:
        """Why URLs may not be used, by URL."""
        allowed, own_ports = self._options.settings.allow_cidr, self._members.own_ports
        found = {}
        for turn, url in enumerate({spec.url for spec in specs}, 1):
            if not turn % CHECKS:
                await asyncio.sleep(0)
            parts = urlsplit(url)
            address = ip_address(parts.hostname or "")
            if why := refused(address, parts.port or 0, allowed, own_ports):
                found[url] = why
        return found

    def _note_refused(self, text: str, urls: set[str], why: Mapping[str, str]) -> None:
        asked = self._asked[text]
        for url in sorted(urls - asked.refused):
            self._count_refused(text)
            suppressed = self._throttle.turn((text, "refused"), self._clock.now_s())
            if suppressed is not None:
                _log.warning(
                    "discovery %s: an address is refused: %s%s", text, why[url], more(suppressed)
                )
        asked.refused = frozenset(urls)

    async def _offer(self) -> None:
        """Offer the fleet what all sources told last, until they tell more."""
        self._is_told.clear()
        try:
            await self._bring_in(dict(self._wanted()))
        except _DEFECTS as error:
            for text in self._asked:
                self._failed(text, _ODD, error)

    async def _bring_in(self, wanted: Mapping[str, InstanceSpec]) -> None:
        """Bring the fleet to what is wanted.

        What has moved to another address is left out once, so that it drains there first.
        """
        offered = self._members.listed(DISCOVERY)
        coming = [s for name, s in wanted.items() if offered.get(name, s) == s]
        answers: list[Answer] = []
        for some in self._members.steps(DISCOVERY, coming):
            answers += some
            await asyncio.sleep(0)
            if self._is_told.is_set():
                break
        else:
            self._note_late({a.name for a in answers if a.verdict is Verdict.REFUSED})
            self._has_waiting = len(self._members.listed(DISCOVERY)) < len(wanted)
        new = [a.spec for a in answers if a.spec is not None and a.verdict is Verdict.NEW]
        log_each(_log, {spec.name: f"added: {spec.url}" for spec in new}, "added")
        why = "drains: no discovery wants it any more"
        gone = {a.name: why for a in answers if a.verdict is Verdict.DRAIN}
        log_each(_log, gone, "drain, no discovery wants them any more")

    def _note_late(self, late: set[str]) -> None:
        for name in sorted(late - self._late):
            suppressed = self._throttle.turn("late", self._clock.now_s())
            if suppressed is not None:
                why = "its name or address is another's, or still drains"
                _log.warning("discovery: instance %s waits: %s%s", name, why, more(suppressed))
        self._late = late

    def _wanted(self) -> Iterator[tuple[str, InstanceSpec]]:
        """Instances by name; of two with one name or address the first source's."""
        names: set[str] = set()
        urls: set[str] = set()
        for asked in self._asked.values():
            for name, spec in asked.last.items():
                if name not in names and spec.url not in urls:
                    names.add(name)
                    urls.add(spec.url)
                    yield name, spec


class DiscoveryCollector(Collector):
    """The age of what each source told last, at scrape time."""

    def __init__(self, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._ages_s = ages_s

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        text = "Time since the source of --discover last told its instances"
        family = GaugeMetricFamily(f"{PREFIX}_discovery_age_seconds", text, labels=("source",))
        for source, age_s in self._ages_s().items():
            family.add_metric([source], age_s)
        yield family
