"""Who is in the fleet, and who of them may be chosen for a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.health import FALL, FAULTS, State
from proxy.core.fleet.members import SAME_START_S, SEVERAL_S, START_RATIO, Fleet, Member, Starts
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


def test_one_that_rests_is_never_used() -> None:
    f = fleet()
    member(f, "a").health.rest = State.ASLEEP
    assert (serving(f, "m"), f.is_up("a"), f.is_used("a")) == ("b new", False, False)
    fails(f, "b")
    f.remove("new")
    assert serving(f, "m") == "b", "one of one is out: a panic, but of those that are awake"
    take_down(f, "b")
    assert (serving(f, "m"), f.is_panicking()) == ("", False)
    assert [m.instance.name for m in f.up()] == ["c"]
    assert [m.instance.name for m in f.listed()] == ["a", "c"], "its models are told all the same"
    assert member(f, "a").health.state(0.0) is State.ASLEEP


@pytest.mark.parametrize(
    ("model", "rested_s"), [("m", 10.0), ("n", 40.0), ("unknown", 10.0), ("", 10.0)]
)
def test_how_long_the_last_one_has_rested(model: str, rested_s: float) -> None:
    f = fleet()
    f.remove("new")
    assert f.rested_s(model, 100.0) is None
    for name, since_s in (("a", 90.0), ("b", 60.0)):
        member(f, name).health.rest, member(f, name).health.rest_s = State.PAUSED, since_s
    assert f.rested_s(model, 100.0) == rested_s
    member(f, "a").is_draining = True
    take_down(f, "b")
    assert f.rested_s(model, 100.0) is None


def of_lengths(**lengths: int | None) -> Fleet:
    made = Fleet()
    for name, length in lengths.items():
        made.add(Instance(name, f"http://{name}"))
        made.observe_models(name, ["m"], None, {"m": length} if length is not None else {})
    return made


def holding(f: Fleet, tokens: int, beyond: int = 0) -> str:
    return " ".join(m.instance.name for m in f.holding(f.serving("m"), "m", tokens, beyond))


@pytest.mark.parametrize(
    ("tokens", "beyond", "expected"),
    [
        (10, 0, "small mid large"),
        (750, 0, "small mid large"),
        (751, 0, "mid large"),
        (10, 1000, "mid large"),
        (8000, 0, "large"),
        (76_000, 0, "large"),
        (900_000, 0, "large"),
        (10, 99_999, "large"),
        (10, 100_000, ""),
    ],
)
def test_who_holds_a_prompt(tokens: int, beyond: int, expected: str) -> None:
    f = of_lengths(small=1000, mid=10_000, large=100_000)
    assert f.uneven == {"m"}
    assert holding(f, tokens, beyond) == expected


def test_while_a_longer_one_is_away() -> None:
    f = of_lengths(small=1000, large=100_000)
    member(f, "large").health.rest = State.ASLEEP
    for tokens in (1300, 30_000, 900_000):
        assert holding(f, tokens) == "small", "an estimate may be too high, and refuses nobody"
    assert f.has_longer("small", "m"), "its refusal is not the last word"
    assert holding(f, 1300, beyond=1000) == "", "it can't fit there"


def test_a_context_of_unknown_length_holds_anything() -> None:
    f = of_lengths(small=1000, unknown=None)
    assert holding(f, 5000) == "unknown"
    assert [f.has_longer(name, "m") for name in ("small", "unknown", "who")] == [True, False, False]


def test_contexts_of_one_length_are_not_looked_at() -> None:
    f = of_lengths(a=1000, b=1000)
    assert not f.uneven
    assert not f.has_longer("a", "m")
    f.observe_models("b", ["m"], None, {"m": 2000})
    assert f.uneven == {"m"}
    assert f.has_longer("a", "m")
    f.remove("a")
    assert f.uneven == frozenset()


@given(
    st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(1, 1 << 20), min_size=1),
    st.integers(0, 1 << 21),
)
def test_a_prompt_always_goes_somewhere_while_all_are_there(
    lengths: dict[str, int | None], tokens: int
) -> None:
    f = of_lengths(**lengths)
    found = holding(f, tokens).split()
    longest = max(f.length(name, "m") for name in lengths)
    assert found
    assert any(f.length(name, "m") == longest for name in found)
    assert all(f.length(name, "m") >= min(longest, tokens) for name in found)


def test_a_model_is_denied_once_all_lists_are_known() -> None:
    f = fleet()
    assert not f.denies("x"), "of one instance the models are unknown"
    f.observe_models("new", ["y"])
    assert [f.denies(model) for model in ("x", "y", "m", "")] == [True, False, False, False]
    f.reread_models()
    assert all(m.rereads_models for m in f.members())
    f.observe_models("new", [])
    assert not f.denies("x"), "it may list them later"
    f.add(Instance("c", "http://c"))
    assert not f.denies("x")
    assert not Fleet().denies("x")


@pytest.mark.parametrize(
    ("starts", "several"),
    [
        ([], False),
        ([5], False),
        ([5, 5, 5], False),
        ([5, 9, 12], False),
        ([5, 9, 5], True),
        ([9, 5, 9], True),
        ([5, 9, 12, 5], True),
        ([5, 5 + SAME_START_S, 5, 5 + SAME_START_S], False),
    ],
)
def test_several_processes_show_by_the_return_of_one(starts: list[float], several: bool) -> None:
    seen = Starts()
    for at, start_s in enumerate(starts):
        seen.observe(start_s, float(at))
    end_s = float(len(starts))
    assert seen.are_several(end_s) is several
    assert not seen.are_several(end_s + SEVERAL_S)
