"""The thermal controller of one instance: readings in, limits out.

The ladder goes from least to most cost for users. Its steps are fewer placements, no prefills for
others, a price on its own prefills, a cap on requests in flight, eviction, no requests. The first
three begin as the headroom shrinks, the cap at the target, eviction when the critical temperature
is near, the last one only in an emergency that lasts.

States: NORMAL has no cap. THROTTLE begins at the target; RECOVER, `hysteresis_celsius` below it,
gives the cap back. EMERGENCY cuts at once and is bound by nothing. STALE (no readings) increases
nothing. DEGRADED (limits cannot be written) tries again after 1 to 60 s. MANUAL has an operator's
cap. All of them but NORMAL end by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from proxy.core.thermal.headroom import GroupHeat, Heat
from proxy.core.thermal.laws import LAWS, Law, LawView, OperatorLaw, PowerLaw
from proxy.core.thermal.options import RANGES, ThermalOptions
from proxy.core.thermal.policy import MISTAKES, OperatorPolicy
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork

LEAST_WEIGHT = 0.1
"""A hot instance keeps this part of its placements, as one that returns does: at 0 sessions would
all move at once. Weights are whole tenths, so that they do not change at every reading."""
EMERGENCY_STEP_S = 4.0
"""In an emergency the cap is halved again after this time while the temperature does not fall."""
BELOW_CRITICAL_CELSIUS = 1.0
"""An operator's target is at least so far below the critical temperature."""
RATE_S = 3.0
"""Time of observation before the rate at which requests end is used."""
FAILURES = 2
"""Actuator errors in a row that make it DEGRADED."""
FIRST_PROBE_S, MOST_PROBE_S = 1.0, 60.0
STUCK_CELSIUS = 5.0
"""A sensor whose reading stays while its GPU's power changes by the worth of this much is not
trusted: the instance is STALE."""


class ThermalState(StrEnum):
    """The states of the controller."""

    NORMAL = "NORMAL"
    THROTTLE = "THROTTLE"
    RECOVER = "RECOVER"
    EMERGENCY = "EMERGENCY"
    STALE = "STALE"
    DEGRADED = "DEGRADED"
    MANUAL = "MANUAL"


class Action(StrEnum):
    """The change of the cap."""

    LOWER = "lower"
    RAISE = "raise"
    LIFT = "lift"
    HOLD = "hold"
    EVICT = "evict"
    DRAIN = "drain"


class ActionReason(StrEnum):
    """Why."""

    HOT = "hot"
    COOLER = "cooler"
    CRITICAL = "critical"
    SLOWED = "slowed"
    STALE = "stale"
    STUCK = "stuck"
    OPERATOR = "operator"
    DWELL = "dwell"
    COOLDOWN = "cooldown"
    BUDGET = "budget"
    ACTUATOR = "actuator"
    POLICY_FAILED = "policy_failed"
    STATE = "state"


