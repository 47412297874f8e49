"""Delays of a start, measured from orders and from what serves."""

from __future__ import annotations

from planner.core.perf.start_up import StartUps


def test_an_order_is_as_old_as_the_tick_before_it_was_seen() -> None:
    one = StartUps(120.0)
    one.observe(5.0, ready=1, wanted=1)
    one.observe(10.0, ready=1, wanted=3)
    assert one.delay_s == 120.0, "as is usual, before the first has come"
    one.observe(35.0, ready=2, wanted=3)
    assert one.delay_s == 30.0
    one.observe(65.0, ready=3, wanted=3)
    assert one.delay_s == 60.0


def test_of_orders_taken_back_the_newest_was() -> None:
    one = StartUps(120.0)
    one.observe(10.0, ready=1, wanted=2)
    one.observe(20.0, ready=1, wanted=3)
    one.observe(30.0, ready=1, wanted=2)
    one.observe(40.0, ready=2, wanted=2)
    assert one.delay_s == 40.0


def test_what_comes_unasked_is_no_measure() -> None:
    one = StartUps(120.0)
    for at_s, ready in ((5.0, 1), (10.0, 4), (15.0, 2), (20.0, 4)):
        one.observe(at_s, ready, wanted=1)
    assert one.delay_s == 120.0


def test_nine_in_ten_are_no_slower() -> None:
    one = StartUps(120.0)
    one.observe(0.0, ready=0, wanted=10)
    for ready in range(1, 11):
        one.observe(10.0 * ready, ready, wanted=10)
    assert one.delay_s == 90.0
