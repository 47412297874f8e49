"""The instances that a decision may choose, in columns: one list per thing that is known of them.

A decision looks at numbers of every instance, and at few instances as such. So the numbers are
gathered list by list, and a Candidate is made of one when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import overload

from proxy.core.types import Candidate, Instance, Load

Rank = Callable[[int], tuple[int, int]]
"""Of the instance at a place: its sessions and its last placement, for those equal otherwise."""


@dataclass(slots=True, init=False)
class Candidates:
    """Columns in the order of the instances; what each means is said in `Candidate`."""

    prompt_tokens: int
    instances: list[Instance]
    names: list[str]
    loads: list[Load]
    hit_tokens: list[int]
    kv_full: list[float]
    kv_wait_s: list[float]
    rank: Rank
    _made: dict[int, Candidate]

    def __init__(
        self,
        prompt_tokens: int,
        instances: list[Instance],
        names: list[str],
        loads: list[Load],
        hit_tokens: list[int],
        kv_full: list[float],
        kv_wait_s: list[float],
        rank: Rank,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.instances, self.names, self.loads = instances, names, loads
        self.hit_tokens, self.kv_full, self.kv_wait_s = hit_tokens, kv_full, kv_wait_s
        self.rank = rank
        self._made = {}

    @classmethod
    def of(cls, free: Iterable[Candidate], prompt_tokens: int) -> Candidates:
        """The columns of candidates that are there already."""
        if isinstance(free, cls):
            return free
        made = list(free)
        self = cls(
            prompt_tokens,
            [c.instance for c in made],
            [c.instance.name for c in made],
            [c.load for c in made],
            [c.hit_tokens for c in made],
            [c.kv_full for c in made],
            [c.kv_wait_s for c in made],
            lambda at: (made[at].sessions, made[at].last_placed),
        )
        self._made = dict(enumerate(made))
        return self

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.at, range(len(self.names)))

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        places = range(len(self.names))[at]
        return self.at(places) if isinstance(places, int) else list(map(self.at, places))

    def at(self, at: int) -> Candidate:
        """The candidate at a place, the same one every time."""
        found = self._made.get(at)
        if found is None:
            hit = self.hit_tokens[at]
            sessions, last_placed = self.rank(at)
            found = self._made[at] = Candidate(
                self.instances[at],
                self.loads[at],
                hit,
                self.prompt_tokens - hit,
                sessions,
                last_placed,
                self.kv_full[at],
                self.kv_wait_s[at],
            )
        return found
