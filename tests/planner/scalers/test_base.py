"""Whom a scaler takes away first."""

from planner.scalers.base import Member, victims


def names(members: list[Member]) -> list[str]:
    return [one.name for one in members]


def test_the_one_with_least_to_lose_goes_first() -> None:
    leaving = Member("leaving", "", is_ready=False, is_draining=True, requests=9, held_tokens=9)
    down = Member("down", "", is_ready=False, held_tokens=5)
    idle = Member("idle", "", is_ready=True, held_tokens=900)
    light = Member("light", "", is_ready=True, requests=1, held_tokens=10)
    heavy = Member("heavy", "", is_ready=True, requests=1, held_tokens=20)
    order = victims([heavy, light, idle, down, leaving], 5)
    assert names(order) == ["leaving", "down", "idle", "light", "heavy"]
    assert victims(order, 0) == []
