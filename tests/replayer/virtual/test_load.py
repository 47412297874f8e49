"""A trace as units of turns, and units as load: sessions, shared blocks, copies, ties, horizon."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.latency.slo import Slo
from replayer.trace.loaders import TraceRequest
from replayer.trace.rows import TraceError
from replayer.virtual.arrivals import LoadRules, Planned, SlotRules, plan, plan_slots
from replayer.virtual.load import LeftOut, Source, as_source, chains, load_source, servable
from tests.support.traces import GOOD, write


def _request(name: str, ids: range | list[int], **values: Any) -> TraceRequest:
    runs = tuple((i, 1) for i in ids)
    tokens = 10 * len(runs)
    defaults: dict[str, Any] = {
        "request_id": name,
        "session_id": name.partition(":")[0],
        "turn": 0,
        "arrival_s": 0.0,
        "input_tokens": tokens,
        "output_tokens": 5,
        "runs": runs,
        "block_tokens": 10,
        "line": 1,
    }
    return TraceRequest(**{**defaults, **values})


TWO_SESSIONS = [
    _request("a:0", [1, 2, 11, 12]),
    _request("a:1", [1, 2, 11, 12, 13], wait_for=("a:0",), delay_s=7.0, arrival_s=9.0),
    _request("b:0", [1, 2, 21]),
    _request("b:1", [1, 2, 21, 22, 23], wait_for=("b:0",), arrival_s=5.0),
]


def test_units_know_what_is_shared_and_what_is_new() -> None:
    source = as_source(TWO_SESSIONS)
    a, b = source.units
    assert [turn.shared for turn in (*a, *b)] == [2, 2, 2, 2]
    # Common blocks are cached already, before the first session that has them.
    assert [turn.new_tokens for turn in (*a, *b)] == [20, 10, 10, 20]
    assert a[1].wait_for == (0,)
    assert a[1].delay_s == 7.0
    assert source.replicable
    assert source.longest_tokens == 55


def test_a_gap_without_a_delay_is_think_time_after_a_nominal_service() -> None:
    b = as_source(TWO_SESSIONS).units[1]
    assert b[1].delay_s == pytest.approx(5.0 - 0.1 - 5 * 0.01)


def test_coarse_blocks_take_the_name_of_their_last_part() -> None:
    a, b = as_source(TWO_SESSIONS, block_tokens=20).units
    assert [len(turn.blocks) for turn in (*a, *b)] == [2, 2, 1, 2]
    assert a[0].blocks == a[1].blocks
    assert a[0].blocks[0] == b[0].blocks[0]
    assert a[0].blocks[1] != b[1].blocks[1]


def test_rows_without_sessions_continue_the_row_they_extend() -> None:
    rows = [(1, 2, 3), (1, 9), (1, 2, 3, 4), (1, 2, 3), (1, 9, 5, 6), (1,)]
    assert chains(rows) == [0, 1, 0, 3, 1, 5]


def _mooncake(count: int, tick_s: float) -> Source:
    rows = [
        _request(f"line:{n}", [0, 100 + n], session_id=None, arrival_s=tick_s * (n // 5))
        for n in range(count)
    ]
    return as_source(rows)


def test_a_coarse_clock_is_seen_and_spread() -> None:
    source = _mooncake(50, 3.0)
    assert not source.replicable
    assert source.tick_s == pytest.approx(3.0)
    planned = plan(source, LoadRules(rate=len(source.units) / 27.0, horizon_s=27.0))
    starts = [one.earliest_s for one in planned]
    assert len(set(starts)) == len(starts) > 40
    assert all(abs(s - 3.0 * (n // 5)) <= 3.0 for n, s in enumerate(starts))


def test_twice_the_rate_is_half_the_time() -> None:
    source = _mooncake(50, 3.0)
    slow = plan(source, LoadRules(rate=1.0, horizon_s=40.0))
    fast = plan(source, LoadRules(rate=2.0, horizon_s=20.0))
    slow_s = {one.session_id: one.earliest_s for one in slow}
    both = [one for one in fast if one.session_id in slow_s]
    assert len(both) > 30
    for one in both:
        assert slow_s[one.session_id] == pytest.approx(2 * one.earliest_s)


@settings(max_examples=30)
@given(rate=st.floats(0.5, 20.0), horizon_s=st.floats(20.0, 300.0), seed=st.integers(0, 5))
def test_a_trace_that_ends_goes_on_with_fresh_copies(
    rate: float, horizon_s: float, seed: int
) -> None:
    source = _mooncake(50, 3.0)
    planned = plan(source, LoadRules(rate, horizon_s, seed))
    starts = sorted(one.earliest_s for one in planned)
    # One request per unit, and 2 s of service at the least before the horizon.
    assert len(planned) == pytest.approx(rate * (horizon_s - 2.3), rel=0.1, abs=20)
    assert starts[-1] > 0.5 * horizon_s
    assert len({one.session_id for one in planned}) == len(planned)
    private = [block for one in planned for block in one.hashes()[1:]]
    assert len(set(private)) == len(private)


def test_a_copy_shares_within_itself_what_the_trace_shares() -> None:
    source = _mooncake(50, 3.0)
    first: dict[int, set[int]] = {}
    for one in plan(source, LoadRules(rate=5.0, horizon_s=60.0)):
        first.setdefault(one.salt, set()).add(one.hashes()[0])
    assert len(first) > 2
    assert all(len(blocks) == 1 for blocks in first.values())
    assert len(set.union(*first.values())) == len(first)


def test_a_trace_without_times_starts_at_random() -> None:
    rows = [_request(f"r{n}", [n], session_id=None, arrival_s=None) for n in range(20)]
    planned = plan(as_source(rows), LoadRules(rate=2.0, horizon_s=200.0))
    assert len(planned) == pytest.approx(400, abs=10)
    starts = sorted(one.earliest_s for one in planned)
    gaps = [b - a for a, b in pairwise(starts)]
    mean = math.fsum(gaps) / len(gaps)
    spread = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
    assert spread == pytest.approx(1.0, rel=0.3)


def test_what_cannot_be_served_is_left_out_with_what_waits_for_it() -> None:
    kept, left_out = servable(TWO_SESSIONS, lambda prompt, output: prompt + output < 45)
    assert [one.request_id for one in kept] == ["b:0"]
    assert left_out == LeftOut(3, 2, 40)
    assert servable(TWO_SESSIONS, None) == (TWO_SESSIONS, LeftOut())


def test_a_trace_of_which_nothing_can_be_served_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD)
    with pytest.raises(TraceError, match="the shortest has 5 tokens"):
        load_source(path, serves=lambda _prompt, _output: False)


def test_bursts_gather_the_rows_of_a_trace_without_sessions() -> None:
    source = _mooncake(500, 3.0)
    rules = LoadRules(rate=1.0, horizon_s=300.0)
    calm, bursty = plan(source, rules), plan(source, replace(rules, burst=10.0))
    assert {len(calm), len(bursty)} <= set(range(280, 320))
    assert len({one.earliest_s for one in bursty}) < len({one.earliest_s for one in calm})


RULES = LoadRules(rate=0.5, horizon_s=200.0, think_cap_s=4.0)


def _copies(rules: LoadRules = RULES) -> list[Planned]:
    return plan(as_source(TWO_SESSIONS), rules)


def test_copies_share_the_common_blocks_only() -> None:
    planned = _copies()
    hashes = [set(one.hashes()) for one in planned if one.turn.wait_for == ()]
    common = set.intersection(*hashes)
    assert len(common) == 2
    private = [block for part in hashes for block in part - common]
    assert len(private) == len(set(private))


def test_equal_seeds_give_equal_loads_and_others_as_many_sessions() -> None:
    assert _copies() == _copies()
    other = _copies(replace(RULES, seed=1))
    assert other != _copies()
    sessions = {one.session_id.partition("#")[2] for one in other}
    assert len(sessions) <= 100


def test_dependent_turns_come_after_what_they_wait_for() -> None:
    planned = _copies()
    assert any(one.wait_for for one in planned)
    for index, one in enumerate(planned):
        assert all(other < index for other in one.wait_for)
        assert all(planned[other].session_id == one.session_id for other in one.wait_for)
        assert one.delay_s <= 4.0


def test_the_load_ends_with_what_is_due_at_the_horizon() -> None:
    planned = _copies()
    slo = Slo()
    for one in planned:
        least = slo.ttft_limit_s(one.turn.new_tokens) + slo.tpot_s * one.turn.output_tokens
        assert one.earliest_s + least <= one.due_s + 1e-9
        assert one.due_s <= 200.0


def test_bursts_have_the_variance_asked_for() -> None:
    def spread(burst: float) -> float:
        planned = _copies(LoadRules(rate=20.0, horizon_s=200.0, burst=burst))
        starts = [one.earliest_s for one in planned if not one.wait_for]
        gaps = [b - a for a, b in pairwise(starts)]
        mean = math.fsum(gaps) / len(gaps)
        return math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert spread(1.0) == pytest.approx(1.0, rel=0.15)
    assert spread(10.0) == pytest.approx(10.0, rel=0.25)


@given(slots=st.integers(1, 5), units=st.integers(0, 12), seed=st.integers(0, 3))
def test_a_slot_runs_one_session_after_another(slots: int, units: int, seed: int) -> None:
    planned = plan_slots(as_source(TWO_SESSIONS), SlotRules(slots, units, seed, think_cap_s=4.0))
    numbers = [int(one.session_id.partition("#")[2]) for one in planned]
    assert set(numbers) == set(range(units))
    assert len({one.salt for one in planned}) == units
    for index, one in enumerate(planned):
        before = {numbers[other] for other in one.wait_for}
        if one.turn.wait_for:
            assert before == {numbers[index]}
        else:
            # A slot's first session starts by itself, a later one when the one before has ended.
            assert before == {numbers[index] - slots} & set(range(units))
            assert all(other in one.wait_for for other in _requests_of(numbers, before))
        assert one.earliest_s == 0.0 or (not one.wait_for and one.earliest_s <= 10.0)
        assert one.delay_s <= 4.0


def _requests_of(numbers: list[int], units: set[int]) -> list[int]:
    return [index for index, number in enumerate(numbers) if number in units]


def test_a_closed_loop_is_the_same_for_equal_seeds_only() -> None:
    source = as_source(TWO_SESSIONS)
    load, same, other = (plan_slots(source, SlotRules(2, 6, seed)) for seed in (1, 1, 2))
    assert load == same != other
