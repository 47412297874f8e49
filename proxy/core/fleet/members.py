"""The known instances, and the eligible ones for a request.

Ejecting is a guess. If it took out more than half of the instances that could serve a request, it
is probably wrong, or would overload the rest. Then all are used (panic), but for those where no
server listens. One whose engine says that it sleeps or is paused rests: it is never used, as that
is no guess.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.core.accounts.instances import InstanceState, InstanceStates
from proxy.core.fleet.health import Health
from proxy.core.thermal.fleet_limits import HeatByInstance
from proxy.core.types import Instance

START_RATIO = 0.1
"""Part of the placements open to an instance that has just returned; it grows linearly to all."""
SURE_RATIO: Final = 0.75
"""An estimated prompt surely fits in this part of a context, as estimates err. A prompt up to a
context divided by it may fit."""


SAME_START_S: Final = 1.0
"""Reported start times that differ by less are of one process, seconds."""
STARTS = 8
"""Start times that are remembered of an instance."""
SEVERAL_S: Final = 600.0
"""Several processes are assumed to answer for so long after one has come back."""


class Starts:
    """Start times of the processes that answer at one address, in the order of their reports.

    A process that is replaced does not come back. So a time that was reported before the last one,
    and is again, shows that several answer there, as behind a load balancer.
    """

    __slots__ = ("_known_s", "_last_s", "_returned_s")

    def __init__(self) -> None:
        self._known_s: deque[float] = deque(maxlen=STARTS)
        self._last_s = self._returned_s = -math.inf

    def observe(self, start_s: float, now_s: float) -> None:
        """Take in a start time, unix seconds, that was reported now."""
        if abs(start_s - self._last_s) > SAME_START_S:
            if any(abs(start_s - known_s) <= SAME_START_S for known_s in self._known_s):
                self._returned_s = now_s
            else:
                self._known_s.append(start_s)
        self._last_s = start_s

    def are_several(self, now_s: float) -> bool:
        """Whether a process has come back lately."""
        return now_s - self._returned_s < SEVERAL_S


@dataclass(slots=True, eq=False)
class Member:
    """An instance in the fleet."""

    instance: Instance
    state: InstanceState
    """State of the present incarnation, a new object for each."""
    health: Health = field(default_factory=Health)
    incarnation: int = 0
    """Number of earlier processes of this name, for operators."""
    is_draining: bool = False
    models: frozenset[str] | None = None
    """Served models; None until asked."""
    bases: dict[str, str] = field(default_factory=dict)
    """Base models of its adapters, by name."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of context by model, if its list tells them."""
    starts: Starts = field(default_factory=Starts)
    rereads_models: bool = False
    """Its list of models is to be read again. Reasons: an answer, perhaps worded by a client,
    denies a model that it serves; a client asked for an unlisted model; another process."""
    denied: str | None = None
    """The denied model, until the list is read."""
    contradicts: bool = False
    """The list had that model all the same."""
    is_kv_known: bool = False
    """Its KV engine's id is known, so others can fetch KV from it."""
    last_placed: int = 0
    credit: float = 0.0
    """Placements that it may take part in while it starts slowly."""


