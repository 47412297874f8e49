"""The possible actions on a HEAVY request, which an oracle tries, and their names."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import Choice, PlacementView, Size, chosen, peers, size_on
from proxy.core.types import Reason


@dataclass(frozen=True, slots=True)
class Action:
    """Names of the instance that decodes and of another that prefills for it, or None."""

    decode: str
    prefill: str | None = None

    def kind(self, home: str | None) -> str:
        """The action's name, seen from the session's home (None for a first turn).

        The kinds are:

            place            a first turn, computed where it decodes
            colocate         computed at home
            rehome           computed elsewhere, and the session moves
            offload          a P hands over to home, or to a first turn's D
            pull             home hands over, and the session moves
            offload-rehome   neither P nor D is home
        """
        if self.prefill is None:
            if home is None:
                return "place"
            return "colocate" if self.decode == home else "rehome"
        if home is None or self.decode == home:
            return "offload"
        return "pull" if self.prefill == home else "offload-rehome"


def action_of(choice: Choice) -> Action:
    """Return the action of a choice."""
    prefill = choice.prefill.instance.name if choice.prefill else None
    return Action(choice.decode.instance.name, prefill)


def is_heavy(scene: PlacementView, choice: Choice) -> bool:
    """Whether the request is HEAVY on the chosen D or on its home."""
    if size_on(scene, choice.decode) is Size.HEAVY:
        return True
    return any(
        c.instance.name == scene.home and size_on(scene, c) is Size.HEAVY for c in scene.free
    )


def actions(scene: PlacementView, choice: Choice, *, offloads: bool = True) -> list[Action]:
    """Return the policy's own action, then the others, those with a P if `offloads`.

    One action computes on each instance. Others prefill on each P for home, for the chosen D and
    for the D with the fewest ongoing tokens. The last ones hand over from home to each other
    instance. With 4 instances that is at most 14, with 8 at most 36.
    """
    found = [action_of(choice), *(Action(c.instance.name) for c in scene.free)]
    if offloads and scene.transfers.can_offload and scene.facts.offloadable:
        least = min(scene.free, key=lambda c: c.load.ongoing_tokens)
        ds = {choice.decode.instance.name, least.instance.name, scene.home}
        for d in scene.free:
            name = d.instance.name
            found += [
                Action(name, p.instance.name)
                for p in peers(scene, d)
                if name in ds or p.instance.name == scene.home
            ]
    return list(dict.fromkeys(found))


def forced(scene: PlacementView, action: Action) -> Choice:
    """The choice that takes an action."""
    by_name = {c.instance.name: c for c in scene.free}
    d = by_name[action.decode]
    p = by_name[action.prefill] if action.prefill is not None else None
    reason = Reason.POLICY_NEVER if p is None else Reason.POLICY_ALWAYS
    return chosen(scene, d, p, reason, placed=action.decode != scene.home)


@dataclass(frozen=True, slots=True)
class View:
    """One instance at the time of a decision.

    `queue_s`: seconds until its reserved prefills are computed; `room_s`: until KV is free.
    """

    name: str
    hit_tokens: int
    new_tokens: int
    queue_s: float
    room_s: float
    streams: int
    decode_tokens: int
    kv_full: float


def view(scene: PlacementView, c: Candidate) -> View:
    """Return the view of a candidate."""
    return View(
        name=c.instance.name,
        hit_tokens=c.hit_tokens,
        new_tokens=c.new_tokens,
        queue_s=c.pace.wait_s(scene.now_s),
        room_s=c.kv_wait_s,
        streams=c.load.decode_requests,
        decode_tokens=c.load.decode_tokens,
        kv_full=c.kv_full,
    )
