"""The one door by which instances come into the fleet, drain, serve again and go.

Sources name instances: the options, operators, discovery, and later others. What one of them wants
against another is decided by `RIGHTS`; whoever adds a source adds a row there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from proxy.config.in_force import OptionsInForce
from proxy.config.values import InstanceSpec
from proxy.core.types import Instance
from proxy.fleet.instances import Instances
from proxy.net.addresses import ForbiddenAddressError, check
from proxy.telemetry.log import log_each

OPTIONS, OPERATORS, DISCOVERY = "options", "operators", "discovery"
LOOK_S = 0.05
"""How often is looked whether an instance has drained, while one drains."""
DRAINED_S = 60.0
"""For so long it is told of an instance that it has drained."""
MOST_DRAINED = 1024
"""Drained instances that are told of; of more the oldest are forgotten."""
STEP = 3
"""Wishes, or removals, in one turn of the loop; beside 1024 instances one takes 1 ms."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rights:
    """What a source may want against the others."""

    drains: frozenset[str] | None
    """It drains an instance though these sources name it; None: whoever does."""
    heeds: frozenset[str]
    """An instance that it names goes on draining where one of these sources drains it."""


RIGHTS = {
    OPERATORS: Rights(drains=None, heeds=frozenset()),
    OPTIONS: Rights(drains=frozenset({OPERATORS}), heeds=frozenset({OPERATORS})),
    DISCOVERY: Rights(drains=frozenset(), heeds=frozenset({OPERATORS})),
}
"""By source. A source always ends its own drain, and drains what nobody else names."""


