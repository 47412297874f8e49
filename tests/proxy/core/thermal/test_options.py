"""Options of thermal control: what a file may say, and the line that refuses the rest."""

import math

import pytest

from proxy.core.thermal.laws import LAWS
from proxy.core.thermal.options import (
    LAW_NAMES,
    NAMES,
    RANGES,
    VICTIM_NAMES,
    WHOLE,
    ThermalOptions,
    from_mapping,
)
from proxy.core.thermal.victims import VICTIMS


def test_defaults_are_the_founding_document_s() -> None:
    options = from_mapping({})
    assert options == ThermalOptions()
    assert (options.target_celsius, options.hysteresis_celsius, options.k_p) == (82.0, 3.0, 0.5)
    assert options.watts_per_sequence == 3.2


def test_every_option_has_a_range_or_names() -> None:
    fields = set(ThermalOptions.__dataclass_fields__)
    assert fields == {*RANGES, *NAMES}
    assert RANGES.keys() >= WHOLE
    assert tuple(LAWS) == LAW_NAMES
    assert tuple(VICTIMS) == VICTIM_NAMES


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target_celsius": 95.1}, ("target_celsius", "30", "95", "95.1")),
        ({"target_celsius": math.nan}, ("target_celsius", "95", "nan")),
        ({"hysteresis_celsius": 1.9}, ("hysteresis_celsius", "2", "1.9")),
        ({"min_cap": 0}, ("min_cap", "1", "0")),
        ({"min_cap": 1.5}, ("min_cap", "whole", "1.5")),
        ({"min_cap": True}, ("min_cap", "number", "True")),
        ({"max_running": math.inf}, ("max_running", "whole", "inf")),
        ({"law": "pid"}, ("law", "power", "pid")),
        ({"law": 3}, ("law", "power", "3")),
        ({"victims": "oldest"}, ("victims", "lru", "oldest")),
        ({"dwell_s": "8"}, ("dwell_s", "number", "'8'")),
        ({"dwell": 8}, ("dwell", "dwell_s")),
        ({"critical_celsius": 82}, ("critical_celsius", "above target_celsius", "82")),
        ({"memory_critical_celsius": 90}, ("memory_critical_celsius", "memory_target_celsius")),
        ({"max_running": 32}, ("safe_cap", "32", "64")),
        ({"min_cap": 65}, ("safe_cap", "65", "64")),
    ],
)
def test_what_is_not_allowed_is_one_line(given: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="thermal") as refused:
        from_mapping(given)
    told = str(refused.value)
    assert "\n" not in told
    assert all(word in told for word in words), told


def test_whole_numbers_stay_whole() -> None:
    options = from_mapping({"max_running": 128, "safe_cap": 32, "law": "pi", "lead_s": 5})
    assert (options.max_running, options.safe_cap) == (128, 32)
    assert isinstance(options.max_running, int)
    assert (options.law, options.lead_s) == ("pi", 5.0)
