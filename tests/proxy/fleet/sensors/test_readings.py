"""The last readings by instance, and how old they are."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from proxy.core.thermal.headroom import MOST_GPUS
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.readings import SHOWN_S, GpuCollector, GpuReadings

HOT = GpuReading("h:0", 10.0, 80.0, watts=500.123, utilization_ratio=0.9)


def watched(*named: str) -> GpuReadings:
    readings = GpuReadings()
    readings.watch("a", named, 0.0)
    return readings


def test_the_oldest_gpu_is_the_instances_age() -> None:
    readings = watched()
    assert readings.age_s("a", 4.0) == 4.0, "never read: since the first attempt"
    readings.observe("a", [HOT, replace(HOT, gpu="h:1", at_s=8.0)], is_idle=False)
    assert readings.age_s("a", 12.0) == 4.0
    assert [r.gpu for r in readings.of("a")] == ["h:0", "h:1"]
    assert readings.age_s("b", 12.0) is None
    assert readings.of("b") == ()
    readings.forget("a")
    assert readings.age_s("a", 12.0) is None
    readings.observe("a", [HOT], is_idle=False)
    assert readings.of("a") == (), "an answer behind the instance's removal"


def test_a_sensor_that_tells_other_gpus_each_time_takes_no_more_places() -> None:
    readings, at_s = watched(), 0.0
    while at_s < 3 * SHOWN_S:
        others = (replace(HOT, gpu=f"h:{at_s}-{n}", at_s=at_s) for n in range(100))
        readings.observe("a", [replace(HOT, at_s=at_s), *others], is_idle=True)
        at_s += 5.0
        assert len(readings.of("a")) <= MOST_GPUS
        (own,) = (r for r in readings.of("a") if r.gpu == "h:0")
        assert own.at_s == at_s - 5.0, "one that is told each time keeps its place"


def test_only_named_gpus_are_kept_and_each_is_missed() -> None:
    readings = watched("h:0", "h:1")
    readings.observe("a", [HOT, replace(HOT, gpu="h:7")], is_idle=False)
    assert [r.gpu for r in readings.of("a")] == ["h:0"]
    assert readings.age_s("a", 12.0) == 12.0
    expected = {one.gpu: (one.at_s, one.celsius) for one in readings.expected("a")}
    assert expected == {"h:0": (HOT.at_s, HOT.celsius), "h:1": (0.0, None)}, "not there for control"


def test_a_sensor_that_repeats_itself_grows_old_while_its_instance_works() -> None:
    readings = watched()
    for at_s in (10.0, 11.0, 12.0):
        readings.observe("a", [replace(HOT, at_s=at_s)], is_idle=False)
    assert readings.age_s("a", 12.0) == 2.0
    readings.observe("a", [replace(HOT, at_s=13.0)], is_idle=True)
    assert readings.age_s("a", 13.0) == 0.0, "an idle GPU may well be as it was"
    readings.observe("a", [replace(HOT, at_s=14.0, watts=500.124)], is_idle=False)
    assert readings.age_s("a", 14.0) == 0.0
    degrees = GpuReading("h:0", 15.0, 80.0)
    for at_s in (15.0, 16.0):
        readings.observe("a", [replace(degrees, at_s=at_s)], is_idle=False)
    assert readings.age_s("a", 16.0) == 0.0, "whole degrees alone may stay the same"


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.booleans()), max_size=20))
def test_a_time_never_goes_back_or_ahead(steps: list[tuple[float, bool]]) -> None:
    readings, last_s = watched(), 0.0
    for at, (watts, is_idle) in enumerate(steps, 1):
        readings.observe("a", [GpuReading("h:0", float(at), 50.0, watts=watts)], is_idle=is_idle)
        (reading,) = readings.of("a")
        assert last_s <= reading.at_s <= at
        assert reading.watts == watts
        last_s = reading.at_s


def exported(readings: GpuReadings, now_s: float) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(GpuCollector(readings, lambda: now_s))
    samples = [sample for family in registry.collect() for sample in family.samples]
    names = [" ".join((sample.name, *sample.labels.values())) for sample in samples]
    values = (sample.value for sample in samples)
    return {n.removeprefix("cache_proxy_"): v for n, v in zip(names, values, strict=True)}


def test_gauges_end_with_the_readings_and_the_age_goes_on() -> None:
    readings = watched()
    readings.observe("a", [HOT], is_idle=False)
    assert exported(readings, 11.0) == {
        "gpu_temperature_celsius a h:0": 80.0,
        "gpu_power_watts a h:0": 500.123,
        "gpu_utilization_ratio a h:0": 0.9,
        "gpu_slowed a h:0": 0.0,
        "thermal_sensor_age_seconds a": 1.0,
    }
    assert exported(readings, 10.0 + SHOWN_S) == {"thermal_sensor_age_seconds a": SHOWN_S}
