"""A trace as a source of load: units of turns with block ids, to be scaled to a fleet.

A unit is a session with its sub-agents. Traces without sessions get them from their block ids: a
row that continues an earlier row's whole blocks is its next turn.

Blocks are merged so that a prompt has at most about 192 of them. The ids are nodes of a prefix
tree, so the last fine id of a merged block stands for all. Partial tails have no id.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path

from replayer.replay.schedule import units
from replayer.trace.loaders import TraceRequest, block_ids, read_trace
from replayer.trace.rows import TraceError

MEAN_BLOCKS = 192
"""Blocks are merged until prompts have at most this many on average, to bound CPU time."""
NOMINAL_TTFT_S, NOMINAL_TPOT_S = 0.1, 0.01
"""Seconds of service, and per token, subtracted from the gap of turns without a think time."""
TIED_RATIO = 0.5
"""If a larger share of the timestamps are equal, the trace's clock is taken to be coarse."""
Blocks = tuple[int, ...]
Serves = Callable[[int, int], bool]
"""Whether a fleet can serve a prompt of so many tokens with an output of so many."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One request of a unit. `blocks`: an id per full block; the first `shared` are common.

    `new_tokens`: those that an infinite cache of the unit and of common blocks would not have.
    `wait_for` holds positions within the unit, `offset_s` counts from the unit's start.
    """

    session: str
    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    blocks: Blocks
    shared: int
    wait_for: tuple[int, ...]
    delay_s: float
    offset_s: float

    @property
    def work_tokens(self) -> int:
        """The least that an engine has to compute for it: new tokens and output."""
        return self.new_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The requests of a trace that are left out of its load, and their sessions.

    `shortest_tokens`: the shortest prompt among those that caused it.
    """

    requests: int = 0
    sessions: int = 0
    shortest_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A trace to be scaled: by copying its units (`replicable`), or by speeding up its clock.

    `starts_s` are the units' recorded starts, all 0 without a clock; `tick_s` is the step of a
    coarse one, or 0.
    """

    units: tuple[tuple[TraceTurn, ...], ...]
    starts_s: tuple[float, ...]
    block_tokens: int
    replicable: bool
    tick_s: float
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(t.prompt_tokens + t.output_tokens for unit in self.units for t in unit)


def load_source(
    path: Path, block_tokens: int | None = None, serves: Serves | None = None
) -> Source:
    """Read a trace; `block_tokens` is a multiple of its own block size, which it is at least.

    What a fleet cannot serve is left out, see `servable`. Raises TraceError when nothing is left.
    """
    requests, left_out = servable(list(read_trace(path)), serves)
    if not requests:
        raise TraceError(
            f"{path}: must have a prompt that an engine can hold and serve in time; "
            f"the shortest has {left_out.shortest_tokens:,} tokens"
        )
    return replace(as_source(requests, block_tokens), left_out=left_out)


def servable(
    requests: list[TraceRequest], serves: Serves | None
) -> tuple[list[TraceRequest], LeftOut]:
    """Leave out the requests that cannot be served, and those that wait for one left out."""
    if serves is None:
        return requests, LeftOut()
    causes = [r for r in requests if not serves(r.input_tokens or 1, r.output_tokens)]
    gone = {request.request_id for request in causes}
    found = 0
    while found < len(gone):
        found = len(gone)
        gone |= {r.request_id for r in requests if not gone.isdisjoint(r.wait_for)}
    sessions = {r.session_id or r.request_id for r in requests if r.request_id in gone}
    shortest = min([request.input_tokens or 1 for request in causes], default=0)
    kept = [request for request in requests if request.request_id not in gone]
    return kept, LeftOut(len(gone), len(sessions), shortest)


