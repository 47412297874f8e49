"""The busy gate: instances above a threshold, and when each is predicted to be free.

Three opt-in checks per instance, combined by OR: ongoing prefill tokens, the same as a multiple of
a step's token budget, and KV blocks in use. A value equal to its threshold is free. The block check
compares two signals with the limit, this proxy's own count and the engine's last report. The
instance is busy while either of them is over. The semantics are those of NVIDIA Dynamo's request
rejection, so operators' thresholds carry over.

Thresholds are those of one data-parallel rank, and an instance is busy only while all its ranks
are. An engine reports the KV usage of each rank, so that of the rank with the most room decides. A
rank that reports none is free. The engine chooses the rank of a prompt, so the proxy counts over
all ranks. All ranks can only be over their limit while the sum is over as many limits.

A limit that is not set for a model is that of its base model (for a LoRA adapter), else that of
`*`. Their later changes apply too. Names of models are compared without regard to case. An engine
tells the base of its own adapters only: it counts on that instance and on no other.

A hot instance is busy while it has as many requests in flight as thermal control allows; it then
takes no role at all. One that control drains takes none, unless there is no other.

An instance that computes a prompt and decodes must pass all checks. P of an offload need not pass
the one of KV blocks, and D need not pass those of prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from proxy.core.accounts.engine_reports import EngineKv
from proxy.core.accounts.instances import InstanceState, InstanceStates
from proxy.core.admission.retry_after import UNKNOWN_DRAIN_S
from proxy.core.kvcache.engine_cache import KV_TURNOVER_S, KV_USABLE_RATIO
from proxy.core.thermal.fleet_limits import HeatByInstance
from proxy.core.types import OFF, Load, RejectReason, Thresholds

STALE_S = 10.0
"""An engine's report older than this is ignored; only the proxy's own count is compared."""
ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class Busy:
    """Why an instance is busy, and in how many seconds it is predicted to be free.

    `checks`: all that are over, at least one, and `check` the first of them.
    """

    checks: tuple[RejectReason, ...]
    free_in_s: float

    @property
    def check(self) -> RejectReason:
        """The check to name if only one is named."""
        return self.checks[0]

    @property
    def may_prefill(self) -> bool:
        """Whether it may still be P of an offload."""
        return self.checks == (RejectReason.DECODE_BLOCKS,)

    @property
    def may_decode(self) -> bool:
        """Whether it may still be D of an offload."""
        return all(check in _OF_PREFILL for check in self.checks)


_OF_PREFILL = (RejectReason.PREFILL_TOKENS, RejectReason.PREFILL_FRAC)
_UNTIL_STREAMS_END = (RejectReason.DECODE_BLOCKS, RejectReason.HEAT_CAP)
"""Checks that clear as streams end, rather than as prompts are computed."""


class Gate:
    """The busy check of each instance, with thresholds per model.

    `max_batched_tokens`: a step's token budget; `heat`: the limits of hot instances.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        max_batched_tokens: int,
        prefill_throughput: float,
        states: InstanceStates,
        heat: HeatByInstance | None = None,
    ) -> None:
        self._heat = heat if heat is not None else HeatByInstance()
        self._own = {ANY_MODEL: thresholds}
        self._spelled = {ANY_MODEL: ANY_MODEL}
        self._told_bases: dict[str, dict[str, str]] = {}
        self._bases: dict[str, set[str]] = {}
        # What is in force for a key of `_own`, with a base among these keys. Thresholds equal to
        # OFF are stored as OFF itself, so `is_open` compares by identity.
        self._in_force: dict[tuple[str, str], Thresholds] = {}
        self._spell()
        self._batched = max_batched_tokens
        self._prefill_tps = prefill_throughput
        self._states = states
        self._cooling: list[InstanceState] = []
        self.on_change: Callable[[], None] | None = None
        """Called after a change that may have made an instance free; None: no call."""

    def thresholds(self, model: str, instance: str | None = None) -> Thresholds:
        """The limits in force for a model on an instance; None: on those that all say the same."""
        if len(self._own) == 1:
            return self._with_base(ANY_MODEL, "")
        key = model.lower()
        return self._with_base(key, self._base(key, instance))

    def own(self, model: str) -> Thresholds:
        """The model's own thresholds; None where others apply."""
        return self._own.get(model.lower(), OFF)

    def as_if(self, model: str, own: Thresholds, instance: str | None = None) -> Thresholds:
        """The limits in force for a model with these limits of its own."""
        key = model.lower()
        if key == ANY_MODEL:
            return own
        base = self._own.get(self._base(key, instance), OFF)
        return own.over(base.over(self._own[ANY_MODEL]))

    def configured(self) -> dict[str, Thresholds]:
        """The limits in force of `*` and of every model that has limits of its own."""
        return {self._spelled[key]: self.thresholds(key) for key in self._own}

    def rows_of(self, models: Iterable[str], instance: str | None = None) -> list[str]:
        """The names in `configured` whose limits hold for any of these models."""
        keys = {self._row(model.lower(), instance) for model in models}
        return [self._spelled[key] for key in self._own if key in keys]

    def set(self, model: str, own: Thresholds) -> None:
        """Overwrite a model's own thresholds, from the next decision on."""
        key = model.lower()
        if own == OFF and key != ANY_MODEL:
            self._own.pop(key, None)
        else:
            self._own[key] = own
            self._spelled[key] = model
        self._spell()
        self._changed()

    def unset(self, model: str) -> None:
        """Remove a model's own limits; for `*`, the default limits."""
        self.set(model, OFF)

    def know_bases(self, bases: Mapping[str, Mapping[str, str]]) -> None:
        """The base model of each adapter, by instance, instead of those known before."""
        self._told_bases = {
            name: {a.lower(): base.lower() for a, base in told.items() if a != ANY_MODEL}
            for name, told in bases.items()
        }
        self._bases = {}
        for told in self._told_bases.values():
            for adapter, base in told.items():
                self._bases.setdefault(adapter, set()).add(base)
        self._changed()

    def _base(self, key: str, instance: str | None) -> str:
        """The base that an instance, or else all that name one, name for a model; "": none."""
        if instance is not None:
            return self._told_bases.get(instance, {}).get(key, "")
        named = self._bases.get(key, set())
        return next(iter(named)) if len(named) == 1 else ""

    def _row(self, key: str, instance: str | None) -> str:
        """The key of the row that holds for a model."""
        if key not in self._own:
            key = self._base(key, instance)
        return key if key in self._own else ANY_MODEL

    def _with_base(self, key: str, base: str) -> Thresholds:
        """The limits in force for a model that has this base."""
        own = self._own
        rows = key if key in own else ANY_MODEL, base if base in own else ANY_MODEL
        limits = self._in_force.get(rows)
        if limits is None:
            limits = own.get(key, OFF).over(own[rows[1]].over(own[ANY_MODEL]))
            limits = self._in_force[rows] = OFF if limits == OFF else limits
        return limits

    def _spell(self) -> None:
        self._in_force.clear()
        self._spelled = {key: self._spelled[key] for key in self._own}

    def observe_engine(
        self, instance: str, kv: EngineKv, now_s: float, mark: int | None = None
    ) -> None:
        """Store the engine's report; `mark` is its digest for `ReportHistory`."""
        state = self._states.of(instance)
        is_frozen = mark is not None and state.reports.observe(
            mark, now_s, answers=state.released.count, is_in_use=bool(kv.used_ratio)
        )
        known, state.kv_tokens = state.kv_tokens, kv.total_tokens or None
        if state.kv_tokens != known:
            self._states.assume_sizes()
        state.kv_used_ratio = None if is_frozen else kv.least_used_ratio
        state.ranks = kv.ranks
        state.reported_s = now_s
        self._changed()

    def kv_tokens(self, instance: str) -> int | None:
        """The size of an instance's KV cache in tokens; None while its engine reported none."""
        return self._states.of(instance).kv_tokens

    def kv_ratios(
        self, instance: str, load: Load, now_s: float
    ) -> tuple[float | None, float | None]:
        """Both values of the KV block check: this proxy's own count, and the engine's report.

        None is what is not compared: the size of the cache is unknown, or the report is stale.
        """
        return _kv_ratios(self._states.of(instance), load, now_s)

    def limits_by_check(self, thresholds: Thresholds) -> dict[RejectReason, float]:
        """The limits that are set, each in the unit of what it is compared with."""
        frac = thresholds.active_prefill_tokens_threshold_frac
        limits = (
            (RejectReason.DECODE_BLOCKS, thresholds.active_decode_blocks_threshold),
            (RejectReason.PREFILL_TOKENS, thresholds.active_prefill_tokens_threshold),
            (RejectReason.PREFILL_FRAC, None if frac is None else frac * self._batched),
        )
        return {check: limit for check, limit in limits if limit is not None}

    def ranks(self, instance: str) -> int:
        """Number of an instance's data-parallel ranks, as its engine reports; 1 without."""
        return self._states.of(instance).ranks

    def is_frozen(self, instance: str) -> bool:
        """Whether the reports of the instance's engine are frozen, see `ReportHistory`."""
        return self._states.of(instance).reports.is_frozen

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def next_change_s(self, now_s: float) -> float | None:
        """When an instance may next become free by time: a cool-down or a report expires."""
        times_s = [state.cooldown_until_s for state in self._states]
        times_s += [s for state in self._cooling for s in state.refusals.tries_s()]
        times_s += [s.reported_s + STALE_S for s in self._states if s.reported_s is not None]
        return min((time_s for time_s in times_s if time_s > now_s), default=None)

    def intake_tps(self, instance: str, check: RejectReason, now_s: float) -> float:
        """Prompt tokens per second that an instance past this check is assumed to take in."""
        state = self._states.of(instance)
        if check not in _UNTIL_STREAMS_END or state.kv_tokens is None:
            return self._prefill_tps
        return state.released.tokens_per_s(now_s) or state.kv_tokens / KV_TURNOVER_S

    def kv_wait_s(
        self, instance: str, load: Load, prompt_tokens: int, hit_tokens: int, now_s: float
    ) -> float:
        """Seconds until streams free the KV that a prompt lacks; 0 for unknown size."""
        return _kv_wait_s(self._states.of(instance), load, prompt_tokens, hit_tokens, now_s)

    def kv_waits_s(
        self,
        states: list[InstanceState],
        loads: list[Load],
        hit_tokens: list[int],
        prompt_tokens: int,
        now_s: float,
    ) -> list[float]:
        """`kv_wait_s` of several instances, with their cached parts of the prompt."""
        waits_s = []
        # Compiled, steps over indexes cost half of those of `zip`.
        for at, state in enumerate(states):
            waits_s.append(_kv_wait_s(state, loads[at], prompt_tokens, hit_tokens[at], now_s))
        return waits_s

    def mark_busy(self, instance: str, until_s: float) -> None:
        """The engine answered that it is at capacity: the instance is busy until `until_s`."""
        state = self._states.of(instance)
        state.cooldown_until_s = max(until_s, state.cooldown_until_s)
        if state not in self._cooling:
            self._cooling.append(state)

    def refused(self, instance: str, client: str, busy_s: float, now_s: float) -> None:
        """The engine said to a client's request that it is at capacity, for so long."""
        closed_s = self._states.of(instance).refusals.refused(client, busy_s, now_s)
        if closed_s > 0:
            self.mark_busy(instance, now_s + closed_s)

    def judged(self, instance: str, client: str, until_s: float, now_s: float) -> None:
        """Another instance has served a request that this one refused as busy, until then."""
        refusals, left_s = self._states.of(instance).refusals, until_s - now_s
        if left_s > 0 and refusals.judged(client, left_s, now_s) > 0:
            self.mark_busy(instance, until_s)

    def is_own(self, instance: str, client: str, now_s: float) -> bool:
        """Whether the engine's refusals close the instance to this client, and not to others."""
        state = self._states.of(instance)
        return state.cooldown_until_s > now_s and state.refusals.is_own(client)

    def served(self, instance: str, client: str, since_s: float) -> None:
        """The engine serves a client's request that it was sent then: it may be open again."""
        state = self._states.of(instance)
        if state.refusals.served(client, since_s) and state in self._cooling:
            state.cooldown_until_s = -math.inf
            self._cooling.remove(state)
            self._changed()

    def released(self, instance: str, tokens: int, now_s: float) -> None:
        """A stream ended and freed this much KV."""
        state = self._states.of(instance)
        state.released.add(tokens, now_s)
        state.refusals.ended(now_s)

    def is_open(self, model: str, now_s: float) -> bool:
        """Whether no instance can be busy: no limit is set, none is hot, and none cools down."""
        if self._cooling:
            self._cooling = [s for s in self._cooling if s.cooldown_until_s > now_s]
        return not self._cooling and self._heat.is_cool and self._is_off(model.lower())

    def _is_off(self, key: str) -> bool:
        """Whether no limit is in force for a model, with whatever base an instance names."""
        if self._with_base(key, "") is not OFF:
            return False
        if len(self._own) > 1:
            for base in self._bases.get(key, ()):
                if self._with_base(key, base) is not OFF:
                    return False
        return True

    def busy(  # noqa: PLR0913 - who asks, for what, and what is known of the instance
        self,
        instance: str,
        model: str,
        load: Load,
        now_s: float,
        limits: Thresholds | None = None,
        *,
        is_last: bool = False,
        client: str | None = None,
    ) -> Busy | None:
        """Why the instance is past a threshold of the model (or of `limits`); None: free.

        `free_in_s` is that of the check that clears last. `is_last`: there is no other instance, so
        one that is drained for its heat serves too, up to its cap. `client`: who asks; it may be
        open to it, or about to be tried; None: nobody.
        """
        limits = limits or self.thresholds(model, instance)
        state = self._states.of(instance)
        over: list[tuple[RejectReason, float]] = []
        until_s = state.cooldown_until_s
        if until_s > now_s and client is not None:
            until_s = state.refusals.until_s(client, until_s)
        if until_s > now_s:
            over.append((RejectReason.UPSTREAM_BUSY, until_s - now_s))
        if load.prefill_tokens:
            over += self._prefill_over(state.ranks, limits, load)
        if limits.active_decode_blocks_threshold is not None:
            over += self._decode_over(state, limits, load, now_s)
        if not self._heat.is_cool:
            over += self._heat_over(state, load, now_s, is_last=is_last)
        if not over:
            return None
        return Busy(tuple([check for check, _ in over]), max([wait_s for _, wait_s in over]))

    def _prefill_over(
        self, ranks: int, limits: Thresholds, load: Load
    ) -> Iterator[tuple[RejectReason, float]]:
        """Each check of prefill that is over, and in how many seconds it is predicted to clear."""
        frac = limits.active_prefill_tokens_threshold_frac
        checks = (
            (RejectReason.PREFILL_TOKENS, limits.active_prefill_tokens_threshold),
            (RejectReason.PREFILL_FRAC, None if frac is None else frac * self._batched),
        )
        for check, limit in checks:
            if limit is not None and load.prefill_tokens > ranks * limit:
                excess_tokens = load.prefill_tokens - ranks * limit
                yield check, excess_tokens / self._prefill_tps

    def _decode_over(
        self, state: InstanceState, limits: Thresholds, load: Load, now_s: float
    ) -> Iterator[tuple[RejectReason, float]]:
        """The check of KV blocks, if it is over, and in how many seconds it should clear."""
        limit, kv_tokens = limits.active_decode_blocks_threshold, state.kv_tokens
        own, reported = _kv_ratios(state, load, now_s)
        if limit is None or kv_tokens is None or own is None:
            return
        excess_tokens = (max(own, reported or 0.0) - limit) * kv_tokens
        if excess_tokens > 0:
            rate = state.released.tokens_per_s(now_s)
            wait_s = excess_tokens / rate if rate else UNKNOWN_DRAIN_S
            yield RejectReason.DECODE_BLOCKS, wait_s

    def _heat_over(
        self, state: InstanceState, load: Load, now_s: float, *, is_last: bool
    ) -> Iterator[tuple[RejectReason, float]]:
        """The check of heat, if it is over; it clears when enough streams have ended."""
        limits, running = self._heat.of(state.name), load.running_requests
        if limits.is_drained and not is_last:
            yield RejectReason.HEAT_CAP, UNKNOWN_DRAIN_S
        elif limits.cap is not None and running >= limits.cap:
            excess_tokens = (running - limits.cap + 1) * load.ongoing_tokens / max(1, running)
            rate = state.released.tokens_per_s(now_s)
            yield RejectReason.HEAT_CAP, excess_tokens / rate if rate else UNKNOWN_DRAIN_S


