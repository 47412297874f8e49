"""The options of thermal control, with their ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MOST_TARGET_CELSIUS = 95.0
"""The founding document's bound of `target_temp_c`."""
LEAST_HYSTERESIS_CELSIUS = 2.0
"""The founding document's: below it a cap is cut and given back at every reading."""
LAW_NAMES = ("p", "aimd", "pi", "power")
"""The keys of `laws.LAWS`, which a test compares."""
VICTIM_NAMES = (
    "lru",
    "largest_kv",
    "lowest_priority",
    "longest_remaining",
    "least_qps",
    "max_relief",
)
"""The keys of `victims.VICTIMS`, which a test compares."""


@dataclass(frozen=True, slots=True)
class ThermalOptions:
    """Options of thermal control. All of it is per instance but `fleet_*`.

    `target_celsius`, `critical_celsius`: of the chip, `memory_*` of its memory. Throttling begins
    at the target and ends `hysteresis_celsius` below it, held for `hold_s`. A reading is smoothed
    over `ewma_s` and looked ahead by `lead_s` with its slope over `slope_window_s`. After `stale_s`
    without a reading nothing is increased, after `safe_after_s` more the cap is `safe_cap`. Two
    changes of a cap are `dwell_s` apart, an increase is `cooldown_s` after any change, and in
    `budget_window_s` there are at most `budget_changes`. None of this binds an emergency.

    `law` makes the cap, of `min_cap` to `max_running`. `k_p`: requests per degree of law `p`. The
    founding document has 0.5 in its plugin ("1 sequence per 2 degrees") and 0.1 in its text on
    hysteresis. 0.1 is 1 sequence per 10 degrees, so they contradict each other. `pi_*`: gains of
    law `pi`, requests per degree, and per degree and second. `watts_per_sequence`,
    `rth_celsius_per_watt`, `tau_s`: what law `power` begins with. `victims`: whom to evict first.
    `evict_within_s`: running requests are evicted when the critical temperature is predicted to be
    nearer than that. `drain_after_s`: so long in an emergency, and the instance takes nothing.
    """

    target_celsius: float = 82.0
    memory_target_celsius: float = 90.0
    critical_celsius: float = 90.0
    memory_critical_celsius: float = 98.0
    hysteresis_celsius: float = 3.0
    lead_s: float = 10.0
    ewma_s: float = 3.0
    slope_window_s: float = 15.0
    stale_s: float = 3.0
    safe_after_s: float = 30.0
    hold_s: float = 10.0
    dwell_s: float = 8.0
    cooldown_s: float = 10.0
    budget_changes: int = 3
    budget_window_s: float = 30.0
    law: str = "power"
    min_cap: int = 1
    max_running: int = 256
    safe_cap: int = 64
    k_p: float = 0.5
    pi_k_p: float = 1.5
    pi_k_i: float = 0.1
    watts_per_sequence: float = 3.2
    rth_celsius_per_watt: float = 0.08
    tau_s: float = 20.0
    prefill_factor: float = 4.0
    victims: str = "max_relief"
    evict_within_s: float = 20.0
    drain_after_s: float = 30.0
    fleet_bytes_per_s: float = 20e9

    def __post_init__(self) -> None:
        """Refuse values out of range, and values that contradict each other."""
        for key, (low, high) in RANGES.items():
            _check(key, getattr(self, key), low, high)
        for key, names in NAMES.items():
            if getattr(self, key) not in names:
                raise ValueError(
                    f"thermal {key} must be one of {', '.join(names)}, not {getattr(self, key)!r}"
                )
        _above("critical_celsius", self.critical_celsius, "target_celsius", self.target_celsius)
        _above(
            "memory_critical_celsius",
            self.memory_critical_celsius,
            "memory_target_celsius",
            self.memory_target_celsius,
        )
        for key, cap in (("min_cap", self.min_cap), ("safe_cap", self.safe_cap)):
            if cap > self.max_running:
                raise ValueError(
                    f"thermal {key} must be at most max_running, {self.max_running}, not {cap}"
                )
        if self.safe_cap < self.min_cap:
            raise ValueError(
                f"thermal safe_cap must be at least min_cap, {self.min_cap}, not {self.safe_cap}"
            )


