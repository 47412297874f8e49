"""A proxy's request log as a load for virtual time: arrivals, sessions, prompts, legs.

The log has no text and no hashes. What a prompt shares is told by its hits: with the turn before it
in its session, and of a first turn with one beginning that many sessions have. What no instance had
any more counts as new. But where the KV's size is known, and as many tokens were computed since the
turn before, it was evicted, and a longer prompt begins as the one before.

Requests come when they came. A session's next turn does not come before the answer to the one
before, where that takes longer in virtual time.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from analysis.check.logs import CheckSample, Overhead, P, legs_of
from analysis.measures import is_number
from analysis.runs import RunError, log_records
from replayer.virtual.arrivals import Planned
from replayer.virtual.legs import RecordedLeg
from replayer.virtual.load import TraceTurn

Record = Mapping[str, Any]
COUNTS = ("isl_tokens", "hit_tokens", "reachable_hit_tokens", "prompt_tokens", "osl_tokens")
MOMENTS = ("t_proxy_recv", "t_decided", "t_decode_sent", "t_done")
NEEDED = (*COUNTS, *MOMENTS, "policy", "decode_instance")
"""What a request needs to be repeated."""
NUMBERS = (
    *(*COUNTS, *MOMENTS, "cached_tokens", "turn", "retries"),
    *("t_queued", "t_first_token", "t_prefill_sent", "t_prefill_done"),
)
TEXTS = ("policy", "decode_instance", P, "model", "session_id", "fallback")
FIELDS = (*NUMBERS, *TEXTS, "candidates")
"""What a line has, perhaps as null."""
MOST_TOKENS = 10_000_000
MOST_INSTANCES = 256
MOST_MODELS, MOST_CHARS = 20, 60
"""Models of a log that are told, and how much of their names."""
MOST_S = 8 * 86_400.0
BACKWARDS_S = 60.0
"""A line whose request ended so long before that of the line above is not of the same log."""
BLOCKS = 1024
"""Blocks are so large that prompts have about this many in the mean, to bound CPU time."""
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1024
KNOWN_RATIO = 0.99
"""D had the most that was reachable if it had this part of it."""
EVICTING_RATIO = 0.5
"""A prompt may have been evicted once so much of the KV's size was computed after it."""
UNTIMED = 4
"""Of a part of a log one request in so many, the first ones, is not timed."""
EARLY, EARLIER_S = "early", 60.0
"""The kind of the legs that fill the engines' caches, and how far they are apart."""
OPEN = 256
"""Conversations without a session's name that a prompt may continue: the latest."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that was served.

    `known`: its session's turns before it are in the log; `before`: the place of the last of them.
    """

    record: Record
    planned: Planned
    known: bool
    before: int | None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None of an answer in one piece, or if it is not `known`."""
        first_s = self.record["t_first_token"]
        return first_s - self.record["t_proxy_recv"] if self.known and first_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, of a stream."""
        first_s, more = self.record["t_first_token"], self.record["osl_tokens"] - 1
        return (self.record["t_done"] - first_s) / more if first_s and more else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds to the end; None if it is not `known`."""
        return self.record["t_done"] - self.record["t_proxy_recv"] if self.known else None


@dataclass(frozen=True, slots=True)
class LoggedLoad:
    """The requests in the order of arrival; `left_out`: lines that are of no served request.

    Those whose tokens nobody counted are left out, too.
    """

    requests: tuple[LoggedRequest, ...]
    names: tuple[str, ...]
    policy: str
    block_tokens: int
    left_out: int

    def middle(self, most: int) -> range:
        """Return the places of so many requests; the beginning may be unlike the rest."""
        start = max(0, len(self.requests) - most) // 2
        return range(start, min(start + most, len(self.requests)))

    def samples(self, places: range) -> list[CheckSample]:
        """Return the legs of these requests, and before them what engines had by then.

        What ran when the first of them came is not among them, so their times are not either.
        """
        number = {name: at for at, name in enumerate(self.names)}
        origin_s = self.requests[places.start].record["t_proxy_recv"]
        timed = places.start + (len(places) // UNTIMED if places.start else 0)
        found: list[CheckSample] = []
        early: list[CheckSample] = []
        for at in places:
            one = self.requests[at]
            blocks, row = one.planned.turn.blocks, one.record
            if held := self._held(one, places.start):
                tokens, sent_s = len(held) * self.block_tokens, -EARLIER_S * (len(early) + 1)
                leg = RecordedLeg(number[row["decode_instance"]], sent_s, tokens, held, 1)
                early.append(CheckSample(leg, EARLY, None))
            for sample in legs_of(row, str(at), blocks, number, origin_s):
                is_timed = at >= timed
                found.append(sample if is_timed else replace(sample, first_s=None, tpot_s=None))
        return early + found

    def _held(self, one: LoggedRequest, start: int) -> tuple[int, ...]:
        """Return the blocks that a request hit and that none of the requests since `start` made."""
        row, before = one.record, one.before
        is_made = (one.known and not start) if before is None else before >= start
        cached = 0 if is_made or row[P] else row["cached_tokens"] or 0
        return one.planned.turn.blocks[: round(cached / self.block_tokens)]

    def overheads(self, places: range) -> list[Overhead]:
        """Return what passed between receipt and first leg, without the wait in the queue."""
        rows = [self.requests[at].record for at in places]
        return [Overhead(row["prompt_tokens"], _overhead_s(row)) for row in rows]


def _overhead_s(row: Record) -> float:
    queued_s = row["t_decided"] - (row["t_queued"] or row["t_decided"])
    sent_s = row["t_prefill_sent"] or row["t_decode_sent"]
    return float(max(0.0, sent_s - row["t_proxy_recv"] - queued_s))


def read_load(path: Path, model: str | None, kv_tokens: int | None, last: int) -> LoggedLoad:
    """Read the last requests of a log; raises RunError."""
    log = _Log(path, model, deque(maxlen=last))
    try:
        for line, (_name, record) in enumerate(log_records(path), start=1):
            log.add(line, record)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    rows = sorted(log.rows, key=lambda row: row["t_proxy_recv"])
    if problem := log.problem() or _problem(rows):
        raise RunError(f"{path}: {problem}")
    names = tuple(dict.fromkeys(name for row in rows for name in row["names"]))
    if len(names) > MOST_INSTANCES:
        raise RunError(f"{path}: must have {MOST_INSTANCES} instances at most, not {len(names)}")
    block = _block_tokens(rows)
    requests = tuple(_Reading(rows, block, kv_tokens).requests())
    if not any(one.ttft_s for one in requests):
        raise RunError(f"{path}: has no streams with counted tokens whose session began in it")
    return LoggedLoad(requests, names, rows[0]["policy"], block, log.left_out)


@dataclass(slots=True)
class _Log:
    """The last requests of a log that were served, in the log's order."""

    path: Path
    model: str | None
    rows: deque[Record]
    left_out: int = 0
    _models: set[str] = field(default_factory=set)
    _before_s: float = 0.0

    def add(self, line: int, record: Record) -> None:
        """Keep what is needed of a record; raises RunError for a log that is none of today's."""
        is_served = record.get("outcome") == "ok"
        missing = [name for name in FIELDS if name not in record] if is_served else []
        if missing:
            raise RunError(f"{self.path}:{line}: is of an older form: it has no {missing[0]}")
        if not is_served or not _is_whole(record):
            self.left_out += 1
            return
        if (back_s := self._before_s - record["t_done"]) > BACKWARDS_S:
            raise RunError(
                f"{self.path}:{line}: ended {back_s:,.0f} s before the line above: the log must be "
                "of one proxy, in its order"
            )
        self._before_s = record["t_done"]
        model = record["model"] or ""
        if len(self._models) < MOST_MODELS:
            self._models.add(model)
        if self.model in (None, model):
            self.rows.append(
                {name: record[name] for name in (*NUMBERS, *TEXTS)} | {"names": _names(record)}
            )

    def problem(self) -> str:
        """Say why there is nothing to repeat; empty if there is."""
        named = ", ".join(repr(name[:MOST_CHARS]) for name in sorted(self._models))
        if not named:
            return "has no line of a request that was served, with counted tokens"
        if not self.rows:
            return f"--model must be one of {named}, not {self.model!r}"
        if self.model is None and len(self._models) > 1:
            return f"has several models: --model must be one of {named}"
        return ""


