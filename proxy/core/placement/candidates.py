"""The instances that a decision may choose: as rows, and in columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import overload

from proxy.core.latency.pace import Pace
from proxy.core.types import NONE_UNRELEASED, Instance, Load


@dataclass(slots=True, init=False)
class Candidate:
    """One instance as a decision sees it."""

    instance: Instance
    load: Load
    hit_tokens: int
    new_tokens: int
    sessions: int
    last_placed: int
    """Number of its last placement, 0 for never."""
    kv_full: float
    """Share of its KV cache that is running or reusable, 0..1."""
    kv_wait_s: float
    """Seconds until running streams free enough KV for this prompt."""
    kv_tokens: int | None
    """Size of its KV cache, None while unknown."""
    unreleased: tuple[int, int]
    """Number and tokens of broken hand-overs whose KV it may still hold."""
    helps: bool
    """Whether its heat allows prefill for others."""
    pace: Pace
    """What is known of its times."""
    key_tokens: int
    """Hit predicted by the prompt's key, while `hit_tokens` is used (`core.kvcache.trust`)."""

    def __init__(
        self,
        instance: Instance,
        load: Load,
        hit_tokens: int,
        new_tokens: int,
        pace: Pace,
        sessions: int = 0,
        last_placed: int = 0,
        kv_full: float = 0.0,
        kv_wait_s: float = 0.0,
        kv_tokens: int | None = None,
        unreleased: tuple[int, int] = NONE_UNRELEASED,
        helps: bool = True,
        key_tokens: int | None = None,
    ) -> None:
        self.instance = instance
        self.load = load
        self.hit_tokens = hit_tokens
        self.new_tokens = new_tokens
        self.pace = pace
        self.sessions = sessions
        self.last_placed = last_placed
        self.kv_full = kv_full
        self.kv_wait_s = kv_wait_s
        self.kv_tokens = kv_tokens
        self.unreleased = unreleased
        self.helps = helps
        self.key_tokens = hit_tokens if key_tokens is None else key_tokens


@dataclass(slots=True, init=False)
class Candidates:
    """The instances that a decision may choose, in columns of `Candidate`'s fields.

    A decision reads numbers of every instance but needs few of them as objects, so a Candidate is
    only made on access.
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
    """Whether something failed there since it last worked."""
    doubts: list[float] | None
    """Doubt by hollow answers, 0 to 1; None without any."""
    helps: list[bool] | None
    """As in `Candidate`; None if all instances are cool."""
    prefill_factors: list[float] | None
    """Price factor of a prefill, 1 on a cool instance; None if all are cool."""
    paces: list[Pace]
    """What is known of the instances' times."""
    key_tokens: list[int]
    is_home_doubted: bool
    """The hit of the session's home is doubtful, see `core.kvcache.trust`."""
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
        paces: list[Pace],
        has_failed: list[bool] | None = None,
        doubts: list[float] | None = None,
        helps: list[bool] | None = None,
        prefill_factors: list[float] | None = None,
        key_tokens: list[int] | None = None,
        is_home_doubted: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.instances, self.names, self.loads = instances, names, loads
        self.hit_tokens, self.kv_full, self.kv_wait_s = hit_tokens, kv_full, kv_wait_s
        self.kv_tokens, self.unreleased = kv_tokens, unreleased
        self.sessions, self.last_placed = sessions, last_placed
        self.has_failed = has_failed or [False] * len(names)
        self.doubts = doubts
        self.helps, self.prefill_factors = helps, prefill_factors
        self.paces = paces
        self.key_tokens = hit_tokens if key_tokens is None else key_tokens
        self.is_home_doubted = is_home_doubted
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
            paces=[c.pace for c in made],
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
                pace=self.paces[at],
                sessions=self.sessions[at],
                last_placed=self.last_placed[at],
                kv_full=self.kv_full[at],
                kv_wait_s=self.kv_wait_s[at],
                kv_tokens=self.kv_tokens[at],
                unreleased=self.unreleased[at],
                helps=self.helps is None or self.helps[at],
                key_tokens=self.key_tokens[at],
            )
        return found

    def place_of(self, name: str | None) -> int | None:
        """The index of an instance; None if it may not be chosen."""
        return self.names.index(name) if name is not None and name in self.names else None
