"""Who is in the fleet, and who of them may be chosen for a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.health import FALL, FAULTS, State
from proxy.core.fleet.members import START_RATIO, Fleet, Member
from proxy.core.types import FailureKind, Instance

MODELS: dict[str, set[str] | None] = {"a": {"m"}, "b": {"m", "n"}, "c": {"n"}, "new": None}


def fleet() -> Fleet:
    made = Fleet()
    for name, models in MODELS.items():
        made.add(Instance(name, f"http://{name}"))
        if models is not None:
            made.observe_models(name, models)
    return made


def member(f: Fleet, name: str) -> Member:
    found = f.get(name)
    assert found is not None
    return found


def take_down(f: Fleet, name: str) -> None:
    for _ in range(FALL):
        member(f, name).health.probe_failed("x", 0.0, is_refused=True)


def serving(f: Fleet, model: str, *exclude: str) -> str:
    return " ".join(m.instance.name for m in f.serving(model, exclude))


@pytest.mark.parametrize(
    ("model", "exclude", "down", "draining", "expected"),
    [
        ("m", "", "", "", "a b new"),
        ("n", "", "", "", "b c new"),
        ("m", "a", "", "", "b new"),
        ("m", "", "a", "", "b new"),
        ("m", "", "", "a", "b new"),
        ("m", "a new", "b", "", ""),
        ("n", "new", "b", "c", ""),
        ("unknown", "", "", "", "new"),
        ("unknown", "new", "", "", "a b c"),
        ("unknown", "new", "a", "b", "c"),
        ("unknown", "new a b c", "", "", ""),
        ("", "new", "", "", "a b c"),
        ("m", "", "a b c new", "", ""),
    ],
)
def test_serving(model: str, exclude: str, down: str, draining: str, expected: str) -> None:
    f = fleet()
    for name in down.split():
        take_down(f, name)
    for name in draining.split():
        member(f, name).is_draining = True
    assert serving(f, model, *exclude.split()) == expected


def test_a_model_that_left_with_its_instance_is_unknown() -> None:
    f = fleet()
    for name in ("b", "c", "new"):
        f.remove(name)
    assert serving(f, "n") == "a"
    assert f.models() == {"m"}


def test_members_come_and_go() -> None:
    f = fleet()
    take_down(f, "b")
    f.remove("c")
    f.remove("c")
    f.observe_models("c", ["n"])
    assert [m.instance.name for m in f.members()] == ["a", "b", "new"]
    assert [m.instance.name for m in f.up()] == ["a", "new"]
    assert [f.is_up(name) for name in MODELS] == [True, False, False, True]
    assert f.get("c") is None


def test_one_that_returns_starts_anew() -> None:
    f = fleet()
    take_down(f, "a")
    f.add(Instance("a", "http://elsewhere"))
    assert f.is_up("a")
    assert (member(f, "a").models, member(f, "a").instance.url) == (None, "http://elsewhere")


def test_placements_are_numbered_across_the_fleet() -> None:
    f = fleet()
    for name in ("a", "b", "a"):
        f.placed(name)
    assert [m.last_placed for m in f.members()] == [3, 2, 0, 0]


def fails(f: Fleet, name: str) -> None:
    for _ in range(FAULTS):
        member(f, name).health.failed(FailureKind.SERVER_ERROR, "status 500", 0.0)


def test_half_may_be_ejected_and_more_is_panic() -> None:
    f = fleet()
    fails(f, "a")
    assert (serving(f, "m"), serving(f, "n"), f.is_panicking()) == ("b new", "b c new", False)
    fails(f, "b")
    assert serving(f, "m") == "a b new", "two of the three that serve it would be out"
    assert f.is_panicking()
    assert [m.instance.name for m in f.usable()] == ["c", "new"], "half of all are out"
    assert f.is_used("a")
    assert f.open() == {"a", "b"}
    take_down(f, "new")
    assert serving(f, "m") == "a b", "where nobody listens nothing is sent, whatever happens"
    take_down(f, "a")
    take_down(f, "b")
    assert serving(f, "m") == ""
    assert not f.is_panicking()


def test_one_that_joins_is_used_once_it_has_answered_a_probe() -> None:
    f = fleet()
    f.add(Instance("joined", "http://joined"), is_proven=False)
    health = member(f, "joined").health
    assert (health.state(0.0), f.is_up("joined")) == (State.PROBING, False)
    assert "joined" not in serving(f, "m")
    health.probe_failed("refused", 0.0, is_refused=True)
    assert health.state(0.0) is State.EJECTED
    health.probe_answered(1.0)
    assert (health.state(1.0), serving(f, "m")) == (State.HEALTHY, "a b new joined")


def test_those_that_join_make_no_panic() -> None:
    """Half of those that serve may be out, however many have never answered."""
    f = fleet()
    for i in range(9):
        f.add(Instance(f"joined{i}", f"http://joined{i}"), is_proven=False)
    fails(f, "a")
    assert (serving(f, "m"), f.is_panicking()) == ("b new", False)


@given(st.lists(st.sampled_from(["up", "gone", "open", "silent", "draining"]), max_size=9))
def test_never_are_more_than_half_ejected(states: list[str]) -> None:
    """Of those that serve: unless nobody listens, which no guess can change."""
    f = Fleet()
    for i, state in enumerate(states):
        f.add(Instance(f"{i}", f"http://{i}"))
        health = member(f, f"{i}").health
        health.was_seen = True
        if state == "gone":
            take_down(f, f"{i}")
        elif state == "open":
            fails(f, f"{i}")
        elif state == "silent":
            for _ in range(FALL):
                health.probe_failed("late", 0.0)
        member(f, f"{i}").is_draining = state == "draining"
    used = {m.instance.name for m in f.serving("any")}
    here = [s for s in states if s != "draining"]
    left_out = sum(s in ("open", "silent") and f"{i}" not in used for i, s in enumerate(states))
    assert left_out + here.count("gone") <= max(len(here) / 2, here.count("gone"))
    assert {f"{i}" for i, s in enumerate(states) if s == "up"} <= used
    assert not any(s in ("gone", "draining") and f"{i}" in used for i, s in enumerate(states))
    assert f.is_panicking() == any(states[int(name)] != "up" for name in used)
    assert {m.instance.name for m in f.members() if f.is_used(m.instance.name)} >= used


@pytest.mark.parametrize(
    ("since_s", "share"), [(0.0, START_RATIO), (15.0, 0.55), (29.9, 0.997), (30.0, 1.0)]
)
def test_a_returned_instance_takes_part_more_and_more(since_s: float, share: float) -> None:
    f = Fleet(slow_start_s=30.0)
    for name in ("old", "back"):
        f.add(Instance(name, f"http://{name}"))
    member(f, "back").health.back_s = 100.0
    f.returned("back")
    counted: Counter[str] = Counter()
    for _ in range(1000):
        free = f.warm(f.members(), None, 100.0 + since_s)
        counted.update(m.instance.name for m in free)
    assert counted["old"] == 1000
    assert abs(counted["back"] - 1000 * share) <= 2
    assert f.is_starting is (since_s < 30.0)


def test_slow_start_leaves_nobody_without_an_instance() -> None:
    f = Fleet(slow_start_s=30.0)
    for name in ("a", "b"):
        f.add(Instance(name, f"http://{name}"))
        member(f, name).health.back_s = 100.0
        f.returned(name)
    assert len(f.warm(f.members(), None, 100.0)) == 2, "all are as cold"
    assert len(f.warm([member(f, "a")], None, 100.0)) == 1
    member(f, "b").health.back_s = 80.0
    kept = [[m.instance.name for m in f.warm(f.members(), home, 100.0)] for home in (None, "a")]
    assert kept == [["b"], ["a", "b"]], "whoever lives there may go there"
