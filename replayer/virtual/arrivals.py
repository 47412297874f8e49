"""Load at a given rate: the requests of a run with their earliest start times, by seed.

A run has a horizon: its load consists of the requests that would have ended by then if every
request were served exactly at the SLO. That set depends on no policy, so policies can be compared
request by request, and a fleet that keeps the SLO finishes at the horizon.

A replicable source is copied. Its units are drawn in shuffled rounds and start as a renewal
process. Every copy gets private blocks beside the common ones. Think times are the trace's, up to a
cap. Any other source is sped up from a random point of the trace. It keeps order, relative gaps and
blocks. Equal timestamps of a coarse clock are spread evenly over its tick. With `burst` it keeps
only the order, as does a trace without timestamps. Where the trace ends before the horizon, it
begins again as fresh copies: other sessions, other blocks.

`plan_slots` makes a closed loop instead: so many units at a time, a fixed number in all. There a
slow fleet gets fewer requests per second, and no request belongs to it that another fleet does not
get.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from proxy.core.latency.slo import Slo
from replayer.virtual.load import Blocks, Source, TraceTurn

SALT_BITS = 40
"""Blocks of copy n, but common ones, have ids from n << 40 on, above every id of a source."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    """`rate`: unit starts per second until `horizon_s`.

    `burst` is the squared coefficient of variation of the gaps between starts: 1 is a Poisson
    process, 10 a gamma renewal process with ten times its variance.
    """

    rate: float
    horizon_s: float = 900.0
    seed: int = 0
    think_cap_s: float = 10.0
    burst: float = 1.0
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class SlotRules:
    """`slots` units run at a time, each followed by the next of its slot; `units` in all.

    The first unit of each slot starts within `spread_s`.
    """

    slots: int
    units: int
    seed: int = 0
    think_cap_s: float = 10.0
    spread_s: float = 10.0
    slo: Slo = field(default_factory=Slo)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the load; it may start at `earliest_s` and `delay_s` after `wait_for`.

    `due_s`: its end if every request were served exactly at the SLO. `estimate_factor`: the proxy's
    estimate of the prompt's tokens over the engine's count; 1 where unknown.
    """

    turn: TraceTurn
    session_id: str
    earliest_s: float
    delay_s: float
    wait_for: tuple[int, ...]
    salt: int = 0
    due_s: float = 0.0
    estimate_factor: float = 1.0

    def hashes(self) -> Blocks:
        """Return the chained block hashes; the copy's salt is added to private blocks."""
        blocks, salt = self.turn.blocks, self.salt
        if not salt:
            return blocks
        shared = self.turn.shared
        return blocks[:shared] + tuple([block + salt for block in blocks[shared:]])


def plan(source: Source, rules: LoadRules) -> list[Planned]:
    """Make the requests of a run; `wait_for` holds positions in the list."""
    draw = random.Random(f"load {rules.seed}")
    made = _copies(source, rules, draw) if source.replicable else _sped_up(source, rules, draw)
    return _within_horizon(made, rules)


def plan_slots(source: Source, rules: SlotRules) -> list[Planned]:
    """Make the requests of a closed loop; every unit of the source must be a session's.

    Units are drawn in shuffled rounds and dealt to the slots in turn, so that every fleet gets the
    same sessions in the same slots.
    """
    draw = random.Random(f"slots {rules.seed}")
    starts_s = [rules.spread_s * draw.random() for _ in range(rules.slots)]
    planned: list[Planned] = []
    ends: list[tuple[int, ...]] = [()] * rules.slots
    for number, unit in zip(range(rules.units), _rounds(source, draw), strict=False):
        slot = number % rules.slots
        copied = _copy(unit, number, len(planned), rules.think_cap_s, starts_s[slot], ends[slot])
        ends[slot] = tuple(range(len(planned), len(planned) + len(copied)))
        planned += copied
    return planned


