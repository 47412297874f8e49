"""Names of models in metrics, of engines that tell others each time."""

from __future__ import annotations

from proxy.core.accounts.instances import InstanceStates
from proxy.core.fleet.members import Member
from proxy.core.fleet.named_models import HELD_S, MOST, NamedModels
from proxy.core.types import Instance


def member(name: str, *models: str) -> Member:
    """An instance that lists these models."""
    state = InstanceStates().add(name)
    return Member(Instance(name, f"http://{name}:1"), state, models=frozenset(models))


def test_an_engine_that_lists_others_each_time_names_a_bounded_number() -> None:
    named, liar, honest = NamedModels(), member("liar"), member("honest", "m", "n")
    seen: set[str] = set()
    for time in range(60):
        liar.models = frozenset(f"{time}-{n}" for n in range(1000))
        found = named.of([liar, honest], float(time))
        assert {"m", "n"} <= found
        seen |= found
    assert len(seen) == MOST + 2
    assert seen <= named.of([liar, honest], HELD_S - 1.0)
    assert len(named.of([liar, honest], 2 * HELD_S) - seen) == MOST
    assert named.of([honest], 2 * HELD_S) == {"m", "n"}, "who is gone has no models"


def test_a_model_stays_named_as_long_as_it_is_listed() -> None:
    named, one = NamedModels(), member("a", *[f"b{n:03}" for n in range(MOST)])
    before = named.of([one], 0.0)
    assert one.models is not None
    one.models |= {"a", "c"}
    for time_s in (1.0, 2 * HELD_S, 4 * HELD_S):
        assert named.of([one], time_s) == before


def test_adapters_come_after_their_base() -> None:
    adapters = [f"a{n}" for n in range(2 * MOST)]
    one = member("a", "base", *adapters)
    one.bases = dict.fromkeys(adapters, "base")
    assert "base" in NamedModels().of([one], 0.0)
