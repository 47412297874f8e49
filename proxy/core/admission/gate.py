"""The busy gate: which instances are past a threshold, and when the first will be free again.

Three opt-in checks per instance, OR-ed, each strictly greater-than (at the threshold is free):
ongoing prefill tokens, the same as a fraction of a step's token budget, and KV blocks in use. The
block check looks at two signals, this proxy's own count and the engine's last report: either one
over makes busy, and it ends only when both are back at or below the line. The semantics are those
of NVIDIA Dynamo's request rejection, so operators' thresholds carry over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.core.admission.engine_reports import EngineKv, Reports
from proxy.core.admission.retry_after import UNKNOWN_DRAIN_S
from proxy.core.kvcache.room import KV_TURNOVER_S, KV_USABLE_RATIO, ReleaseRate
from proxy.core.types import OFF, Load, RejectReason, Thresholds

STALE_S = 10.0
"""An engine's report older than this is ignored; the own count goes on alone."""
ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class Busy:
    """Why an instance is busy, and in how many seconds it is predicted to be free."""

    check: RejectReason
    free_in_s: float


class Gate:
    """Thresholds per model, signals per instance. `max_batched_tokens`: a step's token budget."""

    def __init__(
        self, thresholds: Thresholds, max_batched_tokens: int, prefill_throughput: float
    ) -> None:
        # OFF is one object in here, so that a decision need not compare.
        self._by_model = {ANY_MODEL: OFF if thresholds == OFF else thresholds}
        self._batched = max_batched_tokens
        self._prefill_tps = prefill_throughput
        self._engine: dict[str, tuple[EngineKv, float]] = {}
        self._cooldown_until_s: dict[str, float] = {}
        self._released: dict[str, ReleaseRate] = {}
        self.reports = Reports()
        self._kv_tokens: dict[str, int] = {}
        self._least_room = math.inf
        self.kv_tokens: Callable[[str], int | None] = self._kv_tokens.get
        """The size of an instance's KV cache, where its engine reported one.

        Not a method of ours, since a decision asks it once per instance."""
        self.on_change: Callable[[], None] | None = None
        """Called after what may have made somebody free; None while nobody waits for it."""

    def thresholds(self, model: str) -> Thresholds:
        """The limits in force for a model: its own, else those for all models."""
        return self._by_model.get(model, self._by_model[ANY_MODEL])

    def configured(self) -> dict[str, Thresholds]:
        """Every model with limits of its own, and `*`."""
        return dict(self._by_model)

    def set(self, model: str, thresholds: Thresholds) -> None:
        """Overwrite a model's limits; in force with the next decision."""
        self._by_model[model] = OFF if thresholds == OFF else thresholds
        self._changed()

    def unset(self, model: str) -> None:
        """Remove a model's own limits; for `*`, switch the three checks off."""
        self._by_model.pop(model, None)
        self._by_model.setdefault(ANY_MODEL, OFF)
        self._changed()

    def observe_engine(
        self, instance: str, kv: EngineKv, now_s: float, mark: int | None = None
    ) -> None:
        """Take in the engine's own report; `mark` is equal for equal ones, see `core.frozen`."""
        if mark is not None and self._is_frozen(instance, kv, now_s, mark):
            kv = replace(kv, used_ratio=None)
        self._engine[instance] = kv, now_s
        if kv.total_tokens != self._kv_tokens.get(instance):
            self._sized()
        self._changed()

    def _is_frozen(self, instance: str, kv: EngineKv, now_s: float, mark: int) -> bool:
        released = self._released.get(instance)
        answers = released.count if released else 0
        is_in_use = bool(kv.used_ratio)
        return self.reports.observe(instance, mark, now_s, answers=answers, is_in_use=is_in_use)

    def _sized(self) -> None:
        sizes = {name: kv.total_tokens for name, (kv, _) in self._engine.items()}
        self._kv_tokens.clear()
        self._kv_tokens.update((name, size) for name, size in sizes.items() if size)
        self._least_room = KV_USABLE_RATIO * min(self._kv_tokens.values(), default=math.inf)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def next_change_s(self, now_s: float) -> float | None:
        """When time alone may make an instance free next: a cool-down ends, a report grows old."""
        stale = (seen_s + STALE_S for _, seen_s in self._engine.values())
        return min(
            (t for t in (*self._cooldown_until_s.values(), *stale) if t > now_s), default=None
        )

    def intake_tps(self, instance: str, check: RejectReason, now_s: float) -> float:
        """Prompt tokens per second that an instance past this check is thought to take in."""
        capacity = self.kv_tokens(instance)
        if check is not RejectReason.DECODE_BLOCKS or not capacity:
            return self._prefill_tps
        return self.release_tps(instance, now_s) or capacity / KV_TURNOVER_S

    def kv_wait_s(self, instance: str, load: Load, tokens: int, now_s: float) -> float:
        """Until streams will have freed the KV that a prompt lacks; 0 while the size is unknown.

        An engine begins a prompt only when its KV fits beside what is running.
        """
        capacity = self._kv_tokens.get(instance)
        if capacity is None:
            return 0.0
        excess = load.held_tokens + tokens - KV_USABLE_RATIO * capacity
        if excess <= 0:
            return 0.0
        return excess / (self.release_tps(instance, now_s) or capacity / KV_TURNOVER_S)

    def kv_waits_s(
        self,
        names: Sequence[str],
        loads: Sequence[Load],
        prompt_tokens: int,
        now_s: float,
    ) -> list[float]:
        """The same of several, for the whole prompt; hardly any has to wait.

        What a prompt finds in the cache is nobody else's while it runs, so it needs room for that
        as well.
        """
        most_tokens = 0
        for load in loads:
            if load.held_tokens > most_tokens:
                most_tokens = load.held_tokens
        if most_tokens + prompt_tokens <= self._least_room:
            return [0.0] * len(names)
        asked = zip(names, loads, strict=True)
        return [self.kv_wait_s(name, load, prompt_tokens, now_s) for name, load in asked]

    def release_tps(self, instance: str, now_s: float) -> float | None:
        """KV tokens per second that ending streams gave back lately; None while unknown."""
        released = self._released.get(instance)
        return released.tokens_per_s(now_s) if released else None

    def mark_busy(self, instance: str, until_s: float) -> None:
        """The engine itself answered that it is at capacity."""
        self._cooldown_until_s[instance] = max(until_s, self._cooldown_until_s.get(instance, 0.0))

    def released(self, instance: str, tokens: int, now_s: float) -> None:
        """A stream ended and gave its KV back."""
        self._released.setdefault(instance, ReleaseRate()).add(tokens, now_s)

    def forget(self, instance: str) -> None:
        """An instance restarted or left."""
        if self._engine.pop(instance, None) is not None:
            self._sized()
        self._cooldown_until_s.pop(instance, None)
        self._released.pop(instance, None)
        self.reports.forget(instance)

    def is_open(self, model: str, now_s: float) -> bool:
        """Whether nobody can be busy: no limit is set, and no engine cools down."""
        cooling = self._cooldown_until_s
        if not cooling:
            return self.thresholds(model) is OFF
        for instance in [name for name, until_s in cooling.items() if until_s <= now_s]:
            del cooling[instance]
        return not cooling and self.thresholds(model) is OFF

    def busy(
        self,
        instance: str,
        model: str,
        load: Load,
        now_s: float,
        limits: Thresholds | None = None,
    ) -> Busy | None:
        """Whether the instance is past a threshold (of the model's, or `limits`); None is free.

        Named is the first check that is over; free again it is when the last one has cleared.
        """
        limits = limits or self.thresholds(model)
        over: list[Busy] = []
        if self._cooldown_until_s:
            over += self._cooling(instance, now_s)
        if load.prefill_tokens:
            over += self._prefill_over(limits, load)
        if limits.active_decode_blocks_threshold is not None:
            over += self._decode_over(instance, limits, load, now_s)
        return Busy(over[0].check, max(busy.free_in_s for busy in over)) if over else None

    def _cooling(self, instance: str, now_s: float) -> Iterator[Busy]:
        cooldown_s = self._cooldown_until_s.get(instance, now_s) - now_s
        if cooldown_s > 0:
            yield Busy(RejectReason.UPSTREAM_BUSY, cooldown_s)

    def _prefill_over(self, limits: Thresholds, load: Load) -> Iterator[Busy]:
        frac = limits.active_prefill_tokens_threshold_frac
        checks = (
            (RejectReason.PREFILL_TOKENS, limits.active_prefill_tokens_threshold),
            (RejectReason.PREFILL_FRAC, None if frac is None else frac * self._batched),
        )
        for check, limit in checks:
            if limit is not None and load.prefill_tokens > limit:
                yield Busy(check, (load.prefill_tokens - limit) / self._prefill_tps)

    def _decode_over(
        self, instance: str, limits: Thresholds, load: Load, now_s: float
    ) -> Iterator[Busy]:
        limit = limits.active_decode_blocks_threshold
        kv, seen_s = self._engine.get(instance, (EngineKv(), now_s))
        if limit is None or not kv.total_tokens:
            return
        reported = (kv.used_ratio or 0.0) if now_s - seen_s <= STALE_S else 0.0
        own = (load.decode_tokens + load.inbound_tokens) / kv.total_tokens
        excess_tokens = (max(own, reported) - limit) * kv.total_tokens
        if excess_tokens > 0:
            rate = self.release_tps(instance, now_s)
            wait_s = excess_tokens / rate if rate else UNKNOWN_DRAIN_S
            yield Busy(RejectReason.DECODE_BLOCKS, wait_s)
