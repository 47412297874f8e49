"""The schedule: when requests are due, in what order, and what a failure takes with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.schedule import Pace, PaceRules, check_order, units
from replayer.trace.loaders import TraceRequest
from replayer.trace.rows import TraceError


def request(name, arrival_s=None, *, session=None, waits=(), delay_s=None, parent=None):
    return TraceRequest(
        request_id=name,
        session_id=session,
        turn=0,
        arrival_s=arrival_s,
        input_tokens=1,
        output_tokens=1,
        runs=((0, 1),),
        block_tokens=1,
        line=1,
        wait_for=tuple(waits),
        delay_s=delay_s,
        parent_session_id=parent,
    )


def names(due):
    return [(one.request.request_id, one.intended_s) for one in due]


def test_open_loop_follows_timestamps_over_the_speedup():
    pace = Pace([request("b", 4.0), request("a", 2.0)], PaceRules(speedup=2.0))
    assert pace.next_due_s() == 1.0
    assert names(pace.take_due(1.5)) == [("a", 1.0)]
    assert names(pace.take_due(9.0)) == [("b", 2.0)]


@pytest.mark.parametrize(
    ("arrival_s", "delay_s", "end_s", "due_s"),
    [(9.0, 2.0, 3.0, 9.0), (4.0, 2.0, 3.0, 5.0), (None, 2.0, 3.0, 5.0), (4.0, None, 6.0, 6.0)],
)
def test_a_dependent_turn_waits_for_its_timestamp_and_for_the_delay(
    arrival_s, delay_s, end_s, due_s
):
    rows = [request("a", 0.0), request("b", arrival_s, waits=["a"], delay_s=delay_s)]
    pace = Pace(rows, PaceRules())
    assert names(pace.take_due(100.0)) == [("a", 0.0)]
    pace.finish("a", end_s, ok=True)
    assert names(pace.take_due(100.0)) == [("b", due_s)]


def test_a_think_cap_replaces_the_timestamp_that_contains_the_pause():
    rows = [request("a", 0.0), request("b", 5000.0, waits=["a"], delay_s=4990.0)]
    pace = Pace(rows, PaceRules(think_cap_s=8.0, speedup=2.0))
    pace.take_due(0.0)
    pace.finish("a", 3.0, ok=True)
    assert pace.next_due_s() == 7.0


def test_a_join_waits_for_the_last_of_its_dependencies():
    rows = [request("a", 0.0), request("b", 0.0), request("c", waits=["a", "b"], delay_s=1.0)]
    pace = Pace(rows, PaceRules())
    pace.take_due(0.0)
    pace.finish("b", 7.0, ok=True)
    assert pace.next_due_s() is None
    pace.finish("a", 3.0, ok=True)
    assert pace.next_due_s() == 8.0


def test_dependencies_outside_the_selection_count_as_met():
    pace = Pace([request("b", 1.0, waits=["gone"])], PaceRules())
    assert names(pace.take_due(1.0)) == [("b", 1.0)]


def test_a_failure_skips_everything_behind_it_once():
    rows = [
        request("a", 0.0),
        request("b", waits=["a"]),
        request("c", waits=["a", "b"]),
        request("other", 0.0),
    ]
    pace = Pace(rows, PaceRules())
    pace.take_due(0.0)
    assert [r.request_id for r in pace.finish("a", 1.0, ok=False)] == ["b", "c"]
    assert not pace.finished
    assert pace.finish("other", 1.0, ok=True) == []
    assert pace.finished


def test_slots_run_whole_sessions_one_after_another_and_ignore_timestamps():
    rows = [
        request("x:0", 0.0, session="x"),
        request("y:0", 1.0, session="y"),
        request("x:1", 900.0, session="x", waits=["x:0"], delay_s=2.0),
    ]
    pace = Pace(rows, PaceRules(slots=1))
    assert names(pace.take_due(1e9)) == [("x:0", 0.0)]
    pace.finish("x:0", 5.0, ok=True)
    assert names(pace.take_due(1e9)) == [("x:1", 7.0)]
    pace.finish("x:1", 8.0, ok=True)
    assert names(pace.take_due(1e9)) == [("y:0", 8.0)]


def test_slots_begin_spread_over_the_ramp():
    rows = [request(f"{name}:0", session=name) for name in "wxyz"]
    pace = Pace(rows, PaceRules(slots=3, speedup=2.0, ramp_s=12.0))
    assert names(pace.take_due(1e9)) == [("w:0", 0.0), ("x:0", 2.0), ("y:0", 4.0)]
    pace.finish("x:0", 3.0, ok=True)
    assert names(pace.take_due(1e9)) == [("z:0", 3.0)]


def test_a_failed_session_frees_its_slot():
    rows = [
        request("x:0", session="x"),
        request("x:1", session="x", waits=["x:0"]),
        request("y:0", session="y"),
    ]
    pace = Pace(rows, PaceRules(slots=1))
    pace.take_due(0.0)
    assert len(pace.finish("x:0", 5.0, ok=False)) == 1
    assert names(pace.take_due(9.0)) == [("y:0", 5.0)]


def test_a_unit_is_a_session_with_its_sub_agents_and_what_they_wait_for():
    rows = [
        request("a:0", session="a"),
        request("b:0", session="b"),
        request("a/1:0", session="a/1", parent="a"),
        request("c:0", session="c", waits=["b:0"]),
        request("lone"),
    ]
    assert units(rows) == [0, 1, 0, 1, 2]


def test_circles_are_refused():
    rows = [request("a", waits=["b"]), request("b", waits=["a"])]
    with pytest.raises(TraceError, match="must not form a circle"):
        check_order(rows)


@st.composite
def traces(draw):
    rows: list[TraceRequest] = []
    for index in range(draw(st.integers(1, 12))):
        earlier = [row.request_id for row in rows]
        waits = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=2)) if earlier else []
        arrival_s = draw(st.one_of(st.none(), st.floats(0, 50)))
        session = draw(st.sampled_from([None, "s", "t"]))
        delay_s = draw(st.one_of(st.none(), st.floats(0, 9)))
        rows.append(request(f"r{index}", arrival_s, session=session, waits=waits, delay_s=delay_s))
    return rows


@given(
    traces(),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([1.0, 7.0]),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_every_request_ends_once_and_never_starts_before_its_dependencies(
    rows, slots, speedup, fortunes
):
    pace = Pace(rows, PaceRules(slots=slots, speedup=speedup))
    ends: dict[str, float] = {}
    skipped: list[str] = []
    now_s, fortune = 0.0, iter(fortunes)
    while not pace.finished:
        due_s = pace.next_due_s()
        assert due_s is not None
        now_s = max(now_s, due_s)
        for due in pace.take_due(now_s):
            one = due.request
            for other in one.wait_for:
                assert due.intended_s >= ends[other] + (one.delay_s or 0.0) / speedup
            if slots is None and one.arrival_s is not None:
                assert due.intended_s >= one.arrival_s / speedup
            ends[one.request_id] = now_s + 1.0
            gone = pace.finish(one.request_id, now_s + 1.0, ok=next(fortune))
            skipped += [other.request_id for other in gone]
    assert sorted([*ends, *skipped]) == sorted(row.request_id for row in rows)
