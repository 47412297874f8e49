"""Controllers and orders together: what stands above what."""

from __future__ import annotations

import pytest

from proxy.core.thermal.fleet_control import FleetControl
from proxy.core.thermal.orders import BatchOrder
from proxy.core.thermal.policy import OperatorPolicy
from proxy.core.thermal.readings import COOL, GpuReading, HeatLimits, InstanceWork
from proxy.core.thermal.victims import Victim
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
    control = FleetControl(lambda own: policy)
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

    def make(own: object) -> Scripted:
        assert own is None
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
    control = FleetControl(lambda own: policy)
    for cap in (None, 8, 8, 6, 7, 9, 5, None):
        policy.limits = HeatLimits(cap=cap)
        control.tick("a", (), BUSY, 0.0)
    assert control.status("a").oscillations == 3


def test_a_controller_holds_an_operators_temperature_itself() -> None:
    policy = Scripted(HeatLimits(cap=9))
    control = FleetControl(lambda own: policy)
    control.tick("a", (), BUSY, 0.0)
    control.give({"a": 16}, BatchOrder(target_celsius=80.0, ttl_s=60.0), "d", 1.0)
    assert policy.aimed == (80.0, 61.0)
    hot = [GpuReading("h:0", 2.0, celsius=84.0)]
    assert control.tick("a", hot, BUSY, 2.0) == HeatLimits(cap=9), "its law makes the cap"
    control.clear(["a"])
    assert policy.aimed is None


def test_an_instance_without_a_sensor_is_not_controlled() -> None:
    policy = Scripted(HeatLimits(cap=9))
    control = FleetControl(lambda own: policy)
    assert control.tick("a", None, BUSY, 0.0) == COOL
    assert not policy.seen


class Lists:
    """An operator's policy that names whom it likes."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_max_running_seqs(self, scheduler: object) -> int:
        del scheduler
        return 8

    def select_victims(self, running: list[Victim], num_to_evict: int) -> list[Victim]:
        if not self.names:
            raise LookupError("no idea")
        return [one for one in running if one.request_id in self.names][:num_to_evict]

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        del gpu_idx, temp_c


@pytest.mark.parametrize(
    ("names", "policy", "expected"),
    [
        (("c",), None, ["c"]),
        (("fixed",), None, ["a", "b"]),  # it cannot be moved: control's own order
        ((), None, ["a", "b"]),  # the policy fails
        (("c",), "largest_kv", ["c", "b"]),  # an operator's word comes first
    ],
)
def test_an_operators_policy_chooses_among_those_that_can_be_moved(
    names: tuple[str, ...], policy: str | None, expected: list[str]
) -> None:
    rows = [Victim(name, kv_tokens=10 * at, remaining_tokens=9) for at, name in enumerate("abc")]
    rows.append(Victim("fixed", kv_tokens=999, is_movable=False))
    control = FleetControl(lambda own: Scripted(), lambda: Lists(*names), "lru")
    control.tick("a", (), BUSY, 0.0)
    found = control.victims("a", rows, 2, 100.0, policy)
    assert [one.request_id for one in found] == expected


def test_tokens_computed_since_the_last_look() -> None:
    control = FleetControl()
    seen = [control.prefill_tps("a", n, t) for n, t in ((900, 0.0), (1900, 2.0), (50, 3.0))]
    assert seen == [0.0, 500.0, 0.0], "another process has begun at 0"


def test_a_policy_that_cannot_be_made_leaves_the_own_law() -> None:
    class BmcError(Exception):
        """What an operator's code may raise."""

    def make() -> OperatorPolicy:
        raise BmcError

    given: list[OperatorPolicy | None] = []

    def make_control(own: OperatorPolicy | None) -> Scripted:
        given.append(own)
        return Scripted()

    control = FleetControl(make_control, make)
    control.tick("a", (), BUSY, 0.0)
    assert given == [None]


def test_an_order_taken_over_aims_the_controller_that_comes_later() -> None:
    before = FleetControl()
    before.give({"a": 9}, BatchOrder(target_celsius=75.0, ttl_s=60.0), "d1", 100.0)
    aimed = Scripted()
    after = FleetControl(lambda policy: aimed)
    after.adopt_orders(before.order_rows(), 7, 110.0)
    after.tick("a", (), InstanceWork(), 111.0)
    assert aimed.aimed == (75.0, 160.0)
    assert after.version == 7


@pytest.mark.parametrize(
    "row",
    [
        ["a"],
        ["a", "8", 0, None, "lru", 60.0, "", "d1", 500.0, 8],
        ["a", 8, 0, None, "lru", 60.0, "", "d1", True, 8],
        ["a", 8, 0, None, "nobody", 60.0, "", "d1", 500.0, 8],
        ["a", 8, 0, None, "lru", 60.0, "", "d1", 500.0, -5],
    ],
)
def test_what_is_no_order_is_left_out(row: list[object]) -> None:
    control = FleetControl()
    good = ["b", 8, 0, None, "lru", 60.0, "", "d1", 500.0, 8]
    control.adopt_orders([row, good], 2, 100.0)
    assert control.status("a").order is None
    assert control.status("b").limits.cap == 8