def _problem(rows: Sequence[Record]) -> str:
    """Say why these requests cannot be repeated; empty if they can."""
    policies = sorted({row["policy"] for row in rows})
    if len(policies) > 1:
        return f"must be of one policy, not of {', '.join(policies)}"
    if max(row["t_done"] for row in rows) - rows[0]["t_proxy_recv"] > MOST_S:
        return f"must span {MOST_S / 86_400:.0f} days at most: --last takes fewer requests"
    return ""


def _is_whole(record: Record) -> bool:
    """Whether a record has all that is needed, of the types that the proxy writes."""
    kinds = ((NUMBERS, is_number), (TEXTS, lambda value: isinstance(value, str)))
    return (
        all(record[name] is not None for name in NEEDED)
        and all(record[n] is None or fits(record[n]) for names, fits in kinds for n in names)
        and all(isinstance(record[n], int) and 0 <= record[n] <= MOST_TOKENS for n in COUNTS)
        and min(record["isl_tokens"], record["prompt_tokens"], record["osl_tokens"]) >= 1
        and isinstance(record["candidates"] or [], list)
    )


def _names(record: Record) -> tuple[str, ...]:
    """Return the instances that were asked, or might have been."""
    named = [record["decode_instance"], record[P]]
    for one in record["candidates"] or ():
        named += [one.get("instance"), one.get("prefill")] if isinstance(one, dict) else []
    return tuple(sys.intern(name) for name in named if isinstance(name, str))