_SECONDS = (0.0, 3600.0)
RANGES: dict[str, tuple[float, float]] = {
    "target_celsius": (30.0, MOST_TARGET_CELSIUS),
    "memory_target_celsius": (30.0, 110.0),
    "critical_celsius": (31.0, 110.0),
    "memory_critical_celsius": (31.0, 125.0),
    "hysteresis_celsius": (LEAST_HYSTERESIS_CELSIUS, 30.0),
    "lead_s": (0.0, 120.0),
    "ewma_s": (0.0, 120.0),
    "slope_window_s": (2.0, 300.0),
    "stale_s": (0.5, 600.0),
    "safe_after_s": _SECONDS,
    "hold_s": _SECONDS,
    "dwell_s": _SECONDS,
    "cooldown_s": _SECONDS,
    "budget_changes": (1, 1000),
    "budget_window_s": (1.0, 3600.0),
    "min_cap": (1, 1_000_000),
    "max_running": (1, 1_000_000),
    "safe_cap": (1, 1_000_000),
    "k_p": (0.0, 1000.0),
    "pi_k_p": (0.0, 1000.0),
    "pi_k_i": (0.0, 1000.0),
    "watts_per_sequence": (0.01, 1000.0),
    "rth_celsius_per_watt": (0.001, 10.0),
    "tau_s": (0.5, 3600.0),
    "prefill_factor": (1.0, 100.0),
    "evict_within_s": _SECONDS,
    "drain_after_s": _SECONDS,
    "fleet_bytes_per_s": (1.0, 1e15),
}
"""The least and the greatest value of each number; the keys are the fields of ThermalOptions."""
NAMES: dict[str, tuple[str, ...]] = {"law": LAW_NAMES, "victims": VICTIM_NAMES}
"""Allowed values of each option that is a word."""
WHOLE = frozenset({"budget_changes", "min_cap", "max_running", "safe_cap"})
"""The options that are whole numbers."""


def from_mapping(given: Mapping[str, object]) -> ThermalOptions:
    """Options from the keys of a file; ValueError in one line for whatever is not allowed."""
    numbers: dict[str, float] = {}
    words: dict[str, str] = {}
    for key, value in given.items():
        if key in NAMES:
            if not isinstance(value, str):
                raise ValueError(
                    f"thermal {key} must be one of {', '.join(NAMES[key])}, not {value!r}"
                )
            words[key] = value
        elif key in RANGES:
            numbers[key] = _number(key, value)
        else:
            known = ", ".join(sorted([*RANGES, *NAMES]))
            raise ValueError(f"thermal {key[:40]!r} is not an option; there are {known}")
    values: dict[str, object] = {}
    for key, number in numbers.items():
        values[key] = int(number) if key in WHOLE else number
    values.update(words)
    return ThermalOptions(**values)  # type: ignore[arg-type]


def _number(key: str, value: object) -> float:
    low, high = RANGES[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"thermal {key} must be a number of {low:g} to {high:g}, not {value!r}")
    if key in WHOLE and value != int(value if math.isfinite(value) else 0):
        raise ValueError(f"thermal {key} must be a whole number, not {value!r}")
    return float(value)


def _check(key: str, value: float, low: float, high: float) -> None:
    # Written so that NaN is refused too.
    if not low <= value <= high:
        raise ValueError(f"thermal {key} must be {low:g} to {high:g}, not {value:g}")


def _above(key: str, value: float, other: str, least: float) -> None:
    if value <= least:
        raise ValueError(f"thermal {key} must be above {other}, {least:g}, not {value:g}")
