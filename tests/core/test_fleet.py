"""Who is in the fleet, and who of them may be chosen for a model."""

from __future__ import annotations

import pytest

from proxy.core.fleet import Fleet, Member
from proxy.core.health import FALL
from proxy.core.types import Instance

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
