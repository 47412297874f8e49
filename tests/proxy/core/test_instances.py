"""One state per incarnation: what is dropped is out of reach for whoever still holds it."""

from proxy.core.instances import InstanceStates


def test_a_name_that_comes_again_has_a_fresh_state() -> None:
    states = InstanceStates()
    first = states.add("i")
    first.kv_tokens, first.cooldown_until_s = 1000, 5.0
    second = states.add("i")
    assert second is not first
    assert (second.kv_tokens, second.cooldown_until_s) == (None, float("-inf"))
    first.kv_tokens = 2000
    assert [state.kv_tokens for state in states] == [None], "the old one writes into the void"


def test_who_is_removed_is_forgotten() -> None:
    states = InstanceStates()
    states.add("i")
    states.remove("i")
    states.remove("i")
    assert not list(states)
