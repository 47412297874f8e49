"""Scaling by Kubernetes: the `scale` of an object is set, and who goes is drained before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.config.components import Component
from planner.scalers.base import Applied, Decision, Failure, Fleet, Member, Scaler, ScalerError
from planner.scalers.kubernetes.api import PODS, Api, connected, understood
from planner.scalers.kubernetes.checks import autoscaler, check
from planner.scalers.kubernetes.objects import Replicas, Scalable, scalable
from planner.scalers.kubernetes.options import KubernetesOptions, Resource
from planner.scalers.kubernetes.pods import (
    CHEAP,
    COST,
    JOINED,
    LEAVES,
    Mark,
    Pod,
    Seat,
    allowed,
    going,
    seated,
)

MOST_NAMED = 3
"""Pods that a text names; of more it says how many."""


class KubernetesScaler(Scaler):
    """Sets replicas of a Deployment, a StatefulSet, or whatever else has a `scale`.

    What was begun is in the cluster: replicas in the object, who goes on its pods. In memory are
    only the components' objects, and what was set last, to tell when somebody else sets it.
    """

    name = "kubernetes"

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._resources = options.resources()
        self._api: Api | None = None
        self._scalables: dict[str, Scalable] = {}
        self._set: dict[str, int] = {}

    async def validate(self, components: Sequence[Component]) -> None:
        """Check rights, that the objects are there and fit, and that nobody else scales them."""
        api = await self._connected()
        found = {one.name: await self._found(api, one.name) for one in components}
        await check(api, components, found)

    async def observe(self) -> Mapping[str, int]:
        """Replicas that each component's object was last told to have, by whomever."""
        api = await self._connected()
        return {name: (await one.read(api)).count for name, one in self._scalables.items()}

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        """Go a step with every component; one that fails does not keep the others from theirs."""
        api = await self._connected()
        said: list[str] = []
        failures: list[ScalerError] = []
        for component, target in decision.targets.items():
            try:
                said += await self._apply(api, component, target, fleet)
            except ScalerError as error:
                failures.append(error)
                if error.failure is Failure.MISSING:
                    self._scalables.pop(component, None)  # it may have another name by now
        if failures:
            raise failures[0]
        return Applied("; ".join(said))

    async def aclose(self) -> None:
        """End the connections to the API."""
        if self._api is not None:
            await self._api.aclose()

    async def _connected(self) -> Api:
        if self._api is None:
            self._api = await connected(self._options)
        return self._api

    def _resource(self, component: str) -> Resource:
        resource = self._resources.get(component) or self._resources.get("")
        if resource is None:
            text = f"component {component} has no object; there are {', '.join(self._resources)}"
            raise ScalerError(Failure.MISSING, text)
        return resource

    async def _found(self, api: Api, component: str) -> Scalable:
        if component not in self._scalables:
            resource = self._resource(component)
            seen = await api.get(resource)
            self._scalables[component] = scalable(resource, seen, component)
        return self._scalables[component]

    async def _apply(self, api: Api, component: str, target: int, fleet: Fleet) -> list[str]:
        """A step of a component; after a conflict what there is by now is read, and tried once."""
        try:
            return await self._step(api, component, target, fleet)
        except ScalerError as error:
            if error.failure is not Failure.CONFLICT:
                raise
        return await self._step(api, component, target, fleet)

    async def _step(self, api: Api, component: str, target: int, fleet: Fleet) -> list[str]:
        scaled = await self._found(api, component)
        replicas = await scaled.read(api)
        seats = await _seats(api, replicas, fleet.members(component), fleet)
        falls = target < replicas.count
        if falls and len({seat.pod.owner for seat in seats}) > 1:
            return [f"{scaled} is rolled out: which of its pods would go is not known"]
        gone = going(seats, target, scaled.start)
        gone = [seat for seat in gone if falls or seat.pod.mark is not None]  # chosen before
        said = await _tell_fleet(api, seats, gone, replicas.count, fleet)
        wanted = target
        if falls:
            wanted = min(replicas.count, allowed(seats, gone, target, scaled.start))
        if wanted != replicas.count:
            said += await self._rival(api, component, scaled, replicas.count)
            await _set(api, replicas, wanted, gone)
        self._set[component] = wanted
        said += _waits(gone)
        if self._options.port:
            said += await self._join(api, [s for s in seats if s not in gone], target, fleet)
        return said

    async def _rival(self, api: Api, component: str, scaled: Scalable, count: int) -> list[str]:
        """What is said where somebody else has set the replicas since this planner did."""
        if self._set.get(component, count) == count:
            return []
        by = await autoscaler(api, scaled) or "somebody else"
        return [f"{scaled} was set to {count} by {by}, not to {self._set[component]}"]

    async def _join(self, api: Api, seats: Sequence[Seat], target: int, fleet: Fleet) -> list[str]:
        """Bring in those that are new. Whom an operator took out has joined before."""
        for pod, member in ((seat.pod, seat.member) for seat in seats):
            if not pod.is_ready or pod.has_joined:
                continue
            if member is None and (pod.mark is None or not pod.mark.name):
                host = f"[{pod.address}]" if ":" in pod.address else pod.address
                await fleet.add(pod.name, f"http://{host}:{self._options.port}")
            await _note(api, pod, {JOINED: pod.name})
        ready = sum(seat.pod.is_ready for seat in seats)
        return [f"{ready} of {target} pods are ready"] if ready < target else []


