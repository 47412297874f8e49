"""The rules of the founding experiment, and other readings of its heuristic.

The founding text leaves open how P is chosen, whether `ongoing_tokens` counts the context of
running streams, and where its sessions lived. The proxy's reading: P is the instance with the
fewest ongoing tokens, of prompts and streams alike. A session begins where its prompt would have
its first token first. READINGS has one entry per other reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from analysis.rivals.offload import able_peers
from analysis.rivals.placement import ConsistentHash, Place
from analysis.rivals.registry import RIVALS, Rival
from proxy.core.placement import rules
from proxy.core.placement.candidates import Candidate
from proxy.core.placement.decision import Choice, PlacementView, Size, chosen, size_on
from proxy.core.types import Load, Reason

Tokens = Callable[[Load], int]


def all_tokens(load: Load) -> int:
    """Ongoing tokens of prompts and streams: the proxy's reading."""
    return load.ongoing_tokens


def queued_tokens(load: Load) -> int:
    """Ongoing tokens of prompts only."""
    return load.prefill_tokens


Pick = Callable[[Sequence[Candidate], Tokens], Candidate]


def idlest(able: Sequence[Candidate], tokens: Tokens) -> Candidate:
    """P with the fewest ongoing tokens: the proxy's reading."""
    return min(able, key=lambda c: (tokens(c.load), c.new_tokens))


def in_turn(able: Sequence[Candidate], tokens: Tokens) -> Candidate:
    """P that was placed on longest ago, whatever its load."""
    del tokens
    return min(able, key=lambda c: c.last_placed)


def most_cached(able: Sequence[Candidate], tokens: Tokens) -> Candidate:
    """P that has the longest prefix of the prompt."""
    return min(able, key=lambda c: (c.new_tokens, tokens(c.load)))


def home(view: PlacementView) -> Candidate:
    """D as the proxy's own rules choose it."""
    return rules.place(view)[0]


@dataclass(frozen=True, slots=True)
class Heuristic:
    """The founding heuristic, its four tests in their order, with its open terms given."""

    pick: Pick = idlest
    tokens: Tokens = all_tokens
    place: Place = home

    def __call__(self, view: PlacementView) -> Choice:
        """Choose D, then decide whether a P computes."""
        d = self.place(view)
        p, reason = self._decide(view, d)
        return chosen(view, d, p, reason, placed=d.instance.name != view.home)

    def _decide(self, view: PlacementView, d: Candidate) -> tuple[Candidate | None, Reason]:
        able = able_peers(view, d)
        if size_on(view, d) is not Size.HEAVY:
            return None, Reason.BELOW_THRESHOLD
        if not able:
            return None, Reason.NO_PEER
        p = self.pick(able, self.tokens)
        on_p, on_d = self.tokens(p.load), self.tokens(d.load)
        mean = sum(self.tokens(c.load) for c in view.free) / len(view.free)
        if on_p >= on_d:
            return None, Reason.P_BUSIER_THAN_D if on_d else Reason.D_IDLE
        if on_p > rules.OVERLOAD_FACTOR * mean:
            return None, Reason.P_OVERLOADED
        if d.load.decode_tokens > 0:
            return p, Reason.P_IDLE_D_BUSY
        return None, Reason.D_IDLE


PREFILLERS = 4
"""`split`: of so many instances one prefills."""


def split(view: PlacementView) -> Choice:
    """Every fourth instance prefills the HEAVY prompts; the others compute the rest and decode.

    A fixed division, made before any request: what a fleet of two pools would do.
    """
    prefill = [c for c in view.free if _number(c) % PREFILLERS == 0]
    decode = [c for c in view.free if _number(c) % PREFILLERS] or prefill
    at_home = [c for c in decode if c.instance.name == view.home]
    d = min(at_home or decode, key=lambda c: (c.load.ongoing_tokens, c.last_placed))
    able = [c for c in able_peers(view, d) if any(c is one for one in prefill)]
    p = None
    if able and size_on(view, d) is Size.HEAVY:
        p = min(able, key=lambda c: c.load.prefill_tokens)
    reason = Reason.BELOW_THRESHOLD if p is None else Reason.POLICY_ALWAYS
    return chosen(view, d, p, reason, placed=not at_home)


def _number(c: Candidate) -> int:
    return int(c.instance.name.removeprefix("e"))


READINGS: dict[str, Rival] = {
    "split": Rival(
        "a fixed division: one instance of four prefills HEAVY prompts, the others decode",
        lambda _kv: split,
    ),
    "heuristic-queued": Rival(
        "the founding heuristic, ongoing tokens without the context of running streams",
        lambda _kv: Heuristic(tokens=queued_tokens),
    ),
    "heuristic-in-turn": Rival(
        "the founding heuristic, P taken in turn", lambda _kv: Heuristic(in_turn)
    ),
    "heuristic-cached": Rival(
        "the founding heuristic, P with the longest cached prefix",
        lambda _kv: Heuristic(most_cached),
    ),
    "heuristic-hash": Rival(
        "the founding heuristic on sessions placed by hash, beside consistent-hash",
        lambda _kv: Heuristic(place=ConsistentHash()),
    ),
}
RULES: dict[str, Rival] = {**RIVALS, **READINGS}
"""Every rule that `analyze elastic` can run."""
BASELINE = "never"
"""Sessions stay at home and everything is computed there."""