class Fleet:
    """Members by name, in the order of their coming; one that returns takes `slow_start_s`.

    `heat`: the limits of hot instances, which take part in some placements only.
    """

    def __init__(self, slow_start_s: float = 0.0, heat: HeatByInstance | None = None) -> None:
        self._heat = heat if heat is not None else HeatByInstance()
        self.states = InstanceStates()
        self._members: dict[str, Member] = {}
        self._placements = self._next_incarnation = 0
        self.model_changes = 0
        """Number of changes of the served models."""
        self._served: frozenset[str] = frozenset()
        self._knows_all_models = False
        self.uneven: frozenset[str] = frozenset()
        """Models for which the instances' contexts are not all of one length."""
        self._slow_start_s = slow_start_s
        self._starting: dict[str, Member] = {}
        self._doubt_until_s = -math.inf
        """When what speaks against any instance, a hollow answer or a failure, will have faded."""

    def __len__(self) -> int:
        return len(self._members)

    def add(self, instance: Instance, *, is_proven: bool = True) -> None:
        """Bring an instance in; under a name that was known it is another one.

        Not `is_proven`: it is used once it has answered a probe.
        """
        self.remove(instance.name)
        state = self.states.add(instance.name)
        member = Member(instance, state, incarnation=self._next_incarnation)
        if not is_proven:
            member.health = Health.unproven()
        self._members[instance.name] = member
        self._count_models()

    def remove(self, name: str) -> None:
        """Take an instance out, if it is there."""
        if (member := self._members.pop(name, None)) is not None:
            self.model_changes += 1
            self._next_incarnation = max(self._next_incarnation, member.incarnation + 1)
            self.states.remove(name)
            self._count_models()
        self._starting.pop(name, None)

    def process_gone(self, name: str) -> None:
        """Drop all state of an instance where no server listens, except its requests' charges.

        A server that stops closes its port first and finishes its streams behind it.
        """
        if (member := self._members.get(name)) is not None:
            member.state = self.states.leave_void(name)

    def process_came(self, name: str) -> None:
        """Another process is there now: it has counters of its own."""
        if (member := self._members.get(name)) is not None:
            member.incarnation += 1
            member.rereads_models = True
            member.state = self.states.add(name)

    def get(self, name: str) -> Member | None:
        """One member, or None."""
        return self._members.get(name)

    def members(self) -> list[Member]:
        """All members."""
        return list(self._members.values())

    def up(self) -> list[Member]:
        """The members that are not ejected and do not rest."""
        return [m for m in self._members.values() if m.health.is_up and m.health.rest is None]

    def is_up(self, name: str) -> bool:
        """Whether an instance is in the fleet, not ejected, and does not rest."""
        member = self._members.get(name)
        return member is not None and member.health.is_up and member.health.rest is None

    def usable(self) -> list[Member]:
        """The members to which some request may be sent now."""
        return _usable(self._here())

    def is_panicking(self) -> bool:
        """Whether ejected instances are used, because too few others are left."""
        known = self.models()
        groups = [self._group(model) for model in known] if known else [self._here()]
        return any(not m.health.is_up for group in groups for m in _usable(group))

    def serving(self, model: str, exclude: Collection[str] = ()) -> list[Member]:
        """The eligible instances for a model; all eligible ones for a model not served.

        The engine's own 404 is the right answer to an unknown model, and only it can tell. While
        those that serve a model are away, the others would deny that there is such a model.
        """
        fit = _usable(self._group(model))
        if exclude:
            fit = [m for m in fit if m.instance.name not in exclude]
        if fit or self.serves(model):
            return fit
        return [m for m in self.usable() if m.instance.name not in exclude]

    def holding(
        self, members: list[Member], model: str, tokens: int, beyond_tokens: int
    ) -> list[Member]:
        """The `members` whose context holds a prompt of about so many tokens, and more.

        `beyond_tokens`: instances with a context no longer than this have refused it. Where it
        seems to fit nowhere, those with the longest context: the estimate may be wrong, as others'
        prompts teach it, and an engine knows. So no estimate refuses a request.
        """
        at_least = max(tokens / SURE_RATIO, beyond_tokens + 1.0)
        if sure := [m for m in members if _length(m, model) >= at_least]:
            return sure
        longest = max([_length(m, model) for m in members], default=0.0)
        if longest <= beyond_tokens:
            return []
        return [m for m in members if _length(m, model) == longest]

    def length(self, name: str, model: str) -> float:
        """Tokens of an instance's context for a model; infinite where that is unknown."""
        member = self._members.get(name)
        return math.inf if member is None else _length(member, model)

    def computed(self, tokens: int, model: str) -> int:
        """Of a prompt of about so many tokens, those that an engine computes before it answers.

        No more than the longest context of its model; none where it surely fits nowhere.
        """
        most = self.most_computed(tokens, model)
        return 0 if most < tokens * SURE_RATIO else most

    def most_computed(self, tokens: int, model: str) -> int:
        """The most that an engine can compute of a prompt of about so many tokens."""
        longest = max([_length(m, model) for m in self.believed(model)], default=math.inf)
        return int(min(tokens, longest))

    def has_longer(self, name: str, model: str) -> bool:
        """Whether an instance of a model, which may be away, has a longer context than this one."""
        if model not in self.uneven:
            return False
        own, all_ = self.length(name, model), self._members.values()
        known = [m for m in all_ if m.models is not None and model in m.models]
        return any(_length(m, model) > own for m in known if not m.is_draining)

    def listed(self) -> list[Member]:
        """The members whose models clients see: those in use, and those that rest."""
        used = {m.instance.name for m in self.usable()}
        return [
            m
            for name, m in self._members.items()
            if name in used or (m.health.rest is not None and m.health.is_up and not m.is_draining)
        ]

    def believed(self, model: str) -> list[Member]:
        """The members that may be chosen for a model, as far as their models are known."""
        return _usable(self._group(model))

    def rested_s(self, model: str, now_s: float) -> float | None:
        """Seconds that the last up instance for a model has rested; None if none rests."""
        is_served, shortest_s = self.serves(model), None
        for m in self._members.values():
            if m.health.rest is None or m.is_draining or not m.health.is_up:
                continue
            if m.models is None or model in m.models or not is_served:
                rested_s = now_s - m.health.rest_s
                shortest_s = rested_s if shortest_s is None else min(shortest_s, rested_s)
        return shortest_s

    def is_used(self, name: str) -> bool:
        """Whether some request may be sent to an instance, ejected or not."""
        member = self._members.get(name)
        if member is None or member.health.is_gone:
            return False
        known = member.models or (None,)
        groups = [self._here() if model is None else self._group(model) for model in known]
        return any(m is member for group in groups for m in _usable(group))

    def has_failed_lately(self, name: str, client: str = "") -> bool:
        """Whether something has failed on an instance since it last worked, or it is not there.

        What was hollow to one `client` alone is a failure for that one.
        """
        member = self._members.get(name)
        return member is None or member.health.has_failed_for(client)

    def recently_failed(self, client: str = "") -> set[str]:
        """Names of the instances where something has failed, for a client, since they worked."""
        return {name for name, m in self._members.items() if m.health.has_failed_for(client)}

    def open(self) -> set[str]:
        """Names of the instances whose breaker is open."""
        return {name for name, m in self._members.items() if m.health.is_open}

    def doubted(self) -> set[str]:
        """Names of the instances on which a trial has to decide."""
        return {name for name, m in self._members.items() if m.health.is_doubted}

    def failing(self, client: str) -> set[str]:
        """Names of the doubted instances on which a client's further failure would say nothing.

        Not where a client's answers have broken off alone: they keep nobody else away.
        """
        return {name for name, m in self._members.items() if m.health.is_failing_for(client)}

    def note_doubt(self, until_s: float) -> None:
        """Count something against an instance that may be priced until then."""
        self._doubt_until_s = max(self._doubt_until_s, until_s)

    def doubts(self, members: Iterable[Member], client: str, now_s: float) -> list[float] | None:
        """Doubt of each instance for a client's request, 0 to 1; None: no doubt, the usual case.

        It is that by its hollow answers to several, or by the client's failures there beyond those
        that it has wherever it asks.
        """
        if now_s >= self._doubt_until_s:
            return None
        healths = [m.health for m in members]
        own = [health.weight_for(client, now_s) for health in healths]
        least = min(own, default=0.0)
        return [
            max(health.hollow_weight(client, now_s), weight - least)
            for health, weight in zip(healths, own, strict=True)
        ]

    @property
    def is_starting(self) -> bool:
        """Whether any instance starts slowly."""
        return bool(self._starting)

    @property
    def is_weighed(self) -> bool:
        """Whether an instance takes part in some placements only: it starts slowly, or is hot."""
        return bool(self._starting) or not self._heat.is_cool

    def _here(self) -> list[Member]:
        return [m for m in self._members.values() if not m.is_draining and m.health.rest is None]

    def _group(self, model: str) -> list[Member]:
        return [
            m
            for m in self._members.values()
            if not m.is_draining
            and m.health.rest is None
            and (m.models is None or model in m.models)
        ]

    def returned(self, name: str) -> None:
        """Start an instance slowly: it came back or is another process, so it is cold."""
        if self._slow_start_s > 0 and (member := self._members.get(name)) is not None:
            member.credit = 0.0
            self._starting[name] = member

    def warm(self, free: list[Member], home: str | None, now_s: float) -> list[Member]:
        """The instances of `free` that take part in this placement.

        An instance that starts slowly takes part in some placements only: ever more of them with
        the time since its return, compared to the warmest of `free`. So does a hot one, in as many
        as thermal control allows. Sessions that live there may
        always use it, and at least one instance is always left.
        """
        if len(free) < 2:
            return free
        weights = [self._weight(m, now_s) for m in free]
        top = max(weights)
        kept = []
        for member, weight in zip(free, weights, strict=True):
            if weight < top:
                member.credit += weight / top
                if member.instance.name != home and member.credit < 1.0:
                    continue
                member.credit = max(0.0, member.credit - 1.0)
            kept.append(member)
        return kept

    def _weight(self, member: Member, now_s: float) -> float:
        return self._start_weight(member, now_s) * self._heat.of(member.instance.name).weight

    def _start_weight(self, member: Member, now_s: float) -> float:
        name = member.instance.name
        if name not in self._starting:
            return 1.0
        since_s = now_s - (member.health.back_s or 0.0)
        if since_s >= self._slow_start_s:
            del self._starting[name]
            return 1.0
        return START_RATIO + (1.0 - START_RATIO) * max(0.0, since_s) / self._slow_start_s

    def observe_models(
        self,
        name: str,
        models: Iterable[str],
        bases: Mapping[str, str] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        """Store the models of an instance; `bases`: base models of its adapters.

        `lengths`: tokens of context, by model, as far as they are told.
        """
        if (member := self._members.get(name)) is not None:
            known, known_lengths = member.models, member.lengths
            member.models = frozenset(models)
            self.model_changes += known != member.models
            self.models_again(name)
            member.bases, member.lengths = dict(bases or {}), dict(lengths or {})
            if (known, known_lengths) != (member.models, member.lengths):
                self._count_models()

    def models_again(self, name: str) -> None:
        """An instance's list of models was read, and is as it is known."""
        if (member := self._members.get(name)) is not None:
            member.rereads_models = False
            member.contradicts, member.denied = member.denied in (member.models or ()), None

    def _count_models(self) -> None:
        members = list(self._members.values())
        self._served = frozenset([model for m in members for model in m.models or ()])
        # One that lists nothing may be about to start, or keep no list.
        self._knows_all_models = bool(members) and all(m.models for m in members)
        lengths: dict[str, set[int | None]] = {}
        for m in members:
            for model in m.models or ():
                lengths.setdefault(model, set()).add(m.lengths.get(model))
        self.uneven = frozenset([model for model, found in lengths.items() if len(found) > 1])

    def denies(self, model: str) -> bool:
        """Whether all instances' models are known without this one."""
        return self._knows_all_models and bool(model) and model not in self._served

    def reread_models(self) -> None:
        """Have every instance's list of models read again with its next probe."""
        for member in self._members.values():
            member.rereads_models = True

    def bases(self) -> dict[str, dict[str, str]]:
        """The base model of each adapter (LoRA), by the instance that tells it."""
        return {name: member.bases for name, member in self._members.items() if member.bases}

    def serves(self, model: str) -> bool:
        """Whether an instance is known to serve this model."""
        return model in self._served

    def models(self) -> set[str]:
        """Every model that an instance is known to serve."""
        return set(self._served)

    def placed(self, name: str) -> None:
        """Note a placement, for the rotation among equals."""
        self._placements += 1
        self._members[name].last_placed = self._placements


def _length(member: Member, model: str) -> float:
    return float(member.lengths.get(model, math.inf))


def _usable(group: list[Member]) -> list[Member]:
    """The members of a group that may be chosen: without the ejected, unless these are too many.

    Those that have never answered are in nobody's place.
    """
    up = [m for m in group if m.health.is_up]
    if 2 * len(up) >= len(group):
        return up
    count = sum([m.health.was_seen or not m.health.is_gone for m in group])
    return up if 2 * len(up) >= count else [m for m in group if not m.health.is_gone]
