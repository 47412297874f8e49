"""The policy by temperature, and what becomes of its cap while readings are missing."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_thermal.control import Control
from vllm_thermal.policy import PolicyDriver, PolicyError, ProportionalPolicy, policy_named
from vllm_thermal.readings import FileReader, Readings


@dataclass
class Engine:
    """What a policy asks of its scheduler."""

    thermal: Control


ENGINE = Engine(Control(256, 8192))


def caps(policy, temperatures):
    found = []
    for celsius in temperatures:
        policy.on_temp_reading(0, celsius)
        found.append(policy.get_max_running_seqs(ENGINE))
    return found


def test_the_founding_formula():
    """cap = max(1, max - int(k_p * (T - 82)))."""
    assert caps(ProportionalPolicy(), [81.9, 82.0, 83.9, 84.0, 90.0]) == [256, 256, 256, 255, 252]
    assert caps(ProportionalPolicy(k_p=100.0), [95.0]) == [1]


def test_the_cap_does_not_rise_before_the_hysteresis_is_left():
    policy = ProportionalPolicy(k_p=2.0)
    assert caps(policy, [92.0, 85.0, 81.0, 79.0, 78.9, 81.0]) == [236, 236, 236, 236, 256, 256]


def test_the_hottest_gpu_counts():
    policy = ProportionalPolicy(k_p=1.0)
    policy.on_temp_reading(3, 92.0)
    assert caps(policy, [40.0, 50.0]) == [246, 246]


@dataclass
class Request:
    """The part of vLLM's that the reference policy sorts by."""

    num_computed_tokens: int


def test_the_longest_gives_way():
    running = [Request(5), Request(9), Request(1), Request(7)]
    victims = ProportionalPolicy().select_victims(running, 2)
    assert [r.num_computed_tokens for r in victims] == [9, 7]


@pytest.mark.parametrize(
    ("variable", "text", "wrong"),
    [
        ("TARGET_C", "96", "target_c is 96: it must be 30 to 95"),
        ("K_P", "nan", "k_p is nan: it must be 0.01 to 100"),
        ("HYSTERESIS_C", "1.9", "hysteresis_c is 1.9: it must be 2 to 30"),
        ("K_P", "much", "VLLM_THERMAL_K_P is 'much': it must be a number"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch, variable, text, wrong):
    monkeypatch.setenv(f"VLLM_THERMAL_{variable}", text)
    with pytest.raises(PolicyError) as error:
        ProportionalPolicy.of_environment()
    assert str(error.value) == wrong


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_THERMAL_TARGET_C", "70")
    monkeypatch.setenv("VLLM_THERMAL_K_P", "2")
    policy = ProportionalPolicy.of_environment()
    assert (policy.target_c, policy.k_p, policy.hysteresis_c) == (70.0, 2.0, 3.0)


def test_an_unknown_policy_is_named():
    with pytest.raises(PolicyError, match="VLLM_THERMAL_POLICY is 'pid': no such policy"):
        policy_named("pid")


class Clock:
    """Time that a test sets."""

    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def hot(tmp_path):
    """A driver that has read 92 degrees once, from a file that nobody writes any more."""
    clock, path = Clock(), Path(tmp_path / "gpus")
    path.write_text("0 92.0\n")
    readings = Readings(FileReader(path), clock, period_s=3600.0)
    driver = PolicyDriver("proportional", ProportionalPolicy(k_p=20.0), readings, clock)
    yield driver, clock
    driver.close()


def test_without_readings_the_cap_stays_then_halves(hot):
    driver, clock = hot
    found = []
    for age_s in (0.0, 2.9, 3.0, 29.9, 30.0, 99.0):
        clock.now_s = 100.0 + age_s
        found.append(driver.cap(ENGINE))
    assert found == [56, 56, 56, 56, 56, 56]
    assert driver.status()["celsius"] == {"0": 92.0}
    assert driver.status()["reading_age_s"] == 99.0


class Cool(ProportionalPolicy):
    """Never limits."""

    def get_max_running_seqs(self, scheduler):
        return scheduler.thermal.full_cap


class BmcError(Exception):
    """Neither an OSError nor a defect of the language."""


class Defect(ProportionalPolicy):
    """An operator's class with a mistake in it."""

    def get_max_running_seqs(self, scheduler):
        return scheduler.no_such_field

    def select_victims(self, running, num_to_evict):
        raise BmcError("no")


def driver_of(policy, tmp_path, clock):
    (tmp_path / "gpus").write_text("0 50.0\n")
    readings = Readings(FileReader(tmp_path / "gpus"), clock, period_s=3600.0)
    return PolicyDriver("own", policy, readings, clock)


def test_half_the_cap_where_nothing_is_known_of_the_heat(tmp_path, caplog):
    clock = Clock()
    driver = driver_of(Cool(), tmp_path, clock)
    caps_found = [driver.cap(ENGINE)]
    clock.now_s += 30.0
    caps_found += [driver.cap(ENGINE), driver.cap(ENGINE)]
    assert caps_found == [256, 128, 128]
    assert [r.getMessage() for r in caplog.records] == [
        "no temperature for 30 s: at most half the cap"
    ]
    driver.close()


def test_the_engine_outlives_a_mistake_in_a_policy(tmp_path, caplog):
    clock = Clock()
    driver = driver_of(Defect(), tmp_path, clock)
    assert [driver.cap(ENGINE), driver.cap(ENGINE)] == [256, 256]
    assert driver.select_victims([Request(1), Request(2), Request(3)], 2) == [
        Request(2),
        Request(3),
    ]
    assert [r.getMessage() for r in caplog.records] == ["policy own is at fault, the cap stays"]
    driver.close()
