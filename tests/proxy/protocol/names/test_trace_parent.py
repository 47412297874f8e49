"""W3C trace context: what is a valid parent, and what a leg is sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol.names.trace_parent import context_lines, parent_of, state_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"00-{TRACE}-{PARENT}-fe", False),
        (f"01-{TRACE}-{PARENT}-01", True),
        (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_valid_parent(text: str, is_sampled: bool) -> None:
    assert parent_of([text]) == (TRACE, PARENT, is_sampled)


@pytest.mark.parametrize(
    "given",
    [
        [],
        [""],
        [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE[1:]}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-1"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        [f"00-{TRACE}-{PARENT}-01-"],
        [f"01-{TRACE}-{PARENT}-01more"],
        [f"00_{TRACE}_{PARENT}_01"],
        [f"0g-{TRACE}-{PARENT}-01"],
        [f" 00-{TRACE}-{PARENT}-01\n"],
    ],
)
def test_what_is_no_parent(given: list[str]) -> None:
    assert parent_of(given) is None


@given(st.lists(st.text(max_size=80), max_size=3))
def test_no_text_is_too_strange(given: list[str]) -> None:
    found = parent_of(given)
    assert found is None or given[0][3:35] == found[0]
    state = state_of(given)
    assert "\n" not in state
    assert len(state) <= 512


def test_the_state_is_passed_on_as_it_came() -> None:
    assert state_of(["a=1,b=2", "c=3"]) == "a=1,b=2,c=3"
    assert state_of([]) == state_of(["a=" + "x" * 511]) == state_of(["a=\xe9"]) == ""


@pytest.mark.parametrize(("is_sampled", "flags"), [(True, "01"), (False, "00")])
def test_what_a_leg_is_sent_is_read_alike(is_sampled: bool, flags: str) -> None:
    lines = context_lines(TRACE, PARENT, "a=1", is_sampled=is_sampled)
    assert lines == f"traceparent: 00-{TRACE}-{PARENT}-{flags}\r\ntracestate: a=1\r\n".encode()
    alone = context_lines(TRACE, PARENT, "", is_sampled=is_sampled).decode().splitlines()
    assert parent_of([alone[0].partition(": ")[2]]) == (TRACE, PARENT, is_sampled)
    assert len(alone) == 1
