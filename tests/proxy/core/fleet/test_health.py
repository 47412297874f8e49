"""What takes an instance out, what brings it back: histories as words, and laws over all of them.

`b` a probe begins, `p` one answered, `x` one failed, `r` one refused, `l` one late; `f` a
request failed, `c` nobody listened, `a` one answered; `t` a trial answered, `T` one
failed. One event per step of time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.health import (
    CALM_S,
    CONNECTS,
    FALL,
    FAULTS,
    OPEN_MAX_S,
    Change,
    Health,
    State,
)
from proxy.core.types import FailureKind

EVENTS = "bpxrlfcatT"
LETTERS = {Change.SILENT: "s", Change.OPENED: "o", Change.GONE: "g", Change.BACK: "b"}


def happen(health: Health, event: str, now_s: float) -> Change | None:
    match event:
        case "p":
            return health.probe_answered(now_s)
        case "b":
            health.probing(now_s, 2.0, 0.5)
        case "x" | "r" | "l":
            is_refused, is_late = event == "r", event == "l"
            return health.probe_failed("x", now_s, is_refused=is_refused, is_late=is_late)
        case "f" | "c":
            kind = FailureKind.CONNECT if event == "c" else FailureKind.SERVER_ERROR
            return health.failed(kind, "x", now_s)
        case "a":
            health.answered()
        case "t" if health.trial_due(now_s):
            return health.trial_answered(now_s)
        case "T" if health.trial_due(now_s):
            health.trial_failed("x", now_s)
    return None


def life(events: str, step_s: float = 0.1) -> tuple[Health, str]:
    """The state after these events, and what they changed: a letter each, or a dot."""
    health, changes = Health(was_seen=True), ""
    for i, event in enumerate(events):
        change = happen(health, event, i * step_s)
        changes += LETTERS[change] if change else "."
    return health, changes


@pytest.mark.parametrize(
    ("events", "changes", "state"),
    [
        ("", "", State.HEALTHY),
        ("x", ".", State.SUSPECT),
        ("xp", "..", State.HEALTHY),
        ("xx", ".s", State.EJECTED),
        ("xxx", ".s.", State.EJECTED),
        ("xpx", "...", State.SUSPECT),
        ("xxp", ".s.", State.PROBING),
        ("xxpp", ".s.b", State.HEALTHY),
        ("xxpx", ".s..", State.EJECTED),
        ("xxpxpp", ".s...b", State.HEALTHY),
        ("xxaaaa", ".s....", State.EJECTED),
        ("rr", ".g", State.EJECTED),
        ("xr", ".g", State.EJECTED),
        ("xxr", ".sg", State.EJECTED),
        ("rrpp", ".g.b", State.HEALTHY),
        ("cc", "..", State.SUSPECT),
        ("ccc", "..g", State.EJECTED),
        ("cacc", "....", State.SUSPECT),
        ("cpcc", "....", State.SUSPECT),
        ("cfcc", "....", State.SUSPECT),
        ("ffff", "....", State.SUSPECT),
        ("fffff", "....o", State.EJECTED),
        ("ffffaf", "......", State.SUSPECT),
        ("ffffpf", ".....o", State.EJECTED),
        ("fffffpppp", "....o....", State.EJECTED),
        ("fffffaaaa", "....o....", State.EJECTED),
        ("fffffttt", "....o...", State.EJECTED),
        ("fffffrrpp", "....o.g.b", State.HEALTHY),
        ("blbl", "...s", State.EJECTED),
        ("balbal", "......", State.HEALTHY),
        ("blabl", ".....", State.SUSPECT),
        ("balblbl", "......s", State.EJECTED),
        ("xbalx", "....s", State.EJECTED),
        ("barbar", ".....g", State.EJECTED),
        ("baxbax", ".....s", State.EJECTED),
        ("blbxa", "...s.", State.EJECTED),
    ],
)
def test_histories(events: str, changes: str, state: State) -> None:
    health, changed = life(events)
    assert (changed, health.state(len(events) * 0.1)) == (changes, state)
    assert health.is_up is (state in (State.HEALTHY, State.SUSPECT))


def test_one_never_seen_falls_at_the_first_probe_and_rises_at_the_first_answer() -> None:
    health = Health()
    assert health.failed(FailureKind.CONNECT, "refused", 0.0) is None
    assert health.is_up
    assert health.probe_failed("status 503", 0.0) is Change.SILENT
    assert (health.is_up, health.is_gone, health.last_error) == (False, True, "status 503")
    assert health.probe_answered(1.0) is Change.BACK
    assert (health.is_up, health.is_gone, health.was_seen) == (True, False, True)


def test_requests_that_died_with_it_do_not_hide_that_nobody_listens() -> None:
    health = Health(was_seen=True)
    kinds = [FailureKind.RESET, FailureKind.CONNECT, FailureKind.CONNECT, FailureKind.RESET]
    assert [health.failed(kind, "x", 0.0) for kind in kinds] == [None] * 4
    assert health.failed(FailureKind.CONNECT, "x", 0.1) is Change.GONE


def test_failures_far_apart_open_nothing() -> None:
    assert "o" not in life("f" * 20, step_s=2.6)[1]
    assert "o" in life("f" * 20, step_s=2.4)[1]
    assert "g" not in life("c" * 20, step_s=5.1)[1]


def test_an_open_breaker_is_tried_every_ten_seconds() -> None:
    """A trial costs no client anything: it serves again soon after its recovery."""
    health, _ = life("f" * FAULTS, step_s=0.0)
    now_s = 0.0
    for wait_s in (5, 10, 10, 10, 10):
        assert not health.trial_due(now_s + wait_s - 0.01)
        now_s += wait_s
        assert health.trial_due(now_s)
        assert health.state(now_s) is State.PROBING
        health.trial_failed("500", now_s)
    assert health.trial_answered(now_s + 10) is Change.BACK


def test_an_open_breaker_waits_twice_as_long_each_time_that_clients_have_paid() -> None:
    health, now_s = Health(was_seen=True), 100.0
    for wait_s in (5, 10, 20, 40, 60, 60):
        for _ in range(FAULTS):
            health.failed(FailureKind.TIMEOUT, "late", now_s)
        assert not health.trial_due(now_s + wait_s - 0.01), "it came back too shortly ago"
        now_s += wait_s
        assert health.trial_answered(now_s) is Change.BACK
        now_s += CALM_S


def test_one_that_worked_for_long_is_trusted_anew() -> None:
    health, _ = life("f" * FAULTS, step_s=0.0)
    for now_s in (5.0, 15.0, 35.0):
        health.trial_failed("500", now_s)
    assert health.trial_answered(100.0) is Change.BACK
    for _ in range(FAULTS):
        health.failed(FailureKind.TIMEOUT, "late", 200.0)
    assert health.trial_due(205.0)


def test_another_process_is_tried_at_once() -> None:
    health, _ = life("f" * FAULTS, step_s=0.0)
    health.trial_failed("500", 5.0)
    health.renew(6.0)
    assert not health.is_up
    assert health.trial_answered(6.0) is Change.BACK
    health.renew(7.0)
    assert health.is_up


def test_a_flapping_probe_moves_nothing_more_than_twice_in_ten_seconds() -> None:
    _, changes = life("xxpp" * 100, step_s=0.5)
    assert 2 <= len(changes.replace(".", "")) <= 2 * (200 / CALM_S) + 1


def test_probes_are_spread_and_hurry_where_something_begins() -> None:
    health = Health(was_seen=True)
    for u, after_s in ((0.0, 1.6), (0.5, 2.0), (1.0, 2.4)):
        health.probing(0.0, 2.0, u)
        assert not health.probe_due(after_s - 0.01)
        assert health.probe_due(after_s)
    health.probe_failed("late", 0.1)
    assert health.probe_due(0.1)
    health.probe_failed("late", 0.2)
    assert not health.probe_due(0.2), "out for good, as it seems: no hurry"
    health.probe_answered(2.5)
    assert health.probe_due(2.5)


timed = st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.0, 12.0)), max_size=60)


@given(timed)
def test_no_storm_of_changes(events: list[tuple[str, float]]) -> None:
    """At most two in ten seconds, and a third only where nobody listens any more."""
    health, now_s, moves = Health(was_seen=True), 0.0, [(-100.0, Change.BACK)]
    for event, wait_s in events:
        now_s += wait_s
        was_up = health.is_up
        change = happen(health, event, now_s)
        if was_up != health.is_up:
            assert change is not None
            moves.append((now_s, change))
        else:
            assert change in (None, Change.GONE)
    for (first_s, _), (_, _), (third_s, third) in zip(moves, moves[1:], moves[2:], strict=False):
        assert third_s - first_s >= CALM_S or third is Change.GONE


@given(timed)
def test_it_always_recovers(events: list[tuple[str, float]]) -> None:
    """Whatever was: probes and trials that are answered bring it back within a minute or so."""
    health, now_s = Health(was_seen=True), 0.0
    for event, wait_s in events:
        now_s += wait_s
        happen(health, event, now_s)
    was_open, healed_s = health.is_open, now_s
    while not health.is_up:
        now_s += 2.0
        happen(health, "p", now_s)
        happen(health, "t", now_s)
        assert now_s - healed_s <= (OPEN_MAX_S if was_open else CALM_S) + 6.0
    assert not health.is_gone
    assert not health.is_open


@given(st.text(EVENTS, max_size=40))
def test_what_it_takes(events: str) -> None:
    """Out means a run of failures came before; few requests reach one where nobody listens."""
    health = Health(was_seen=True)
    for i, event in enumerate(events):
        was_up = health.is_up
        happen(health, event, i * 0.1)
        if was_up and not health.is_up:
            before = events[: i + 1]
            probes = [e for e in before if e in "pxrl"][-FALL:]
            requests = [e for e in before if e in "fca"][-FAULTS:]
            by_probes = len(probes) == FALL and "p" not in probes
            by_requests = len(requests) == FAULTS and "a" not in requests
            by_connects = requests[-CONNECTS:] == ["c"] * CONNECTS
            assert by_probes or by_requests or by_connects


def test_a_late_probe_does_not_count_while_an_answer_goes_on() -> None:
    """A long stream brings no new answer, and shows all the same that the instance works."""
    health = Health(was_seen=True)
    for i in range(FALL + 1):
        health.probing(i, 2.0, 0.5)
        assert health.probe_failed("late", i + 1.0, is_late=True, is_heard=True) is None
    assert (health.state(9.0), health.last_error) == (State.HEALTHY, "late")
    changes = [health.probe_failed("late", 9.0 + i, is_late=True) for i in range(FALL)]
    assert changes[-1] is Change.SILENT, "the stream has ended, or hangs too"


def test_the_last_error_keeps_its_time_when_it_works_again() -> None:
    health = Health(was_seen=True)
    notes: list[Callable[[float], object]] = [
        lambda now_s: health.probe_failed("x", now_s),
        lambda now_s: health.doubted("s", FailureKind.SERVER_ERROR, "x", now_s),
        lambda now_s: health.broke("client", FailureKind.RESET, "x", now_s),
        lambda now_s: health.hollowed("s", "x", now_s, is_refusal=False),
        lambda now_s: health.refused_key("x", now_s),
        lambda now_s: health.failed(FailureKind.RESET, "x", now_s),
        lambda now_s: health.trial_failed("x", now_s),
    ]
    for i, note in enumerate(notes):
        note(1.0 + i)
        assert health.last_error_s == 1.0 + i
    health.trial_answered(20.0)
    health.answered()
    health.probe_answered(20.0)
    assert (health.state(20.0), health.last_error) == (State.HEALTHY, "x")
    assert health.last_error_s == 7.0


def test_one_that_rests_is_not_blamed_for_what_it_does_not_answer() -> None:
    health = Health(was_seen=True, rest=State.PAUSED)
    for i in range(FAULTS):
        assert health.failed(FailureKind.TIMEOUT, "no first event", i * 0.1) is None
    health.rest = None
    assert health.state(1.0) is State.HEALTHY
