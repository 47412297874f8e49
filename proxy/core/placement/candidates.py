"""The instances that a decision may choose, in columns: one list per property.

A decision reads numbers of every instance but needs few instances as objects. So the numbers are
gathered in lists, and a Candidate is only made on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import overload

from proxy.core.types import Candidate, Instance, Load


@dataclass(slots=True, init=False)
class Candidates:
    """Columns in the order of the instances; `Candidate` says what each of them means.

    `has_failed`: whether something has failed there since it last worked. `prefill_factors`: what a
    prefill is priced at there, 1 where it is cool; None where all are cool, as is `helps` then.
    """

    prompt_tokens: int
    instances: list[Instance]
    names: list[str]
    loads: list[Load]
    hit_tokens: list[int]
    kv_full: list[float]
    kv_wait_s: list[float]
    kv_tokens: list[int | None]
    unreleased: list[tuple[int, int]]
    sessions: list[int]
    last_placed: list[int]
    has_failed: list[bool]
    helps: list[bool] | None
    prefill_factors: list[float] | None
    _made: list[Candidate | None]

    def __init__(
        self,
        *,
        prompt_tokens: int,
        instances: list[Instance],
        names: list[str],
        loads: list[Load],
        hit_tokens: list[int],
        kv_full: list[float],
        kv_wait_s: list[float],
        kv_tokens: list[int | None],
        unreleased: list[tuple[int, int]],
        sessions: list[int],
        last_placed: list[int],
        has_failed: list[bool] | None = None,
        helps: list[bool] | None = None,
        prefill_factors: list[float] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.instances, self.names, self.loads = instances, names, loads
        self.hit_tokens, self.kv_full, self.kv_wait_s = hit_tokens, kv_full, kv_wait_s
        self.kv_tokens, self.unreleased = kv_tokens, unreleased
        self.sessions, self.last_placed = sessions, last_placed
        self.has_failed = has_failed or [False] * len(names)
        self.helps, self.prefill_factors = helps, prefill_factors
        self._made = [None] * len(names)

    @classmethod
    def of(cls, free: Iterable[Candidate], prompt_tokens: int) -> Candidates:
        """Columns of existing candidates."""
        made = list(free)
        self = cls(
            prompt_tokens=prompt_tokens,
            instances=[c.instance for c in made],
            names=[c.instance.name for c in made],
            loads=[c.load for c in made],
            hit_tokens=[c.hit_tokens for c in made],
            kv_full=[c.kv_full for c in made],
            kv_wait_s=[c.kv_wait_s for c in made],
            kv_tokens=[c.kv_tokens for c in made],
            unreleased=[c.unreleased for c in made],
            sessions=[c.sessions for c in made],
            last_placed=[c.last_placed for c in made],
        )
        self._made[:] = made
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
        """The candidate at an index, the same object on every call."""
        found = self._made[at]
        if found is None:
            hit = self.hit_tokens[at]
            found = self._made[at] = Candidate(
                instance=self.instances[at],
                load=self.loads[at],
                hit_tokens=hit,
                new_tokens=self.prompt_tokens - hit,
                sessions=self.sessions[at],
                last_placed=self.last_placed[at],
                kv_full=self.kv_full[at],
                kv_wait_s=self.kv_wait_s[at],
                kv_tokens=self.kv_tokens[at],
                unreleased=self.unreleased[at],
                helps=self.helps is None or self.helps[at],
            )
        return found

    def place_of(self, name: str | None) -> int | None:
        """The index of an instance; None if it may not be chosen."""
        return self.names.index(name) if name is not None and name in self.names else None
