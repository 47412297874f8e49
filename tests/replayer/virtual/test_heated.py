"""An engine that warms a plant: requests wait at a cap, are evicted and go on; nothing is lost."""

from dataclasses import replace

import pytest

from analysis.measures import percentile
from proxy.core.thermal.controller import Controller
from proxy.core.thermal.options import ThermalOptions
from replayer.engine.heat import FirstOrderPlant, HarnessPlant, PlantOptions, Sensors, make_plant
from replayer.virtual.heated import (
    HeatedEngine,
    HeatedOptions,
    HeatedRun,
    LoadPhase,
    make_load,
    peak_celsius,
    seconds_above,
    throughput_tps,
)

LOAD = HeatedOptions(
    seconds=120,
    phases=(LoadPhase(0.0, 3.0), LoadPhase(60.0, 0.0)),
    prompt_tokens=300,
    output_tokens=200,
)


def _run(
    options: HeatedOptions = LOAD,
    controller: Controller | None = None,
    plant: PlantOptions | None = None,
) -> HeatedRun:
    return HeatedEngine(options, Sensors(FirstOrderPlant(plant)), controller).run()


def test_the_load_has_its_rate_its_phases_and_its_seed() -> None:
    load = make_load(LOAD)
    assert 120 < len(load) < 240
    assert all(one.arrived_s < 60.0 for one in load)
    assert make_load(LOAD) == load != make_load(replace(LOAD, seed=1))


def test_every_request_ends_and_every_token_is_counted_once() -> None:
    run = _run()
    assert all(one.end_s is not None and one.ttft_s is not None for one in run.requests)
    wanted = sum(one.output_tokens for one in run.requests)
    assert sum(second.generated_tokens for second in run.seconds) == wanted
    assert throughput_tps(run) == pytest.approx(wanted / 120)
    assert run.seconds[-1].running == run.seconds[-1].waiting == 0


def test_a_cap_makes_requests_wait_and_none_is_lost() -> None:
    controller = Controller(ThermalOptions())
    controller.override(4, until_s=1e9)
    run = _run(replace(LOAD, seconds=400), controller)
    # The first limits are written after a second.
    late = run.seconds[20:]
    assert max(second.running for second in late) == 4
    assert max(second.waiting for second in late) > 10
    assert all(one.end_s is not None for one in run.requests)
    waited, usual = (sorted([r.ttft_s or 0.0 for r in one.requests]) for one in (run, _run()))
    assert percentile(waited, 99) > 10 * percentile(usual, 99)


def test_an_emergency_evicts_and_what_was_evicted_goes_on_with_what_it_had() -> None:
    hot = PlantOptions(ambient_celsius=70.0)
    options = replace(
        LOAD,
        seconds=600,
        output_tokens=1000,
        phases=(LoadPhase(0.0, 6.0), LoadPhase(60.0, 0.0)),
        dead_from_s=0.0,
        dead_until_s=50.0,
    )
    run = _run(options, Controller(ThermalOptions()), hot)
    assert run.evictions > 0
    moved = [one for one in run.requests if one.evictions]
    assert all(one.evictions <= 2 for one in moved)
    assert any(0 < one.delivered_tokens < one.output_tokens for one in moved)
    assert all(one.end_s is not None for one in run.requests)
    # An evicted request's last leg generates what is left, no token twice.
    wanted = sum(one.output_tokens for one in run.requests)
    assert sum(second.generated_tokens for second in run.seconds) == wanted


def test_limits_that_cannot_be_written_do_not_hold() -> None:
    controller = Controller(ThermalOptions())
    controller.override(2, until_s=1e9)
    run = _run(replace(LOAD, dead_from_s=0.0, dead_until_s=40.0), controller)
    assert all(second.cap is None for second in run.seconds[:38])
    assert {second.state for second in run.seconds[5:35]} >= {"MANUAL"}
    assert run.seconds[-1].cap == 2


def test_hardware_that_is_too_hot_is_slow() -> None:
    slow = PlantOptions(ambient_celsius=90.0, slowed_celsius=92.0)
    fast, late = _run(), _run(plant=slow)
    ends, usual = (sorted([r.end_s or 1e9 for r in one.requests]) for one in (late, fast))
    assert percentile(ends, 50) > percentile(usual, 50)
    assert seconds_above(late, 92.0) > 100
    assert peak_celsius(late) > 95.0


def test_air_is_changed_by_a_phase_and_only_where_there_is_some() -> None:
    warmer = replace(LOAD, phases=(LoadPhase(0.0, 1.0), LoadPhase(60.0, 1.0, 60.0)))
    assert peak_celsius(_run(warmer)) > peak_celsius(_run()) + 10
    with pytest.raises(AssertionError, match="no air"):
        HeatedEngine(warmer, Sensors(make_plant("harness")), None).run()
    assert isinstance(make_plant("harness"), HarnessPlant)
