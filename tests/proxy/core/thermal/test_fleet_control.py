"""Controllers and orders together: what stands above what."""

from __future__ import annotations

from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork
from tests.support.heat import Scripted

BUSY = InstanceWork(running=16)


def test_without_controllers_orders_are_obeyed_and_end() -> None:
    control = FleetControl()
    assert control.tick("a", (), BUSY, 0.0) == COOL
    given = control.give({"a": 16}, BatchOrder(max_num_seqs=4, ttl_s=60.0), "d1", 0.0)
    assert given["a"] == HeatLimits(cap=4)
    assert (control.state("a"), control.state("b"), control.version) == ("MANUAL", "NORMAL", 1)
    assert control.tick("a", (), BUSY, 59.0).cap == 4
    assert control.tick("a", (), BUSY, 60.0) == COOL
    assert control.state("a") == "NORMAL"


def test_an_order_stands_above_control_and_an_emergency_above_both() -> None:
    policy = Scripted(HeatLimits(weight=0.5, cap=8, is_drained=True), "THROTTLE")
    control = FleetControl(lambda: policy)
    assert control.tick("a", (), BUSY, 0.0) == policy.limits
    control.give({"a": 16}, BatchOrder(max_num_seqs=12), "d", 1.0)
    assert control.tick("a", (), BUSY, 1.0) == HeatLimits(weight=0.5, cap=12)
    policy.state = "EMERGENCY"
    assert control.tick("a", (), BUSY, 2.0) == policy.limits, "the stricter of both caps"
    assert control.state("a") == "EMERGENCY"
    control.give({"a": 16}, BatchOrder(max_num_seqs=2), "d", 3.0)
    assert control.tick("a", (), BUSY, 3.0).cap == 2
    assert control.clear(["a", "b"]) == ["a"]
    assert control.tick("a", (), BUSY, 4.0).cap == 8


def test_each_instance_has_a_controller_of_its_own_as_long_as_it_is_there() -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted())
        return made[-1]

    control = FleetControl(make)
    for name in ("a", "b", "a"):
        control.tick(name, (), BUSY, 0.0)
    assert [len(one.seen) for one in made] == [2, 1]
    control.give({"a": 1}, BatchOrder(max_num_seqs=1), "d", 0.0)
    control.keep(["b"])
    assert control.status("a").order is None
    control.tick("a", (), BUSY, 0.0)
    assert len(made) == 3


def test_a_target_is_followed_by_the_control_tick() -> None:
    control = FleetControl()
    control.give({"a": 16}, BatchOrder(target_celsius=80.0), "d", 0.0)
    assert control.tick("a", (), BUSY, 0.0) == COOL
    hot = [GpuReading("h:0", 1.0, celsius=84.0)]
    assert control.tick("a", hot, BUSY, 1.0) == HeatLimits(cap=14, evict=2)
    cool = [GpuReading("h:0", 2.0, celsius=79.0)]
    assert control.tick("a", cool, BUSY, 2.0) == HeatLimits(cap=14), "kept to the order's end"


def test_a_cap_that_turns_is_counted() -> None:
    policy = Scripted()
    control = FleetControl(lambda: policy)
    for cap in (None, 8, 8, 6, 7, 9, 5, None):
        policy.limits = HeatLimits(cap=cap)
        control.tick("a", (), BUSY, 0.0)
    assert control.status("a").oscillations == 3