def _block_tokens(rows: Sequence[Record]) -> int:
    """Return the size of blocks, a power of two."""
    mean = statistics.fmean(row["prompt_tokens"] for row in rows)
    size = SMALLEST_BLOCK
    while size < LARGEST_BLOCK and size * BLOCKS < mean:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A session so far, by its latest request: its place in the load, its row and blocks.

    `computed_tokens`: those that its instance had computed by then.
    """

    name: str
    place: int
    row: Record
    blocks: tuple[int, ...]
    computed_tokens: int


@dataclass(slots=True)
class _Reading:
    """Makes the load's requests, one after the other."""

    rows: Sequence[Record]
    block_tokens: int
    kv_tokens: int | None
    _ids: Iterator[int] = field(default_factory=lambda: count(1))
    _common: list[int] = field(default_factory=list)
    """The blocks that sessions begin with."""
    _sessions: dict[str, _Conversation] = field(default_factory=dict)
    _nameless: deque[_Conversation] = field(default_factory=lambda: deque(maxlen=OPEN))
    _computed: Counter[str] = field(default_factory=Counter)
    """Tokens that each instance has computed."""

    def requests(self) -> Iterator[LoggedRequest]:
        """Yield the requests."""
        usual = self._usual_beginning()
        for place, row in enumerate(self.rows):
            hit = _hit_tokens(row)
            before = self._before(row, hit)
            if before is None:
                blocks = self._begun(row, hit or usual if row["turn"] == 0 else min(hit, usual))
            else:
                hit = self._with_evicted(row, hit, before)
                blocks = self._filled(row, before.blocks, hit)
            name = before.name if before else row["session_id"] or f"request {place}"
            self._computed[row["decode_instance"]] += row["prompt_tokens"] - hit
            done = self._computed[row["decode_instance"]]
            if row["turn"] is not None:
                self._note(_Conversation(name, place, row, blocks, done))
            planned = self._planned(row, name, blocks, hit, before)
            known = before is not None or not row["turn"]
            yield LoggedRequest(row, planned, known, before.place if before else None)

    def _planned(
        self,
        row: Record,
        name: str,
        blocks: tuple[int, ...],
        hit: int,
        before: _Conversation | None,
    ) -> Planned:
        prompt = row["prompt_tokens"]
        turn = TraceTurn(
            session=name,
            prompt_tokens=prompt,
            output_tokens=row["osl_tokens"],
            new_tokens=max(1, prompt - hit),
            blocks=blocks,
            shared=0,
            wait_for=(),
            delay_s=0.0,
            offset_s=0.0,
        )
        came_s = row["t_proxy_recv"]
        waits = before is not None and before.row["t_done"] <= came_s
        return Planned(
            turn,
            name,
            earliest_s=came_s - self.rows[0]["t_proxy_recv"],
            delay_s=0.0,
            wait_for=(before.place,) if before is not None and waits else (),
            estimate_factor=row["isl_tokens"] / prompt,
        )

    def _before(self, row: Record, hit: int) -> _Conversation | None:
        """Return the turn before; without a name the shortest prompt that is long enough."""
        if row["turn"] is None:
            return None
        if row["session_id"] is not None:
            return self._sessions.get(row["session_id"])
        found = [
            one
            for one in self._nameless
            if row["turn"] and hit - self.block_tokens <= one.row["prompt_tokens"]
        ]
        return min(found, key=lambda one: one.row["prompt_tokens"], default=None)

    def _note(self, one: _Conversation) -> None:
        if one.row["session_id"] is not None:
            self._sessions[one.name] = one
            return
        kept = [other for other in self._nameless if other.name != one.name]
        self._nameless = deque([*kept, one], maxlen=OPEN)

    def _with_evicted(self, row: Record, hit: int, before: _Conversation) -> int:
        """Return the hit, and with it what the KV had no room for since the turn before."""
        prompt = before.row["prompt_tokens"]
        if self.kv_tokens is None or row["prompt_tokens"] < prompt:
            return hit
        since = self._computed[before.row["decode_instance"]] - before.computed_tokens
        return max(hit, prompt) if since > self.kv_tokens * EVICTING_RATIO else hit

    def _usual_beginning(self) -> int:
        """Return what first turns have in common, for those that were too early to hit it."""
        hits = [_hit_tokens(row) for row in self.rows if row["turn"] == 0]
        return int(statistics.median(hits)) if hits else 0

    def _begun(self, row: Record, hit: int) -> tuple[int, ...]:
        """Return a first turn's blocks; the common ones grow as sessions hit more of them."""
        whole = row["prompt_tokens"] // self.block_tokens
        wanted = min(round(hit / self.block_tokens), whole)
        self._common += [next(self._ids) for _ in range(wanted - len(self._common))]
        return self._filled(row, tuple(self._common), hit)

    def _filled(self, row: Record, blocks: tuple[int, ...], hit: int) -> tuple[int, ...]:
        """Return a prompt's blocks: those that it has in common, then new ones."""
        whole = row["prompt_tokens"] // self.block_tokens
        kept = blocks[: min(round(hit / self.block_tokens), whole)]
        return (*kept, *(next(self._ids) for _ in range(whole - len(kept))))


def _hit_tokens(row: Record) -> int:
    """Return the tokens of a prompt that were cached on any instance, as the engine counts them.

    What the engine reports is exact, if D had as much as any. KV from P is reported as cached too.
    """
    prompt, cached = row["prompt_tokens"], row["cached_tokens"]
    reachable = row["reachable_hit_tokens"] * prompt / row["isl_tokens"]
    if cached is None or row[P] is not None:
        return int(min(reachable, prompt - 1))
    is_best = row["hit_tokens"] >= KNOWN_RATIO * row["reachable_hit_tokens"]
    return int(min(cached if is_best else max(cached, reachable), prompt - 1))