class Controller:
    """One instance's controller. `tick` is called at each round of readings, about once a second.

    The shell writes the limits that `tick` returns while `is_due` and then says `actuator_worked()`
    or `actuator_failed(now_s)`. Where limits are only the proxy's own there is nothing to fail.
    """

    def __init__(self, options: ThermalOptions, policy: OperatorPolicy | None = None) -> None:
        self.options = options
        self.limits = COOL
        self.state = ThermalState.NORMAL
        self.reason = ActionReason.STATE
        self.heat: Heat | None = None
        self.actions: dict[tuple[str, str], int] = {}
        """Number of actions by reason; both are closed sets."""
        self.oscillations = 0
        """Direction changes of the cap."""
        self.version = 0
        """Grows with each change of cap, target or override, for an operator's `if_version`."""
        self.mistake = ""
        """The last exception of an operator's policy."""
        self.is_due = True
        self._group = GroupHeat(options)
        self._power = PowerLaw(options)
        self._law: Law = self._power
        self._operators: OperatorLaw | None = None
        if policy is not None:
            self._law = self._operators = OperatorLaw(options, policy)
        elif options.law != "power":
            self._law = LAWS[options.law](options)
        self._reserve = LAWS["p"](options)
        self._cap: int | None = None
        self._changed_s = -math.inf
        self._changes: list[float] = []
        self._direction = 0
        self._began_s: float | None = None
        self._cool_since_s: float | None = None
        self._critical_since_s: float | None = None
        self._halved_s = -math.inf
        self._over: tuple[float, int] | None = None
        self._override: tuple[int, float] | None = None
        self._aimed: tuple[float, float] | None = None
        self._failures = 0
        self._probe_s = 0.0
        self._probe_wait_s = 0.0

    def tick(self, readings: Sequence[GpuReading], work: InstanceWork, now_s: float) -> HeatLimits:
        """Take what was read since the last call, and say what the instance may be given now."""
        if self._began_s is None:
            self._began_s = now_s
        if self._operators is not None:
            self._tell(self._operators, readings)
        self._group.observe(readings)
        self.heat = heat = self._group.heat(now_s, self._target(now_s))
        if heat is not None and self._is_fresh(heat):
            view = self._view(heat, work, now_s)
            self._power.observe(view)
            if self._law is not self._power:
                self._law.observe(view)
        self._enter(self._next_state(heat, work, now_s), now_s)
        evict = self._act(heat, work, now_s)
        self.limits = self._limits(heat, evict, now_s)
        is_emergency = self.state is ThermalState.EMERGENCY
        self.is_due = is_emergency or self._failures < FAILURES or now_s >= self._probe_s
        return self.limits

    def override(self, max_running: int, until_s: float) -> None:
        """An operator's cap, until a time; only an emergency goes below it."""
        options = self.options
        if not 1 <= max_running <= options.max_running:
            raise ValueError(f"max_num_seqs must be 1 to {options.max_running}, not {max_running}")
        self._override = (max_running, until_s)
        self.version += 1

    def clear_override(self) -> None:
        """End an operator's cap and target."""
        if self._override is not None or self._aimed is not None:
            self.version += 1
        self._override = self._aimed = None

    def aim(self, target_celsius: float, until_s: float) -> None:
        """An operator's target, until a time: the law holds it like the configured one.

        One that is not below the critical temperature counts as one degree below that.
        """
        low, high = RANGES["target_celsius"]
        if not low <= target_celsius <= high:
            raise ValueError(f"target_temp_c must be {low:g} to {high:g}, not {target_celsius:g}")
        self._aimed = (target_celsius, until_s)
        self.version += 1

    def actuator_worked(self) -> None:
        """The limits were written."""
        self._failures = 0
        self._probe_wait_s = 0.0

    def actuator_failed(self, now_s: float) -> None:
        """The limits could not be written."""
        self._failures += 1
        if self._failures >= FAILURES:
            grown_s = 2.0 * self._probe_wait_s if self._probe_wait_s else FIRST_PROBE_S
            self._probe_wait_s = min(MOST_PROBE_S, grown_s)
            self._probe_s = now_s + self._probe_wait_s

    def reset(self) -> None:
        """Another process serves the instance: nothing is known of its heat."""
        self._group.forget()
        self._law.restart()
        self._power.restart()
        self._began_s = None

    @property
    def cap(self) -> int | None:
        """Requests in flight that are allowed, None for any number."""
        return self.limits.cap

    @property
    def headroom_celsius(self) -> float | None:
        """Degrees to the target, looked ahead; None before the first reading."""
        return None if self.heat is None else self.heat.headroom_celsius

    @property
    def celsius(self) -> float | None:
        """The smoothed temperature of the sensor that decides."""
        return None if self.heat is None else self.heat.celsius

    @property
    def sensor_age_s(self) -> float | None:
        """Age of the oldest of the GPUs' last readings."""
        return None if self.heat is None else self.heat.age_s

    @property
    def watts_per_seq(self) -> float:
        """Learned watts of one more sequence, under any law."""
        return self._power.watts_per_seq

    @property
    def watts_per_seq_spread(self) -> float:
        """Standard deviation of `watts_per_seq`."""
        return self._power.watts_per_seq_spread

    @property
    def has_override(self) -> bool:
        """Whether an operator's cap is set."""
        return self._override is not None

    def watts_of(self, kv_tokens: Sequence[int]) -> float:
        """Watts of sequences that hold so many tokens: the saving by their eviction."""
        return self._power.watts_of(kv_tokens)

    # The state of the next moment.

    def _target(self, now_s: float) -> float | None:
        if self._aimed is not None and now_s >= self._aimed[1]:
            self._aimed = None
            self.version += 1
        if self._aimed is None:
            return None
        return min(self._aimed[0], self.options.critical_celsius - BELOW_CRITICAL_CELSIUS)

    def _next_state(self, heat: Heat | None, work: InstanceWork, now_s: float) -> ThermalState:
        fresh = self._is_fresh(heat)
        if heat is not None and fresh and self._is_critical(heat):
            return ThermalState.EMERGENCY
        if self._override is not None and now_s >= self._override[1]:
            self._override = None
            self.version += 1
        if self._override is not None:
            return ThermalState.MANUAL
        if self._failures >= FAILURES:
            return ThermalState.DEGRADED
        if heat is None or not fresh or self._is_stuck(heat):
            began_s = now_s if self._began_s is None else self._began_s
            if heat is None and now_s - began_s <= self.options.stale_s:
                return self.state
            return ThermalState.STALE
        return self._by_heat(heat, work, now_s)

    def _is_fresh(self, heat: Heat | None) -> bool:
        return heat is not None and heat.age_s <= self.options.stale_s

    def _is_critical(self, heat: Heat) -> bool:
        """Whether it is an emergency, or one that has not cooled down by the hysteresis."""
        if heat.is_critical:
            return True
        is_in_one = self.state is ThermalState.EMERGENCY
        return is_in_one and heat.to_critical_celsius <= self.options.hysteresis_celsius

    def _is_stuck(self, heat: Heat) -> bool:
        """Whether a sensor has said the same for long although the power of its GPU has changed."""
        # A watt of one GPU is worth as many degrees as one of each in the group.
        worth = heat.unexplained_watts * self._power.celsius_per_watt * heat.gpus
        return worth >= STUCK_CELSIUS

    def _by_heat(self, heat: Heat, work: InstanceWork, now_s: float) -> ThermalState:
        """Throttling and recovery; a cap that nothing waits for is lifted once it is cool."""
        options = self.options
        if heat.lookahead_celsius >= 0.0:
            self._cool_since_s = None
            return ThermalState.THROTTLE
        if heat.lookahead_celsius < -options.hysteresis_celsius:
            if self._cool_since_s is None:
                self._cool_since_s = now_s
        else:
            self._cool_since_s = None
        is_cool = self._cool_since_s is not None and now_s - self._cool_since_s >= options.hold_s
        state = self.state
        if state is ThermalState.NORMAL:
            return state
        if state in (ThermalState.THROTTLE, ThermalState.EMERGENCY):
            return ThermalState.RECOVER if is_cool else ThermalState.THROTTLE
        if self._cap is None or (is_cool and self._cap >= options.max_running):
            return ThermalState.NORMAL
        if is_cool and not work.waiting and work.running < self._cap:
            return ThermalState.NORMAL
        return ThermalState.RECOVER

    def _enter(self, state: ThermalState, now_s: float) -> None:
        if state is self.state:
            return
        if self.state is ThermalState.STALE:
            self._law.restart()
            self._power.restart()
        if state is ThermalState.EMERGENCY:
            self._critical_since_s = now_s
            self._halved_s = -math.inf
        elif self.state is ThermalState.EMERGENCY:
            self._critical_since_s = None
        self.state = state

    # What is done in it.

    def _act(self, heat: Heat | None, work: InstanceWork, now_s: float) -> int:
        """Change the cap if it is time, and say how many requests should leave now."""
        state = self.state
        if state is ThermalState.EMERGENCY and heat is not None:
            return self._act_in_emergency(heat, work, now_s)
        if state is ThermalState.MANUAL and self._override is not None:
            self._set(self._override[0], ActionReason.OPERATOR, now_s)
        elif state is ThermalState.DEGRADED:
            self._count(Action.HOLD, ActionReason.ACTUATOR)
        elif state is ThermalState.STALE:
            self._act_without_readings(heat, now_s)
        elif state is ThermalState.NORMAL:
            if self._cap is not None:
                self._set(None, ActionReason.COOLER, now_s)
        elif heat is not None:
            self._follow_law(heat, work, now_s)
            return self._evictions(heat, work, now_s)
        return 0

    def _act_in_emergency(self, heat: Heat, work: InstanceWork, now_s: float) -> int:
        options = self.options
        is_falling = heat.slope < 0.0 and heat.latest <= heat.celsius
        # A cut that running requests have not obeyed yet says nothing of what it is worth.
        is_enough = is_falling or work.running > self._effective_cap()
        is_first = self._halved_s == -math.inf
        if heat.is_critical and (
            is_first or (now_s - self._halved_s >= EMERGENCY_STEP_S and not is_enough)
        ):
            self._halved_s = now_s
            cap = self._effective_cap()
            wanted = min(self._wanted(heat, work, now_s), min(cap, work.running) // 2)
            reason = ActionReason.SLOWED if heat.is_slowed else ActionReason.CRITICAL
            self._set(min(cap, max(options.min_cap, wanted)), reason, now_s)
        evict = max(0, work.running - self._effective_cap())
        if evict:
            self._count(Action.EVICT, ActionReason.CRITICAL)
        return evict

    def _act_without_readings(self, heat: Heat | None, now_s: float) -> None:
        options = self.options
        age_s = now_s - (self._began_s or 0.0) if heat is None else heat.age_s
        is_stuck = heat is not None and age_s <= options.stale_s
        if is_stuck:
            # It has been silent, in its way, for longer than that already.
            age_s = options.stale_s + options.safe_after_s
        reason = ActionReason.STUCK if is_stuck else ActionReason.STALE
        if age_s >= options.stale_s + options.safe_after_s:
            cap = self._effective_cap()
            if cap > options.safe_cap:
                self._set(options.safe_cap, reason, now_s)
        self.reason = reason

    def _follow_law(self, heat: Heat, work: InstanceWork, now_s: float) -> None:
        cap, wanted = self._effective_cap(), self._wanted(heat, work, now_s)
        if wanted == cap and self._cap is not None:
            return
        if self._cap is None and wanted >= cap:
            # Throttling that needs no cap below the maximum: lesser limits are in force.
            return
        options = self.options
        if wanted < cap and self.state is ThermalState.RECOVER:
            return
        if wanted > cap and heat.excess_celsius > 0.0:
            # Whatever the law predicts: nothing is given back above the target.
            return
        since_s = now_s - self._changed_s
        self._changes = [at_s for at_s in self._changes if now_s - at_s < options.budget_window_s]
        if since_s < options.dwell_s:
            self._count(Action.HOLD, ActionReason.DWELL)
        elif wanted > cap and since_s < options.cooldown_s:
            self._count(Action.HOLD, ActionReason.COOLDOWN)
        elif len(self._changes) >= options.budget_changes:
            self._count(Action.HOLD, ActionReason.BUDGET)
        else:
            self._changes.append(now_s)
            reason = ActionReason.HOT if wanted < cap else ActionReason.COOLER
            self._set(wanted, reason, now_s)

    def _evictions(self, heat: Heat, work: InstanceWork, now_s: float) -> int:
        """Running requests above the cap that would end too late.

        That is, the critical temperature comes sooner than enough of them end by themselves at
        their present rate.
        """
        over = 0 if self._cap is None else work.running - self._cap
        if over <= 0 or self.state is not ThermalState.THROTTLE:
            self._over = None
            return 0
        if self._over is None:
            self._over = (now_s, work.running)
        if heat.slope <= 0.0:
            return 0
        critical_in_s = heat.to_critical_celsius / heat.slope
        if critical_in_s >= self.options.evict_within_s:
            return 0
        since_s, before = self._over
        passed_s, ended = now_s - since_s, before - work.running
        if passed_s < RATE_S and critical_in_s > RATE_S:
            return 0
        if ended > 0 and over * passed_s / ended <= critical_in_s:
            return 0
        self._count(Action.EVICT, ActionReason.HOT)
        return over

    def _wanted(self, heat: Heat, work: InstanceWork, now_s: float) -> int:
        view = self._view(heat, work, now_s)
        if self._operators is None:
            return self._law.wanted(view)
        try:
            return self._operators.wanted(view)
        except MISTAKES as mistake:
            self._failed(mistake)
            return self._reserve.wanted(view)

    def _tell(self, operators: OperatorLaw, readings: Sequence[GpuReading]) -> None:
        try:
            operators.read(readings)
        except MISTAKES as mistake:
            self._failed(mistake)

    def _failed(self, mistake: Exception) -> None:
        self.mistake = f"{type(mistake).__name__}: {mistake}"[:200]
        self._count(Action.HOLD, ActionReason.POLICY_FAILED)

    def _view(self, heat: Heat, work: InstanceWork, now_s: float) -> LawView:
        return LawView(
            now_s,
            heat.excess_celsius,
            heat.lookahead_celsius,
            heat.slope,
            work,
            heat.watts,
            heat.gpus,
            self._effective_cap(),
            now_s - self._changed_s,
        )

    def _effective_cap(self) -> int:
        return self.options.max_running if self._cap is None else self._cap

    def _set(self, cap: int | None, reason: ActionReason, now_s: float) -> None:
        before, after = self._effective_cap(), self.options.max_running if cap is None else cap
        self.reason = reason
        if cap == self._cap:
            return
        self._cap = cap
        self._changed_s = now_s
        self.version += 1
        direction = (after > before) - (after < before)
        if cap is None:
            self._count(Action.LIFT, reason)
        elif direction:
            self._count(Action.RAISE if direction > 0 else Action.LOWER, reason)
        if direction and self._direction and direction != self._direction:
            self.oscillations += 1
        if direction:
            self._direction = direction

    def _count(self, action: Action, reason: ActionReason) -> None:
        key = (action.value, reason.value)
        self.actions[key] = self.actions.get(key, 0) + 1

    def _limits(self, heat: Heat | None, evict: int, now_s: float) -> HeatLimits:
        """All rungs of the ladder as they are now."""
        state = self.state
        if state is ThermalState.STALE or (heat is None and state is not ThermalState.MANUAL):
            # The lesser limits stay as they are too: nothing is increased.
            return replace(self.limits, cap=self._cap, evict=0)
        if state in (ThermalState.MANUAL, ThermalState.DEGRADED) or heat is None:
            return replace(self.limits, cap=self._cap, evict=0, is_drained=False)
        band = self.options.hysteresis_celsius
        headroom = heat.headroom_celsius
        tenths = math.floor(10.0 * min(1.0, max(0.0, headroom / band)) + 1e-9)
        weight = max(LEAST_WEIGHT, tenths / 10.0)
        if state is ThermalState.EMERGENCY:
            weight = LEAST_WEIGHT
        is_hot = state in (ThermalState.THROTTLE, ThermalState.EMERGENCY)
        span = self.options.critical_celsius - self.options.target_celsius
        part = min(1.0, max(0.0, (band / 2 - headroom) / span))
        steps = math.ceil(4.0 * part)
        factor = 1.0 + (self.options.prefill_factor - 1.0) * steps / 4.0
        since_s = self._critical_since_s
        is_drained = (
            state is ThermalState.EMERGENCY
            and since_s is not None
            and now_s - since_s >= self.options.drain_after_s
            and heat.is_critical
        )
        if is_drained and not self.limits.is_drained:
            self._count(Action.DRAIN, ActionReason.CRITICAL)
        return HeatLimits(
            weight=weight,
            helps=not is_hot and _stays(headroom, band, was_so=self.limits.helps),
            prefill_factor=factor,
            cap=self._cap,
            evict=evict,
            is_drained=is_drained,
        )


def _stays(headroom: float, band: float, *, was_so: bool) -> bool:
    """On from the whole band, off from half of it."""
    return headroom >= band or (was_so and headroom > band / 2)
