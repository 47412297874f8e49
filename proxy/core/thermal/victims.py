"""Choice of requests to evict, with its gain and its bytes to move.

A policy orders the running requests, the first is evicted first. All of them skip what cannot be
moved, what was moved lately and what was moved often, so that a request is not passed around.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOVE_BYTES_PER_S = 40e9
"""Bandwidth of PCIe 5.0 x16 by the founding document: 16 GB take 400 ms."""
MOVE_FIXED_S = 0.03
"""Time of a migration beside its bytes: the hand-over between two engines."""
APART_S = 60.0
"""A request is moved for heat once in this time."""
MOST_MOVES = 2
"""And so often in its life."""
SETTLED_S = 10.0
"""KV that arrived later than this stays."""
LINK_PART = 0.5
"""Part of a link's learned bandwidth that moves for heat may take."""
MOST_LINKS = 4096
"""Links whose use is remembered; the one used longest ago is forgotten."""
BURST_S = 1.0
"""A bucket holds what flows in this time: a larger move is let go when the bucket is full."""
MOST_MOVED_RATIO_PER_MINUTE = 0.1
"""Evictions of an instance per minute, as a part of what runs; at least one."""


@dataclass(frozen=True, slots=True)
class Victim:
    """One running request."""

    request_id: str
    kv_tokens: int = 0
    last_token_s: float = 0.0
    """Time of its last token."""
    priority: int = 0
    """As in vLLM: a lower number is more important."""
    remaining_tokens: int = 0
    """Expected further tokens."""
    qps: float = 0.0
    """Request rate of its tenant or session."""
    is_movable: bool = True
    """It can migrate."""
    moves: int = 0
    """Number of migrations for heat."""
    moved_s: float = -math.inf
    """Time of the last one."""
    arrived_s: float = -math.inf
    """Time when its KV came to this instance."""

    def get_num_kv_blocks(self) -> int:
        """The founding document's name for how much KV a sequence holds, in blocks of 16 tokens."""
        return -(-self.kv_tokens // 16)

    def may_move(self, now_s: float) -> bool:
        """Whether it can be moved and was not moved lately."""
        return (
            self.is_movable
            and self.moves < MOST_MOVES
            and now_s - self.moved_s >= APART_S
            and now_s - self.arrived_s >= SETTLED_S
        )


@dataclass(frozen=True, slots=True)
class Relief:
    """Inputs of `max_relief`: watts of a sequence and of its KV, and the time of a move."""

    watts_per_sequence: float = 3.2
    watts_per_kv_token: float = 0.0
    bytes_per_token: float = 131_072.0
    bytes_per_s: float = MOVE_BYTES_PER_S

    def of(self, victim: Victim) -> float:
        """Watts times what is left to decode, per second of the move."""
        watts = self.watts_per_sequence + self.watts_per_kv_token * victim.kv_tokens
        return watts * victim.remaining_tokens / self.move_s(victim)

    def move_s(self, victim: Victim) -> float:
        """Seconds to move its KV."""
        bytes_moved = victim.kv_tokens * self.bytes_per_token
        return MOVE_FIXED_S + transfer_s(bytes_moved, self.bytes_per_s)


Key = tuple[float, ...]
Order = Callable[[Victim, Relief], Key]


def _lru(victim: Victim, relief: Relief) -> Key:
    return (victim.last_token_s,)


def _largest_kv(victim: Victim, relief: Relief) -> Key:
    return (-victim.kv_tokens,)


def _lowest_priority(victim: Victim, relief: Relief) -> Key:
    # The founding document: "lowest priority: longest remaining, lowest QPS".
    return (-victim.priority, -victim.remaining_tokens, victim.qps)


def _longest_remaining(victim: Victim, relief: Relief) -> Key:
    return (-victim.remaining_tokens,)


def _least_qps(victim: Victim, relief: Relief) -> Key:
    return (victim.qps,)


def _max_relief(victim: Victim, relief: Relief) -> Key:
    return (-relief.of(victim),)


VICTIMS: dict[str, Order] = {
    "lru": _lru,
    "largest_kv": _largest_kv,
    "lowest_priority": _lowest_priority,
    "longest_remaining": _longest_remaining,
    "least_qps": _least_qps,
    "max_relief": _max_relief,
}
"""Each policy's order; equal requests leave by their ids."""


def select_victims(
    policy: str,
    running: Sequence[Victim],
    count: int,
    now_s: float,
    relief: Relief | None = None,
    *,
    may_abort: bool = False,
) -> list[Victim]:
    """At most `count` requests to evict, the first one first.

    `may_abort`: what cannot be moved is chosen too, behind all that can; it will be ended.
    """
    if policy not in VICTIMS:
        raise ValueError(f"policy must be one of {', '.join(VICTIMS)}, not {policy[:40]!r}")
    order = VICTIMS[policy]
    weighed = Relief() if relief is None else relief
    rows: list[tuple[bool, Key, str, Victim]] = []
    for victim in running:
        may_move = victim.may_move(now_s)
        if may_move or (may_abort and not victim.is_movable):
            rows.append((not may_move, order(victim, weighed), victim.request_id, victim))
    rows.sort(key=_place)
    return [row[3] for row in rows[: max(0, count)]]


def _place(row: tuple[bool, Key, str, Victim]) -> tuple[bool, Key, str]:
    return row[:3]


def most_evictions(running: int, evicted_last_minute: int) -> int:
    """Number of further evictions by the limit per minute."""
    most = max(1, math.floor(running * MOST_MOVED_RATIO_PER_MINUTE))
    return max(0, most - evicted_last_minute)


def transfer_s(bytes_moved: float, bytes_per_s: float = MOVE_BYTES_PER_S) -> float:
    """Seconds to move so many bytes of KV: 16 GB at 40 GB/s are 0.4 s."""
    return bytes_moved / bytes_per_s


def queue_s(remaining_s: Sequence[float], cap: int) -> float:
    """Seconds that the next request waits for a place under the cap without an eviction.

    `remaining_s`: how long each running request will still take. Where so many have to end first,
    it is the time at which the last of these ends.
    """
    over = len(remaining_s) - max(1, cap) + 1
    return 0.0 if over <= 0 else sorted(remaining_s)[over - 1]


def is_worth_moving(wait_s: float, move_s: float, remaining_s: float | None = None) -> bool:
    """The founding document's rule: only where the new request would wait longer than the move.

    And, where it is known what the victim has left: only if that is more than two moves.
    """
    return wait_s > move_s and (remaining_s is None or remaining_s > 2.0 * move_s)


class _Bucket:
    __slots__ = ("at_s", "filled")

    def __init__(self, filled: float, at_s: float) -> None:
        self.filled = filled
        self.at_s = at_s

    def fill(self, bytes_per_s: float, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.at_s)
        self.filled = min(bytes_per_s * BURST_S, self.filled + passed_s * bytes_per_s)
        self.at_s = max(self.at_s, now_s)

    def wait_s(self, wanted: float, bytes_per_s: float) -> float:
        needed = min(wanted, bytes_per_s * BURST_S)
        # Less than a byte is what floats leave over.
        return (needed - self.filled) / bytes_per_s if needed - self.filled >= 1.0 else 0.0


class MoveBudget:
    """Bytes that moves for heat may take: over the fleet, and half of each learned link.

    A move larger than a bucket waits until it is full and leaves it below zero, so the mean rate is
    kept whatever the sizes are.
    """

    def __init__(self, fleet_bytes_per_s: float) -> None:
        self._fleet_bytes_per_s = fleet_bytes_per_s
        self._fleet = _Bucket(fleet_bytes_per_s * BURST_S, 0.0)
        self._links: dict[str, _Bucket] = {}

    def take(
        self, link: str, bytes_moved: float, now_s: float, link_bytes_per_s: float | None = None
    ) -> float:
        """0 where the move may begin, and its bytes are taken; else seconds to wait, none taken.

        `link_bytes_per_s`: the learned bandwidth of the link, None where there is none yet.
        """
        fleet_rate = self._fleet_bytes_per_s
        self._fleet.fill(fleet_rate, now_s)
        wait_s = self._fleet.wait_s(bytes_moved, fleet_rate)
        bucket: _Bucket | None = None
        if link_bytes_per_s is not None and link_bytes_per_s > 0.0:
            rate = link_bytes_per_s * LINK_PART
            bucket = self._links.pop(link, None)
            if bucket is None:
                bucket = _Bucket(rate * BURST_S, now_s)
            self._links[link] = bucket
            if len(self._links) > MOST_LINKS:
                del self._links[next(iter(self._links))]
            bucket.fill(rate, now_s)
            wait_s = max(wait_s, bucket.wait_s(bytes_moved, rate))
        if wait_s > 0.0:
            return wait_s
        self._fleet.filled -= bytes_moved
        if bucket is not None:
            bucket.filled -= bytes_moved
        return 0.0
