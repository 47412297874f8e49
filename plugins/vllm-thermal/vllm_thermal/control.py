"""The cap of running requests and the tokens of a step: what is asked, what holds, who gives way.

Values in, values out: no vLLM, clock, IO or thread, so that it is tested and used without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

MOST = 1_000_000_000
"""Largest number that a request may name; above what an engine has, what it has is meant."""
MOST_TTL_S = 86_400.0


class WishError(ValueError):
    """A request that cannot be understood; its text says which field and what it may be."""


@dataclass(frozen=True, slots=True)
class Running:
    """A running request, as far as the choice of who gives way needs it.

    `last_step`: the engine step that last gave it tokens. `priority`: as vLLM has it, a larger
    number is less important.
    """

    request_id: str
    arrival_s: float = 0.0
    kv_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    last_step: int = 0


Key = Callable[[Running], tuple[float, ...]]
VICTIMS: Mapping[str, Key] = {
    "newest": lambda r: (r.arrival_s,),
    "largest_kv": lambda r: (r.kv_tokens, r.arrival_s),
    "most_remaining": lambda r: (r.max_tokens - r.output_tokens, r.arrival_s),
    "least_progress": lambda r: (-r.output_tokens, r.arrival_s),
    "lowest_priority": lambda r: (r.priority, r.arrival_s),
    "lru": lambda r: (-r.last_step, r.arrival_s),
}
"""Who gives way first: the largest by its key. Among equals the newest, as vLLM itself does."""


def ranked(running: Sequence[Running], victim: str) -> list[Running]:
    """All of them, the first to give way first."""
    key = VICTIMS[victim]
    return sorted(running, key=lambda r: (*key(r), r.request_id), reverse=True)


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. None: no limit but the engine's own.

    `preempt`: requests above the cap give way at once; without it none begins until enough have
    ended. `ttl_s`: the limits end by themselves so long after they were set.
    """

    cap: int | None = None
    victim: str = "newest"
    preempt: bool = True
    max_tokens_per_step: int | None = None
    ttl_s: float | None = None

    def changed(self, body: object) -> Wish:
        """This with the fields of a request's body; one that is not named stays as it is.

        Raises WishError.
        """
        if not isinstance(body, dict):
            raise WishError("the body is not a JSON object")
        if not body:
            raise WishError(f"the body is empty: it may have {_names(FIELDS)}")
        for name, value in body.items():
            check = FIELDS.get(name)
            if check is None:
                raise WishError(
                    f"there is no field {name!r:.64}: the body may have {_names(FIELDS)}"
                )
            check(name, value)
        return replace(self, **body)


def _integer(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= MOST):
        raise WishError(
            f"{name} is {value!r:.64}: it must be a whole number from 0 to {MOST}, or null"
        )


