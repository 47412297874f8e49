"""Policies that set the cap by temperature, and the one that is given with the plugin.

Usable without any proxy: `VLLM_THERMAL_POLICY=proportional` chooses a policy by its entry point of
the group `vllm_thermal.policies`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from vllm_thermal.readings import Readings

GROUP = "vllm_thermal.policies"
NAME = "VLLM_THERMAL_POLICY"
HOLD_S = 3.0
"""From this age on of the last reading the cap does not rise."""
STALE_S = 30.0
"""From this age on the cap is at most half of the full one: nothing is known of the heat."""
RANGES: Mapping[str, tuple[float, float]] = {
    "target_c": (30.0, 95.0),
    "k_p": (0.01, 100.0),
    "hysteresis_c": (2.0, 30.0),
}
MISTAKES = (Exception,)
"""What an operator's policy can raise, which is foreign code and may ask a BMC: the engine outlives
it, the last cap stays."""
log = logging.getLogger("vllm.thermal")


class PolicyError(ValueError):
    """The policy cannot be had as it is configured; its text is one line."""


class SchedulerThermalPolicy(Protocol):
    """Decides how many requests may run, and which give way. Called in the engine's own thread.

    `scheduler` is the engine's `ThermalScheduler`, `running` has vLLM's `Request` objects.
    """

    def get_max_running_seqs(self, scheduler: Any) -> int:
        """Most requests that may run now; kept within 1 and the engine's full cap."""
        ...

    def select_victims(self, running: Sequence[Any], num_to_evict: int) -> Sequence[Any]:
        """Which of the running requests give way."""
        ...

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        """A new temperature of a GPU."""
        ...


class ProportionalPolicy:
    """The founding reference policy: one request less for each 1 / `k_p` degrees above the target.

    Throttling begins at the target and ends below the target less the hysteresis. In between the
    cap falls but does not rise, or requests would go and come at the target. The hottest
    GPU counts.
    """

    def __init__(self, target_c: float = 82.0, k_p: float = 0.5, hysteresis_c: float = 3.0) -> None:
        given = {"target_c": target_c, "k_p": k_p, "hysteresis_c": hysteresis_c}
        for name, value in given.items():
            least, most = RANGES[name]
            if not least <= value <= most:
                raise PolicyError(f"{name} is {value:g}: it must be {least:g} to {most:g}")
        self.target_c = target_c
        self.k_p = k_p
        self.hysteresis_c = hysteresis_c
        self._celsius: dict[int, float] = {}
        self._cap: int | None = None

    @classmethod
    def of_environment(cls) -> ProportionalPolicy:
        """With what VLLM_THERMAL_TARGET_C, _K_P and _HYSTERESIS_C say, where they are set."""
        given: dict[str, float] = {}
        for name in RANGES:
            variable = f"VLLM_THERMAL_{name.upper()}"
            if (text := os.environ.get(variable)) is not None:
                try:
                    given[name] = float(text)
                except ValueError:
                    raise PolicyError(f"{variable} is {text!r:.64}: it must be a number") from None
        return cls(**given)

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        """Keep the last temperature of each GPU."""
        self._celsius[gpu_idx] = temp_c

    def get_max_running_seqs(self, scheduler: Any) -> int:
        """The cap by the hottest GPU; the full one before any reading."""
        full_cap: int = scheduler.thermal.full_cap
        hottest_c = max(self._celsius.values(), default=-math.inf)
        if hottest_c < self.target_c - self.hysteresis_c:
            self._cap = None
        elif hottest_c >= self.target_c or self._cap is not None:
            above_c = max(0.0, hottest_c - self.target_c)
            cap = max(1, full_cap - int(self.k_p * above_c))
            self._cap = cap if self._cap is None else min(cap, self._cap)
        return full_cap if self._cap is None else self._cap

    def select_victims(self, running: Sequence[Any], num_to_evict: int) -> Sequence[Any]:
        """Those with the longest KV: each frees most watts."""
        longest = sorted(running, key=lambda request: -int(request.num_computed_tokens))
        return longest[:num_to_evict]


def policy_named(name: str) -> SchedulerThermalPolicy:
    """Make the policy of an entry point; raises PolicyError where there is none."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        names = ", ".join(sorted(known)) or "none is installed"
        raise PolicyError(f"{NAME} is {name!r:.64}: no such policy in {GROUP} ({names})")
    made: SchedulerThermalPolicy = known[name].load()()
    return made


class PolicyDriver:
    """Feeds a policy with readings and holds its cap while there are none."""

    def __init__(
        self,
        name: str,
        policy: SchedulerThermalPolicy,
        readings: Readings,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self._policy = policy
        self._readings = readings
        self._clock = clock
        self._seen_s = -math.inf
        self._cap: int | None = None
        self._is_stale = False
        self._is_defect_told = False

    def close(self) -> None:
        """Stop reading."""
        self._readings.close()

    def cap(self, scheduler: Any) -> int:
        """The cap for this step."""
        sample = self._readings.latest
        full_cap: int = scheduler.thermal.full_cap
        before = full_cap if self._cap is None else self._cap
        age_s = self._clock() - sample.at_s
        try:
            if sample.at_s > self._seen_s:
                self._seen_s = sample.at_s
                for gpu, celsius in sample.celsius.items():
                    self._policy.on_temp_reading(gpu, celsius)
            if age_s < HOLD_S:
                self._cap = max(1, int(self._policy.get_max_running_seqs(scheduler)))
        except MISTAKES as error:
            self._tell(error)
        if age_s >= STALE_S:
            self._cap = min(before, max(1, full_cap // 2))
        self._say_if_stale(is_stale=age_s >= STALE_S)
        return full_cap if self._cap is None else self._cap

    def select_victims(self, running: Sequence[Any], count: int) -> Sequence[Any]:
        """The policy's choice; the last of the list where its code is at fault."""
        try:
            return list(self._policy.select_victims(running, count))
        except MISTAKES as error:
            self._tell(error)
            return running[-count:]

    def status(self) -> dict[str, Any]:
        """What GET tells of the policy and its readings."""
        sample = self._readings.latest
        return {
            "name": self.name,
            "cap": self._cap,
            "celsius": {str(gpu): celsius for gpu, celsius in sample.celsius.items()},
            "reading_age_s": round(self._clock() - sample.at_s, 3),
            "failed_readings": self._readings.failures,
        }

    def _tell(self, error: Exception) -> None:
        """Log the first mistake of a policy; the next ones would fill the log, one a step."""
        if not self._is_defect_told:
            self._is_defect_told = True
            log.error("policy %s is at fault, the cap stays", self.name, exc_info=error)

    def _say_if_stale(self, *, is_stale: bool) -> None:
        if is_stale != self._is_stale:
            self._is_stale = is_stale
            if is_stale:
                log.warning("no temperature for %g s: at most half the cap", STALE_S)
            else:
                log.info("temperatures again")