async def _seats(
    api: Api, replicas: Replicas, members: Sequence[Member], fleet: Fleet
) -> list[Seat]:
    answer = await api.list(PODS, replicas.selector)
    with understood(PODS):
        listed = [Pod.read(one) for one in answer]
    pods = sorted((pod for pod in listed if pod is not None), key=lambda pod: pod.name)
    marked = {pod.mark.name for pod in pods if pod.mark is not None and pod.mark.name}
    left = [name for name in sorted(marked) if await fleet.has_left(name)]
    return seated(pods, members, left)


async def _tell_fleet(
    api: Api, seats: Sequence[Seat], gone: Sequence[Seat], count: int, fleet: Fleet
) -> list[str]:
    """Drain those that go; of those chosen before, let serve again who stays.

    Not while there are more pods than replicas: Kubernetes may be about to end that one.
    """
    for seat in gone:
        await _send_off(api, seat, fleet)
    stay = [seat for seat in seats if seat.pod.mark is not None and seat not in gone]
    if len(seats) > count:
        return [f"{_named([seat.pod.name for seat in stay])} may end yet"] if stay else []
    for seat in stay:
        await _bring_back(api, seat, fleet)
    return []


async def _send_off(api: Api, seat: Seat, fleet: Fleet) -> None:
    """Mark a pod that goes, then drain its instance."""
    pod, member = seat.pod, seat.member
    if seat.may_go:
        return
    if member is None:
        if pod.mark is None:
            await _note(api, pod, {LEAVES: str(Mark())})
        return
    if pod.mark is None or pod.mark.name != member.name:
        mark = Mark(member.name, "" if member.is_draining else member.url)
        await _note(api, pod, {LEAVES: str(mark)})
    if not member.is_draining:
        await fleet.drain(member.name)


async def _bring_back(api: Api, seat: Seat, fleet: Fleet) -> None:
    """Let a pod that was to go stay: its instance serves again, then the mark goes."""
    mark = seat.pod.mark
    if mark is not None and mark.url:
        await fleet.add(mark.name, mark.url)
    await _note(api, seat.pod, {LEAVES: None, COST: None})


async def _set(api: Api, replicas: Replicas, count: int, gone: Sequence[Seat]) -> None:
    """Set the replicas; first say which pods are to go, where that is asked."""
    for seat in gone:
        if seat.may_go and seat.pod.is_ready and not seat.pod.is_cheap and seat.pod.ordinal is None:
            await _note(api, seat.pod, {COST: CHEAP})
    await api.patch(replicas.at, replicas.body(count), replicas.sub)


async def _note(api: Api, pod: Pod, notes: Mapping[str, str | None]) -> None:
    try:
        await api.patch(PODS.of(pod.name), {"metadata": {"annotations": notes}})
    except ScalerError as error:
        if error.failure is not Failure.MISSING:  # it ended meanwhile
            raise


def _waits(gone: Sequence[Seat]) -> list[str]:
    """Whom it waits for: instances that drain, and drained pods that have not begun to end."""
    drain = [s.pod.name for s in gone if not s.may_go]
    end = [s.pod.name for s in gone if s.may_go and s.pod.mark is not None]
    return [
        f"{_named(names)} {verb}{'s' * (len(names) == 1)}"
        for names, verb in ((drain, "drain"), (end, "end"))
        if names
    ]


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