def as_source(requests: Sequence[TraceRequest], block_tokens: int | None = None) -> Source:
    """Group requests into units of turns."""
    fine = max(request.block_tokens for request in requests)
    merge = _merge(requests) if block_tokens is None else max(1, block_tokens // fine)
    named: dict[int, int] = {}
    rows = [_coarse(request, merge, named) for request in requests]
    replicable = any(request.session_id is not None for request in requests)
    group = units(requests) if replicable else chains(rows)
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(group):
        members.setdefault(unit, []).append(index)
    maker = _Maker(requests, rows, fine * merge, replicable)
    made = maker.make(list(members.values()))
    starts_s = tuple(requests[part[0]].arrival_s or 0.0 for part in members.values())
    return Source(
        made, starts_s, fine * merge, replicable, 0.0 if replicable else _tick_s(starts_s)
    )


def chains(rows: Sequence[Blocks]) -> list[int]:
    """Number each row's conversation; a row continues one whose last block it contains."""
    open_ends: dict[int, int] = {}
    numbers: list[int] = []
    for blocks in rows:
        found = next((b for b in reversed(blocks[1:]) if b in open_ends), None)
        number = len(numbers) if found is None else open_ends.pop(found)
        numbers.append(number)
        if len(blocks) > 1:
            open_ends[blocks[-1]] = number
    return numbers


def _merge(requests: Sequence[TraceRequest]) -> int:
    mean = sum(request.full_blocks for request in requests) / len(requests)
    merge = 1
    while mean / merge > MEAN_BLOCKS:
        merge *= 2
    return merge


def _coarse(request: TraceRequest, merge: int, named: dict[int, int]) -> Blocks:
    ids = block_ids(request.runs)[: request.full_blocks]
    return tuple([named.setdefault(i, len(named) + 1) for i in ids[merge - 1 :: merge]])


def _tick_s(times_s: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(times_s)]
    positive = [gap for gap in gaps if gap > 0]
    tied = len(gaps) - len(positive) > TIED_RATIO * len(gaps)
    return min(positive) if tied and positive else 0.0


@dataclass(frozen=True, slots=True)
class _Maker:
    requests: Sequence[TraceRequest]
    rows: Sequence[Blocks]
    block_tokens: int
    replicable: bool

    def make(self, parts: Sequence[Sequence[int]]) -> tuple[tuple[TraceTurn, ...], ...]:
        """Make every unit; if units are copied, the blocks of several units are common."""
        common: set[int] = set()
        if self.replicable:
            owners = Counter(b for part in parts for b in {b for i in part for b in self.rows[i]})
            common = {block for block, count in owners.items() if count > 1}
        known = self._known(parts, common)
        return tuple(
            tuple([self._turn(part, at, common, known) for at in range(len(part))])
            for part in parts
        )

    def _known(self, parts: Sequence[Sequence[int]], common: set[int]) -> list[int]:
        """Count the leading blocks of each row that an infinite cache of earlier rows has."""
        known = [0] * len(self.rows)
        walks = parts if self.replicable else [range(len(self.rows))]
        for walk in walks:
            seen = set(common)
            for index in walk:
                known[index] = sum(1 for _ in takewhile(seen.__contains__, self.rows[index]))
                seen.update(self.rows[index])
        return known

    def _turn(
        self, part: Sequence[int], at: int, common: set[int], known: Sequence[int]
    ) -> TraceTurn:
        first, request = self.requests[part[0]], self.requests[part[at]]
        blocks, prompt_tokens = self.rows[part[at]], request.input_tokens or 1
        place = {self.requests[index].request_id: n for n, index in enumerate(part[:at])}
        wait_for = tuple(place[other] for other in request.wait_for if other in place)
        if not self.replicable and at:
            wait_for = (at - 1,)
        before = [self.requests[part[other]] for other in wait_for]
        return TraceTurn(
            session=request.session_id or first.request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=request.output_tokens,
            new_tokens=max(1, prompt_tokens - known[part[at]] * self.block_tokens),
            blocks=blocks,
            shared=sum(1 for _ in takewhile(common.__contains__, blocks)),
            wait_for=wait_for,
            delay_s=_think_s(request, before) if self.replicable else 0.0,
            offset_s=(request.arrival_s or 0.0) - (first.arrival_s or 0.0),
        )


def _think_s(request: TraceRequest, before: Sequence[TraceRequest]) -> float:
    """Return the recorded delay, or the gap to the turn before minus a nominal service time."""
    if request.delay_s is not None or not before or request.arrival_s is None:
        return request.delay_s or 0.0
    ends_s = [
        (b.arrival_s or 0.0) + NOMINAL_TTFT_S + NOMINAL_TPOT_S * b.output_tokens for b in before
    ]
    return max(0.0, request.arrival_s - max(ends_s))
