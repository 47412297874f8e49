"""The autoscaler of Kubernetes: tolerance, windows, limits."""

from __future__ import annotations

import pytest

from bench.planner.rules.hpa import Behavior, Hpa, Limit, average_value, percent, pods

FREE = (percent(1000, 15),)


@pytest.mark.parametrize(
    ("total", "current", "wish"),
    [
        (160, 10, 10),
        (175, 10, 10),
        (177, 10, 12),
        (145, 10, 10),
        (143, 10, 9),
        (1, 0, 1),
        (0, 5, 0),
    ],
)
def test_a_metric_near_its_target_changes_nothing(total: int, current: int, wish: int) -> None:
    assert average_value(total, 16, current) == wish


def test_down_waits_for_the_largest_wish_of_the_window() -> None:
    hpa = Hpa(Behavior(up=FREE, down=FREE, down_window_s=300.0))
    assert hpa.step(0.0, 3, 8) == 8
    assert [hpa.step(at_s, 8, 2) for at_s in (15.0, 150.0, 299.0)] == [8, 8, 8]
    assert hpa.step(301.0, 8, 2) == 2


def test_up_waits_for_the_least_wish_of_the_window() -> None:
    hpa = Hpa(Behavior(up=FREE, down=FREE, up_window_s=60.0))
    assert hpa.step(0.0, 2, 2) == 2
    assert [hpa.step(at_s, 2, 9) for at_s in (15.0, 45.0)] == [2, 2]
    assert hpa.step(61.0, 2, 9) == 9


def test_a_percentage_is_of_the_replicas_at_the_period_s_start() -> None:
    hpa = Hpa(Behavior(up=(percent(100, 60),), down=FREE))
    assert hpa.step(0.0, 3, 20) == 6
    assert hpa.step(15.0, 6, 20) == 6
    assert hpa.step(61.0, 6, 20) == 12


def test_the_widest_limit_counts() -> None:
    both = Hpa(Behavior(up=(percent(100, 60), pods(4, 60)), down=FREE))
    assert both.step(0.0, 1, 20) == 5
    assert both.step(61.0, 5, 20) == 10


def test_down_by_one_per_period() -> None:
    hpa = Hpa(Behavior(up=FREE, down=(pods(1, 120),), down_window_s=0.0))
    assert hpa.step(0.0, 5, 1) == 4
    assert hpa.step(60.0, 4, 1) == 4
    assert hpa.step(121.0, 4, 1) == 3


def test_what_went_within_the_period_may_come_back() -> None:
    hpa = Hpa(Behavior(up=(pods(1, 300),), down=(pods(3, 60),), down_window_s=0.0))
    assert hpa.step(0.0, 6, 3) == 3
    assert hpa.step(15.0, 3, 9) == 7  # one more than at the period's start


def test_half_a_replica_goes_up_and_down_in_whole_ones() -> None:
    half = Limit(50, 15, is_percent=True)
    assert Hpa(Behavior(up=(half,), down=FREE)).step(0.0, 3, 9) == 5
    assert Hpa(Behavior(up=FREE, down=(half,), down_window_s=0.0)).step(0.0, 3, 1) == 1