def _seconds(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST_TTL_S:
        raise WishError(f"{name} is {value!r:.64}: it must be above 0 to {MOST_TTL_S:g}, or null")


def _flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise WishError(f"{name} is {value!r:.64}: it must be true or false")


def _victim(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in VICTIMS:
        raise WishError(f"{name} is {value!r:.64}: it must be one of {_names(VICTIMS)}")


FIELDS: Mapping[str, Callable[[str, object], None]] = {
    "cap": _integer,
    "victim": _victim,
    "preempt": _flag,
    "max_tokens_per_step": _integer,
    "ttl_s": _seconds,
}


def _names(of: Mapping[str, object]) -> str:
    return ", ".join(of)


class Control:
    """The limits of one engine: those asked for, those of its policy, and how they are kept.

    `full_cap`, `full_tokens`: what the engine was started with; no limit goes above them.
    `least_tokens`: below so many tokens a step, some prompt might never be computed;
    `needs_whole_steps`: why none may have fewer than it was started with, else None.
    """

    def __init__(
        self,
        full_cap: int,
        full_tokens: int,
        least_tokens: int = 1,
        needs_whole_steps: str | None = None,
    ) -> None:
        self.full_cap = full_cap
        self.full_tokens = full_tokens
        self._least_tokens = min(least_tokens, full_tokens)
        self._needs_whole_steps = needs_whole_steps
        self.wish = Wish()
        self._ends_s: float | None = None
        self.policy_cap: int | None = None
        self.steps = 0
        self.preempted = 0
        self.skipped = 0
        self._since = 0
        self._steps_to_cap: int | None = 0

    def change(self, body: object, now_s: float, running: int) -> None:
        """Put what a body asks in force from the next step on; raises WishError."""
        wish = self.wish.changed(body)
        if wish.max_tokens_per_step is not None and self._needs_whole_steps:
            raise WishError(f"max_tokens_per_step cannot be set: {self._needs_whole_steps}")
        before = self.cap()
        self.wish = wish
        if wish.ttl_s is None:
            self._ends_s = None
        elif isinstance(body, dict) and "ttl_s" in body:
            self._ends_s = now_s + wish.ttl_s
        self._restart(before, running)

    def cap(self) -> int:
        """Most requests that may run: the lower of what was asked and what the policy says."""
        asked = self.full_cap if self.wish.cap is None else self.wish.cap
        policy = self.full_cap if self.policy_cap is None else self.policy_cap
        return max(1, min(asked, policy, self.full_cap))

    @property
    def is_by_policy(self) -> bool:
        """Whether the cap is the policy's, and lower than what was asked."""
        asked = self.full_cap if self.wish.cap is None else self.wish.cap
        return self.policy_cap is not None and self.policy_cap < asked

    def tokens(self, running: int, per_request: int) -> int:
        """Most tokens of a step; a token for each running request, whatever was asked."""
        if self.wish.max_tokens_per_step is None:
            return self.full_tokens
        least = self._least_tokens + running * per_request
        return min(self.full_tokens, max(self.wish.max_tokens_per_step, least))

    def begin_step(self, now_s: float, running: int, policy_cap: int | None = None) -> int:
        """A step begins: how many of the running requests have to give way in it."""
        self.steps += 1
        before = self.cap()
        if self._ends_s is not None and now_s >= self._ends_s:
            self.wish = replace(self.wish, cap=None, max_tokens_per_step=None, ttl_s=None)
            self._ends_s = None
        self.policy_cap = policy_cap
        self._restart(before, running)
        return max(0, running - self.cap()) if self.wish.preempt else 0

    def end_choice(self, running: int, preempted: int, skipped: int) -> None:
        """Requests have given way; `skipped`: had to, and could not in this step."""
        self.preempted += preempted
        self.skipped += skipped
        if self._steps_to_cap is None and running <= self.cap():
            self._steps_to_cap = self.steps - self._since

    def _restart(self, before: int, running: int) -> None:
        """Count steps anew if the cap has become another one."""
        if self.cap() == before:
            return
        self._since = self.steps
        self._steps_to_cap = 0 if running <= self.cap() else None

    def status(self, now_s: float, running: int, waiting: int) -> dict[str, Any]:
        """What GET tells of one engine. `limit` is the cap in force, whoever asked for it."""
        wish = {f.name: getattr(self.wish, f.name) for f in fields(Wish)}
        if self.wish.cap is not None:
            wish["cap"] = max(1, min(self.wish.cap, self.full_cap))
        if self.wish.max_tokens_per_step is not None:
            wish["max_tokens_per_step"] = self.tokens(0, 0)
        wish["ttl_s"] = None if self._ends_s is None else max(0.0, self._ends_s - now_s)
        return wish | {
            "limit": self.cap(),
            "full_cap": self.full_cap,
            "full_tokens_per_step": self.full_tokens,
            "running": running,
            "waiting": waiting,
            "preempted": self.preempted,
            "skipped": self.skipped,
            "steps": self.steps,
            "steps_to_limit": self._steps_to_cap,
        }
