"""A component's instances are those whose names match."""

from planner.config.components import Component


def test_a_component_owns_the_names_that_match() -> None:
    one = Component("decode", "decode-*")
    assert one.own(["decode-0", "prefill-0", "decode-10"]) == ["decode-0", "decode-10"]
    assert Component().own(["a", "b"]) == ["a", "b"]