def _kv_ratios(state: InstanceState, load: Load, now_s: float) -> tuple[float | None, float | None]:
    kv_tokens, seen_s = state.kv_tokens, state.reported_s
    if kv_tokens is None or seen_s is None:
        return None, None
    own = (load.decode_tokens + load.inbound_tokens) / kv_tokens
    return own, state.kv_used_ratio if now_s - seen_s <= STALE_S else None


def _kv_wait_s(
    state: InstanceState, load: Load, prompt_tokens: int, hit_tokens: int, now_s: float
) -> float:
    """Seconds until streams free the KV that a prompt lacks there; 0 for unknown size.

    An engine starts a prompt only when its KV fits beside that of the running requests. Cached
    blocks count too: while the prompt runs they are in use and cannot be evicted. But those of
    running streams are in use already.
    """
    kv_tokens = state.assumed_kv_tokens
    if kv_tokens is None:
        return 0.0
    held_tokens = load.held_tokens
    lacked_tokens = prompt_tokens - min(hit_tokens, load.shared_once_tokens)
    # A prompt longer than what is usable waits for no more than all that is held.
    excess = min(held_tokens, held_tokens + lacked_tokens - KV_USABLE_RATIO * kv_tokens)
    if excess <= 0:
        return 0.0
    return excess / (state.released.tokens_per_s(now_s) or kv_tokens / KV_TURNOVER_S)