class Verdict(Enum):
    """What becomes of one wish."""

    NEW = "it is added"
    BACK = "it serves, also where it drained"
    CHANGED = "it is described anew, and goes on as it did"
    DRAIN = "it gets no new request, and is removed when its last one is over"
    KEPT = "it goes on: a source names it that may not be overruled"
    REFUSED = "it is there with another name, address or thermal part"


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of the wish for one instance; `spec` is None where it is to go."""

    name: str
    verdict: Verdict
    spec: InstanceSpec | None = None


@dataclass(slots=True)
class _Wishes:
    named: set[str] = field(default_factory=set)
    """The sources that want the instance to serve."""
    drains: set[str] = field(default_factory=set)
    """The sources that drain it, each with the right to."""


class Membership:
    """Decides who is in the fleet and who drains, and carries it out.

    `on_back` is called when an instance that drained serves again.
    """

    def __init__(
        self, instances: Instances, options: OptionsInForce, on_back: Callable[[], None]
    ) -> None:
        self._instances, self._options, self._on_back = instances, options, on_back
        self._fleet = instances.known.fleet
        self.own_ports: Collection[int] = ()
        """The proxy's own ports, which must not be added as an instance."""
        self._wishes: dict[str, _Wishes] = {}
        """By name; bounded by the instances."""
        self._lists: dict[str, dict[str, InstanceSpec]] = {}
        """What each source that gives whole lists named last, by its name."""
        self._whole: set[str] = set()
        """Those of them whose first list is carried out."""
        self._drained: dict[str, float] = {}
        """When instances had drained that were removed lately, by name."""
        self._is_wanted = asyncio.Event()
        self._entries: dict[str, str] = {}
        """What operators have added, as they wrote it, by name; bounded by the instances."""
        self._gone: set[str] = set()
        """What operators have removed though a list names it; bounded by the lists."""
        self._left_out: frozenset[str] = frozenset()
        """What they had removed in this process's predecessor."""

    def judge(self, source: str, specs: Sequence[InstanceSpec]) -> list[Answer]:
        """What would become of a source's whole list, as far as it differs from its last one.

        Compared with that list and not with the fleet: what another source changed meanwhile stays.
        """
        return self._answers(source, self._differences(source, specs))

    def want(self, source: str, specs: Sequence[InstanceSpec]) -> list[Answer]:
        """Carry out what a source wants, by its whole list, at once; see `steps`."""
        return [answer for some in self.steps(source, specs, sys.maxsize) for answer in some]

    def steps(
        self, source: str, specs: Sequence[InstanceSpec], wishes: int = STEP
    ) -> Iterator[list[Answer]]:
        """Carry out what a source wants, by its whole list, a few `wishes` each; their answers.

        What is refused changes nothing, and counts as not named: the next list may have it again.
        Between two steps anything may happen. Who stops has wanted what is carried out by then.
        """
        wanted, kept = self._differences(source, specs), self._lists.setdefault(source, {})
        for at in range(0, len(wanted), wishes):
            some = wanted[at : at + wishes]
            answers = self._answers(source, some)
            for answer in answers:
                self._take(source, answer)
            for name, spec in some:
                if spec is None:
                    kept.pop(name, None)
            yield answers
        self._whole.add(source)

    def listed(self, source: str) -> Mapping[str, InstanceSpec]:
        """What a source has wanted, as far as it was not refused, by name."""
        return self._lists.get(source, {})

    def _differences(
        self, source: str, specs: Sequence[InstanceSpec]
    ) -> list[tuple[str, InstanceSpec | None]]:
        """What a source's list has otherwise than its last one; None: it names it no more."""
        before, named = self.listed(source), {spec.name for spec in specs}
        differing = [(spec.name, spec) for spec in specs if spec != before.get(spec.name)]
        return [*differing, *((name, None) for name in before if name not in named)]

    def _answers(
        self, source: str, wishes: Iterable[tuple[str, InstanceSpec | None]]
    ) -> list[Answer]:
        before, taken, answers = self.listed(source), self._taken(), []
        for name, spec in wishes:
            if spec is not None:
                answers.append(self._judged(source, spec, before.get(name), taken))
            elif self._fleet.get(name) is not None:
                verdict = Verdict.DRAIN if self._may_drain(source, name) else Verdict.KEPT
                answers.append(Answer(name, verdict))
        return answers

    def _take(self, source: str, answer: Answer) -> None:
        """Carry an answer out, and note what the source wants by it."""
        is_left_out = source not in self._whole and answer.name in self._left_out
        if is_left_out and answer.verdict is Verdict.NEW:
            self._gone.add(answer.name)
        elif answer.verdict is not Verdict.REFUSED:
            self._carry_out(source, answer)
        if answer.spec is not None and answer.verdict is not Verdict.REFUSED:
            self._lists[source][answer.name] = answer.spec

    def of_operators(self) -> dict[str, list[str]]:
        """What operators changed, for a successor's `carry_on`.

        The entries that they added, and the names that they removed, or drain.
        """
        draining = {name for name, of in self._wishes.items() if OPERATORS in of.drains}
        gone = draining | {name for name in self._gone if self._is_listed(name)}
        added = [text for name, text in self._entries.items() if name not in draining]
        return {"added": added, "gone": sorted(gone)}

    async def carry_on(self, changes: Mapping[str, Sequence[str]]) -> None:
        """Do again what operators did in the predecessor, before other lists than the options'."""
        gone, added = changes.get("gone", ()), 0
        self._left_out = frozenset(gone)
        for name in gone:
            if self._fleet.get(name) is not None:
                self.remove(name)
        for text in changes.get("added", ()):
            try:
                answer = await self.admit(InstanceSpec.parse(text), text)
            except (ValueError, ForbiddenAddressError) as error:
                _log.warning("hot restart: an instance that was added is not: %s", error)
                continue
            added += answer.verdict is not Verdict.REFUSED
        if gone or added:
            text = "hot restart: as operators said, %d instances are added and %d left out"
            _log.info(text, added, len(gone))

    def _is_listed(self, name: str) -> bool:
        return any(name in specs for specs in self._lists.values())

    async def admit(self, spec: InstanceSpec, entry: str = "") -> Answer:
        """Add what an operator names, or take it back where it drains; `entry`: as it was written.

        Raises ForbiddenAddressError where it is not within the fence.
        """
        settings, resolver = self._options.settings, self._instances.connect_options.resolver
        await check(spec, settings.allow_cidr, settings.instances, self.own_ports, resolver)
        member = self._fleet.get(spec.name)
        if member is not None and not member.is_draining:
            return Answer(spec.name, Verdict.REFUSED, spec)
        answer = self._judged(OPERATORS, spec, None, self._taken())
        if answer.verdict is not Verdict.REFUSED:
            self._carry_out(OPERATORS, answer)
            if answer.verdict is Verdict.NEW:
                _log.info("instance %s added: %s", spec.name, spec.url)
            if entry:
                self._entries[spec.name] = entry
        return answer

    def drain(self, source: str, name: str) -> None:
        """Give an instance no new requests; it is removed when its last one is over."""
        wishes = self._of(name)
        wishes.named.discard(source)
        if self._may_drain(source, name):
            wishes.drains.add(source)
        self._obey(name)

    def remove(self, name: str) -> None:
        """Remove an instance at once, with what anyone wants of it."""
        self._wishes.pop(name, None)
        self._entries.pop(name, None)
        if self._is_listed(name):
            self._gone = {other for other in self._gone if self._is_listed(other)} | {name}
        self._instances.remove(name)

    def is_draining(self, name: str) -> bool:
        """Whether an instance is in the fleet and drains."""
        member = self._fleet.get(name)
        return member is not None and member.is_draining

    def sources(self, name: str) -> list[str]:
        """The sources that want an instance to serve."""
        return sorted(self._wishes[name].named) if name in self._wishes else []

    def drained_for_s(self, name: str) -> float | None:
        """How long ago an instance had drained, within DRAINED_S; else None."""
        at_s = self._drained.get(name)
        ago_s = None if at_s is None else self._instances.clock.now_s() - at_s
        return ago_s if ago_s is not None and ago_s < DRAINED_S else None

    async def run(self) -> None:
        """Remove each instance that drains once its last request is over, until cancelled."""
        while True:
            await self._is_wanted.wait()
            await asyncio.sleep(LOOK_S)
            if not await self.sweep():
                self._is_wanted.clear()

    async def sweep(self) -> bool:
        """Remove what has drained, a few in each turn of the loop; returns whether any drained."""
        draining = [m.instance.name for m in self._fleet.members() if m.is_draining]
        removed = {}
        for name in draining:
            if self._instances.has_drained(name):
                removed[name] = "is removed: its last request is over"
                self._note_drained(name, self._instances.clock.now_s())
                self.remove(name)
                if not len(removed) % STEP:
                    await asyncio.sleep(0)
        log_each(_log, removed, "removed, their last requests are over")
        return bool(draining)

    def _note_drained(self, name: str, now_s: float) -> None:
        self._drained[name] = now_s
        oldest = next(iter(self._drained))
        while now_s - self._drained[oldest] >= DRAINED_S or len(self._drained) > MOST_DRAINED:
            del self._drained[oldest]
            oldest = next(iter(self._drained))

    def _of(self, name: str) -> _Wishes:
        return self._wishes.setdefault(name, _Wishes())

    def _may_drain(self, source: str, name: str) -> bool:
        overruled = RIGHTS[source].drains
        others = self._of(name).named - {source}
        return overruled is None or others <= overruled

    def _taken(self) -> set[str]:
        """URLs of the fleet; a list's judgement adds the names and URLs that come with it."""
        return {member.instance.url for member in self._fleet.members()}

    def _judged(
        self,
        source: str,
        spec: InstanceSpec,
        before: InstanceSpec | None,
        taken: set[str],
    ) -> Answer:
        """What becomes of one that is new to a source, or other than `before`.

        `taken`: see `_taken`; a new one's name and URL are added.
        """
        member = self._fleet.get(spec.name)
        if member is not None:
            if not _is_at(member.instance, spec, before):
                return Answer(spec.name, Verdict.REFUSED, spec)
            still = self._of(spec.name).drains & RIGHTS[source].heeds
            is_old = before is not None or bool(still)
            return Answer(spec.name, Verdict.CHANGED if is_old else Verdict.BACK, spec)
        if spec.url in taken or spec.name in taken:
            return Answer(spec.name, Verdict.REFUSED, spec)
        taken |= {spec.name, spec.url}
        return Answer(spec.name, Verdict.NEW, spec)

    def _carry_out(self, source: str, answer: Answer) -> None:
        name, spec = answer.name, answer.spec
        if spec is not None:
            self._gone.discard(name)
        if spec is None:
            self.drain(source, name)
        elif answer.verdict is Verdict.NEW:
            self._drained.pop(name, None)
            listed = {s for s, specs in self._lists.items() if name in specs}
            self._wishes[name] = _Wishes({source} | listed)
            self._instances.add(spec, self._options.settings.connect_timeout)
        else:
            if source == OPTIONS or spec.sensors:  # another source that names none leaves them
                self._instances.specs[name] = spec
            wishes = self._of(name)
            wishes.named.add(source)
            if name not in self._lists.get(source, {}):
                wishes.drains &= RIGHTS[source].heeds
            self._obey(name)

    def _obey(self, name: str) -> None:
        """Let an instance drain exactly while a source drains it."""
        member = self._fleet.get(name)
        if member is None:
            return
        was_draining, member.is_draining = member.is_draining, bool(self._of(name).drains)
        if member.is_draining:
            self._is_wanted.set()
        elif was_draining:
            self._on_back()


def _is_at(instance: Instance, spec: InstanceSpec, before: InstanceSpec | None) -> bool:
    """Whether an instance has the addresses of a wish; `before`: what it was, None if new.

    A bootstrap server that was found may be named, or not; one that was given may not be left out.
    """
    may_be_found = before is None or before.bootstrap_url is None
    known = (instance.bootstrap_url, None) if may_be_found else (instance.bootstrap_url,)
    has_plugin = spec.thermal == "plugin"
    is_same = instance.url == spec.url and instance.has_thermal_plugin == has_plugin
    return is_same and spec.bootstrap_url in known