def _starts_s(rules: LoadRules, draw: random.Random) -> list[float]:
    """Draw a renewal process of a fixed number of starts: seeds differ in times, not in load."""
    shape = 1.0 / rules.burst
    starts = round(rules.rate * rules.horizon_s)
    ends = list(accumulate(draw.gammavariate(shape, 1.0) for _ in range(starts + 1)))
    return [rules.horizon_s * end / ends[-1] for end in ends[:-1]]


def _rounds(source: Source, draw: random.Random) -> Iterator[tuple[TraceTurn, ...]]:
    while True:
        order = list(source.units)
        draw.shuffle(order)
        yield from order


def _copies(source: Source, rules: LoadRules, draw: random.Random) -> list[Planned]:
    planned: list[Planned] = []
    starts_s = _starts_s(rules, draw)
    for number, (start_s, unit) in enumerate(zip(starts_s, _rounds(source, draw), strict=False)):
        planned += _copy(unit, number, len(planned), rules.think_cap_s, start_s)
    return planned


def _copy(
    unit: Sequence[TraceTurn],
    number: int,
    first: int,
    think_cap_s: float,
    start_s: float,
    after: tuple[int, ...] = (),
) -> list[Planned]:
    """Copy `number` of a unit, at position `first` of the load.

    It starts at `start_s`, or when the requests `after` have ended.
    """
    planned = []
    for turn in unit:
        waits = tuple([first + other for other in turn.wait_for])
        offset_s, delay_s = min(turn.offset_s, think_cap_s), min(turn.delay_s, think_cap_s)
        earliest_s = 0.0 if waits else start_s + offset_s
        if not waits and after:
            earliest_s, waits, delay_s = 0.0, after, offset_s
        name = f"{turn.session}#{number}"
        planned.append(Planned(turn, name, earliest_s, delay_s, waits, (number + 1) << SALT_BITS))
    return planned


def _sped_up(source: Source, rules: LoadRules, draw: random.Random) -> list[Planned]:
    has_clock = any(source.starts_s)
    starts_s: Sequence[float] = source.starts_s if has_clock else range(1, len(source.units) + 1)
    last_s = max(starts_s)
    speed = rules.rate * last_s / len(source.units)
    span_s = rules.horizon_s * speed
    # A trace that is too short may begin anywhere, as it goes on from its start.
    skipped_s = (last_s - span_s if span_s <= last_s else last_s) * draw.random()
    bursts = _starts_s(rules, draw) if rules.burst != 1.0 or not has_clock else []
    planned: list[Planned] = []
    for number in range(math.ceil((skipped_s + span_s) / last_s)):
        salt, again = number << SALT_BITS, f"#{number}" if number else ""
        for start_s, unit in zip(starts_s, source.units, strict=True):
            first = len(planned)
            for turn in unit:
                recorded_s = start_s + turn.offset_s + source.tick_s * draw.random() - skipped_s
                earliest_s = (recorded_s + number * last_s) / speed
                if not 0.0 <= earliest_s < rules.horizon_s:
                    continue
                if bursts:
                    earliest_s = bursts[int(earliest_s / rules.horizon_s * len(bursts))]
                waits = (len(planned) - 1,) if len(planned) > first else ()
                name = turn.session + again
                planned.append(Planned(turn, name, earliest_s, 0.0, waits, salt))
    return planned


def _within_horizon(planned: list[Planned], rules: LoadRules) -> list[Planned]:
    """Set `due_s`, and drop requests due after the horizon (no kept request waits for one)."""
    ends_s: list[float] = []
    place: dict[int, int] = {}
    kept: list[Planned] = []
    slo = rules.slo
    for index, one in enumerate(planned):
        ready_s = max([ends_s[other] + one.delay_s for other in one.wait_for], default=0.0)
        service_s = slo.ttft_limit_s(one.turn.new_tokens) + slo.tpot_s * one.turn.output_tokens
        ends_s.append(max(ready_s, one.earliest_s) + service_s)
        if ends_s[-1] <= rules.horizon_s:
            place[index] = len(kept)
            waits = tuple([place[other] for other in one.wait_for])
            kept.append(replace(one, wait_for=waits, due_s=ends_s[-1]))
    return kept
