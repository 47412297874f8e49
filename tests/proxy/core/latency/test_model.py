"""The model of time: what it learns, what it does not let itself be told, who is occupied."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.latency.model import (
    STEP_PRIOR_S,
    WAY_PRIOR_S,
    WAY_PRIOR_S_PER_TOKEN,
    Latency,
    Measured,
    Times,
)
from proxy.core.latency.regression import CLIP, WINDOW, OnlineRegression
from tests.support.scenes import latency_of

PT = 20_000.0
NAMES = ("a", "b", "one more", *(f"i{i}" for i in range(8)))


def model() -> Latency:
    return latency_of(NAMES, PT)


def prefilled(
    m: Latency,
    times: Times,
    new: int,
    context: int,
    seconds: float,
    step_s: float = 0.0,
    *,
    first: bool = True,
) -> Measured | None:
    """A prefill was measured, the way to the engine included if `first`, and told at once."""
    way_s = WAY_PRIOR_S + WAY_PRIOR_S_PER_TOKEN * (new + context) if first else 0.0
    seen = times.measured(new + context, new, way_s + seconds, step_s, saw_way=first)
    if seen is not None:
        m.told(seen, new, context)
    return seen


def test_priors_are_the_flags() -> None:
    m = model()
    assert m.prefill_s("a", 8192, 0, 0, 0) == pytest.approx(8192 / 20_000)
    assert m.prefill_tps("a") == pytest.approx(PT)
    assert m.transfer_s("a", "b", 30_000) == pytest.approx(0.5)
    assert m.step_s("a", 0) == STEP_PRIOR_S
    assert m.wait_s("a", 0.0) == 0.0


def test_prefill_beside_streams_pays_the_step_under_way_and_one_per_chunk() -> None:
    m = model()
    alone = m.prefill_s("a", 16_384, 0, 0, 0)
    assert m.prefill_s("a", 16_384, 0, 4, 50_000) == pytest.approx(alone + 2.5 * STEP_PRIOR_S)
    assert m.of("a").pace().share_s(16_384, 0, 4, 50_000) == pytest.approx(alone + 2 * STEP_PRIOR_S)
    assert m.of("a").pace().share_s(2048, 0, 4, 50_000) < m.prefill_s("a", 2048, 0, 4, 50_000)


def test_behind_another_a_prefill_begins_with_the_next_step() -> None:
    """Who finds one before it waits for the end of that, not for a step under way as well."""
    m = model()
    m.reserve_prefill(m.of("a"), 1, 1.0, 0.0)
    alone = m.prefill_s("a", 16_384, 0, 0, 0)
    assert m.prefill_s("a", 16_384, 0, 4, 50_000) == pytest.approx(alone + 2 * STEP_PRIOR_S)


def test_what_others_may_use_of_a_prefill_s_steps_is_not_busy() -> None:
    """A queue ends when the steps do; how busy an instance is goes by what it computes."""
    m = model()
    m.reserve_prefill(m.of("a"), 1, 3.0, 0.0, 1.0)
    m.reserve_prefill(m.of("b"), 2, 1.0, 0.0)
    assert m.wait_s("a", 0.0) == 3.0
    assert m.of("a").pace().lately(30.0) == pytest.approx(m.of("b").pace().lately(30.0))
    busy, per_s = m.of("a").pace().lately(0.0)
    assert busy == pytest.approx(per_s), "one prefill of one second"


def test_a_prefill_that_was_refused_kept_nobody_busy() -> None:
    """A prompt that no engine serves is predicted to take minutes, and refused at once."""
    m = model()
    was, rest_s = m.of("a").pace().lately(0.0)[0], m.rest_s()
    for i in range(20):
        m.reserve_prefill(m.of("a"), i, 160.0, i / 10)
        assert m.of("a").pace().busy_ratio(i / 10) > 1, "as long as it may be computed it counts"
        m.end_prefill(m.of("a"), i, i / 10 + 0.001)
    assert m.of("a").pace().busy_ratio(2.0) == pytest.approx(was, abs=0.001)
    assert m.rest_s() <= rest_s


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 200), st.floats(0, 20)), max_size=40))
def test_no_more_time_is_busy_than_has_passed(steps: list[tuple[int, float, float]]) -> None:
    """Whatever is reserved, and ended whenever: what is over counts for no longer than it ran."""
    m, now_s, ran_s, since = model(), 0.0, 0.0, dict[int, float]()
    times = m.of("a")
    for key, work_s, pause_s in steps:
        now_s += pause_s
        if key in since:
            ran_s += now_s - since.pop(key)
            m.end_prefill(times, key, now_s)
        else:
            since[key] = now_s
            m.reserve_prefill(times, key, work_s, now_s)
    for key, begun_s in since.items():
        ran_s += now_s - begun_s
        m.end_prefill(times, key, now_s)
    assert -1e-9 <= times.recent_s <= ran_s + 1e-6
    assert times.spent_s(0, now_s) == 0.0, "nothing is kept of what is over"


def test_short_prompts_in_shared_steps_teach_what_they_took_not_the_steps() -> None:
    """Several to a step of 60 ms, ten times what one takes: as on an engine with 200 streams."""
    m, draw, a1, step_s = model(), random.Random(2), 4e-5, 0.06
    for _ in range(6 * WINDOW):
        batch = [draw.randint(50, 2000) for _ in range(draw.randint(1, 4))]
        together_s = step_s + a1 * sum(batch)
        seconds = m.way_s(batch[0]) + draw.uniform(0.0, step_s) + together_s
        a = m.of("a")
        seen = a.measured(batch[0], batch[0], seconds, step_s, saw_way=True)
        assert seen is not None
        for new in batch[1:]:
            assert a.measured(new, new, 0.0, step_s, saw_way=False) is seen
        for new in batch:
            m.told(seen, new, 0)
    assert m.prefill_s("a", 8192, 0, 0, 0) == pytest.approx(a1 * 8192, rel=0.2)


@pytest.mark.parametrize(("a1", "a4"), [(1 / 20_000, 0.0), (1 / 8_000, 0.0), (4e-5, 8e-10)])
def test_learns_an_instances_own_rates(a1: float, a4: float) -> None:
    """Within a few percent after a window of prefills, with noise and a stall now and then."""
    m, draw = model(), random.Random(1)
    for i in range(6 * WINDOW):
        new, context = draw.randint(500, 30_000), draw.randint(0, 60_000)
        true_s = a1 * new + a4 * new * (context + new / 2)
        noisy = true_s * draw.uniform(0.95, 1.05) * (30 if i % 40 == 7 else 1)
        prefilled(m, m.of("a"), new, context, noisy)
    for new, context in ((2000, 0), (20_000, 10_000), (10_000, 60_000)):
        true_s = a1 * new + a4 * new * (context + new / 2)
        assert m.prefill_s("a", new, context, 0, 0) == pytest.approx(true_s, rel=0.15)


@pytest.mark.parametrize("true_tps", [5_000.0, 20_000.0, 80_000.0])
def test_flags_that_are_far_off_are_set_right_by_the_fleet(true_tps: float) -> None:
    """Eight instances, a few prompts each: none has seen enough, all together have."""
    m, draw, names = model(), random.Random(3), [f"i{i}" for i in range(8)]
    for _ in range(12):
        for name in names:
            new = draw.randint(500, 30_000)
            prefilled(m, m.of(name), new, 0, new / true_tps)
            m.observe_step(m.of(name), 50_000, 0.040)
    for name in (*names, "one more"):
        whole_s = m.way_s(8192) + m.prefill_s(name, 8192, 0, 0, 0)
        assert whole_s == pytest.approx(0.005 + 8192 / true_tps, rel=0.2)
        assert m.step_s(name, 50_000) == pytest.approx(0.040, rel=0.15)


def test_an_instance_that_is_slower_than_the_fleet_stays_so() -> None:
    m, draw, names = model(), random.Random(4), [f"i{i}" for i in range(8)]
    for _ in range(WINDOW):
        for name in names:
            new = draw.randint(500, 30_000)
            prefilled(m, m.of(name), new, 0, new / (PT / 2 if name == "i0" else PT))
    assert m.prefill_tps("i0") == pytest.approx(PT / 2, rel=0.1)
    assert m.prefill_tps("i1") == pytest.approx(PT, rel=0.1)
    m._by_name.keep_times("i0", model().of("i1"))
    assert m.prefill_tps("i0") == pytest.approx(PT, rel=0.2), "it came back: as the fleet is"


def test_prompts_of_steps_of_their_own_are_not_taken_for_one() -> None:
    """Four times quicker than the flags say: each fills its steps, none can have joined another."""
    m = latency_of("a", PT / 4)
    prefilled(m, m.of("a"), 8192, 0, 8192 / PT)
    for _ in range(12):
        prefilled(m, m.of("a"), 8192, 0, 8192 / PT, first=False)
    assert m.prefill_tps("a") > PT / 2


def test_what_engine_says_it_computed_is_learned_not_what_was_predicted() -> None:
    """Half of the prompts were thought cached but were not: a model that believes it is far off."""
    m, draw = model(), random.Random(5)
    for at in range(4 * WINDOW):
        new = draw.randint(5_000, 60_000)
        expected = new if at % 2 else 500
        seconds = m.way_s(new) + new / PT
        seen = m.of("a").measured(new, expected, seconds, 0.0, saw_way=True)
        assert seen is not None
        m.told(seen, new, 0)
    for new in (5_000, 30_000, 60_000):
        assert m.prefill_s("a", new, 0, 0, 0) == pytest.approx(new / PT, rel=0.05)


def test_one_that_shares_a_step_with_one_already_told_is_not_learned() -> None:
    m = model()
    a = m.of("a")
    assert prefilled(m, a, 100, 0, 0.05) is not None
    before = a.prefill._s
    assert a.measured(100, 100, 0.0, 0.01, saw_way=False) is None
    assert a.prefill._s == before


class TestWay:
    """Constant and per token of the prompt, beside a prefill without a quadratic part."""

    @pytest.mark.parametrize(("w0", "w1"), [(0.03, 0.0), (0.004, 1e-6), (0.06, 5e-7)])
    def test_is_learned_apart_from_the_prefill(self, w0: float, w1: float) -> None:
        """Turns of some hundred new tokens after long contexts, and long prompts now and then."""
        m, draw = model(), random.Random(6)
        for at in range(6 * WINDOW):
            new = draw.randint(100, 2000) if at % 8 else draw.randint(10_000, 100_000)
            context = draw.randint(20_000, 120_000) if at % 8 else 0
            seconds = w0 + w1 * (new + context) + new / PT * draw.uniform(0.97, 1.03)
            seen = m.of("a").measured(new + context, new, seconds, 0.0, saw_way=True)
            assert seen is not None
            m.told(seen, new, context)
        for new, context in ((500, 60_000), (1000, 20_000), (100_000, 0), (30_000, 30_000)):
            true_s = w0 + w1 * (new + context) + new / PT
            predicted_s = m.way_s(new + context) + m.prefill_s("a", new, context, 0, 0)
            assert predicted_s == pytest.approx(true_s, rel=0.1)

    def test_behind_another_prompt_it_passes_unseen(self) -> None:
        m = model()
        before = m.way_s(1000)
        for _ in range(20):
            prefilled(m, m.of("a"), 20_000, 0, 1.5, first=False)
        assert m.way_s(1000) == pytest.approx(before)

    def test_a_prefill_does_not_begin_before_it_is_over(self) -> None:
        m = model()
        m.reserve_prefill(m.of("a"), 1, 2.0, 0.0, way_s=0.5)
        assert m.wait_s("a", 0.0) == 2.5
        m.reserve_prefill(m.of("a"), 2, 1.0, 0.0, way_s=0.5)
        assert m.wait_s("a", 0.0) == 3.5


def test_one_stall_moves_nothing_much() -> None:
    m = model()
    for _ in range(WINDOW):
        prefilled(m, m.of("a"), 8192, 0, 8192 / PT)
    prefilled(m, m.of("a"), 8192, 0, 1000.0)
    assert m.prefill_s("a", 8192, 0, 0, 0) < 1.1 * 8192 / PT


@given(
    st.lists(
        st.tuples(st.integers(1, 200_000), st.integers(0, 500_000), st.floats(1e-6, 1e4)),
        max_size=40,
    )
)
def test_never_negative_never_shrinking(observed: list[tuple[int, int, float]]) -> None:
    """Whatever is observed: more tokens never take less time, and every time is positive."""
    m = model()
    for new, context, seconds in observed:
        prefilled(m, m.of("a"), new, context, seconds)
        m.observe_transfer("a", "b", new, seconds)
    times = [m.prefill_s("a", n, 0, 0, 0) for n in (1, 100, 10_000, 100_000)]
    assert times == sorted(times)
    assert times[-1] > 0
    moved = [m.transfer_s("a", "b", n) for n in (0, 1000, 100_000)]
    assert moved == sorted(moved)
    assert min(moved) >= 0


def test_a_line_fades_what_is_old() -> None:
    line = OnlineRegression(1.0, 0.0, ((1.0, 0.0, 4.0),))
    for _ in range(4 * WINDOW):
        line.observe(1.0, 0.0, 2.0)
    assert line.at(1.0, 0.0) == pytest.approx(2.0, rel=0.02)
    line.observe(1.0, 0.0, 0.0)
    assert line.at(1.0, 0.0) > 0, "an impossible time is not taken in"
    assert CLIP > 1


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.001, 100.0)), max_size=20))
def test_what_was_learned_goes_on_in_another(observed: list[tuple[int, float]]) -> None:
    one, two, faster = model(), model(), latency_of("a", 40_000.0)
    for tokens, seconds in observed:
        prefilled(one, one.of("a"), tokens, 0, seconds)
        one.observe_step(one.of("a"), tokens, seconds)
    legacy = one.legacy("a")
    two.adopt("a", legacy)
    before = faster.prefill_s("a", 1000, 0, 1, 1000)
    faster.adopt("a", legacy)
    if observed:
        assert two.prefill_s("a", 1000, 0, 1, 1000) == one.prefill_s("a", 1000, 0, 1, 1000)
    assert two.legacy("a") == legacy
    assert faster.of("a").prefill.legacy() != legacy[0], "sums are in units of the options"
    assert faster.prefill_s("a", 1000, 0, 0, 0) < before


@pytest.mark.parametrize("legacy", [[], [[1.0], [2.0]], [[float("nan")] * 9] * 2, [[-1.0] * 9] * 2])
def test_a_legacy_that_is_none_changes_nothing(legacy: list[list[float]]) -> None:
    m = model()
    if len(legacy) < 2 or len(legacy[0]) < 9:
        with pytest.raises(ValueError, match="unpack"):
            m.adopt("a", legacy)
    else:
        m.adopt("a", legacy)
    assert m.legacy("a") == model().legacy("a")


class TestOccupation:
    def test_decays_with_the_clock(self) -> None:
        m = model()
        m.reserve_prefill(m.of("a"), 1, 2.0, now_s=10.0)
        m.reserve_prefill(m.of("a"), 2, 1.0, now_s=10.5)
        assert m.wait_s("a", 10.5) == pytest.approx(2.5)
        assert m.wait_s("a", 12.0) == pytest.approx(1.0)
        assert m.wait_s("a", 20.0) == 0.0

    def test_an_early_end_frees_the_instance(self) -> None:
        m = model()
        m.reserve_prefill(m.of("a"), 1, 5.0, 0.0)
        m.reserve_prefill(m.of("a"), 2, 1.0, 0.0)
        assert not m.of("a").end_prefill(1, 0.5), "another is pending"
        assert m.wait_s("a", 0.5) == pytest.approx(1.0)
        assert m.of("a").end_prefill(2, 0.7)
        assert m.wait_s("a", 0.7) == 0.0

    def test_ending_twice_or_something_unknown_changes_nothing(self) -> None:
        m = model()
        m.reserve_prefill(m.of("a"), 1, 5.0, 0.0)
        assert m.of("a").end_prefill(99, 0.1) is None
        assert m.of("b").end_prefill(1, 0.1) is None
        assert m.of("a").end_prefill(1, 0.2) is not None
        assert not m.of("a").end_prefill(1, 0.3)

    def test_what_is_seen_of_one_that_left_teaches_the_fleet_only(self) -> None:
        states = InstanceStates()
        states.add("a")
        m = Latency(PT, 0.5, 8192, states)
        left = m.of("a")
        m.reserve_prefill(left, 1, 5.0, 0.0)
        states.add("a")
        assert m.wait_s("a", 0.0) == 0.0
        before = m.of("a").prefill._s
        for _ in range(WINDOW):
            prefilled(m, left, 8192, 0, 2 * 8192 / PT)
        assert left.end_prefill(1, 0.0) is not None
        assert m.of("a").prefill._s == before
        assert m.prefill_tps("a") == pytest.approx(PT / 2, rel=0.25), "as the fleet is"

    def test_of_a_pair_nothing_is_kept_once_one_of_it_has_left(self) -> None:
        states = InstanceStates()
        for name in "abc":
            states.add(name)
        m = Latency(PT, 0.5, 8192, states)
        states.on_dropped = lambda state: m.drop_pairs(state.name)
        for _ in range(20):
            m.observe_transfer("a", "b", 30_000, 9.0)
            m.observe_transfer("b", "c", 30_000, 1.0)
        far, near = m.transfer_s("a", "b", 30_000), m.transfer_s("b", "c", 30_000)
        assert far > 2 * near
        states.remove("a")
        m.observe_transfer("a", "b", 30_000, 9.0)
        assert list(m._pairs) == [("b", "c")]
        assert m.transfer_s("b", "c", 30_000) == near


class TestBounds:
    """When something predicted is late."""

    def test_until_something_was_seen_it_is_twice_the_prediction(self) -> None:
        m = model()
        assert m.prefill_bound_s("a", 3.0) == 6.0
        assert m.transfer_bound_s("a", "b", 3.0) == 6.0
        assert m.ttft_bound_s(3.0) == 6.0

    def test_the_95th_of_what_was_seen_on_that_instance(self) -> None:
        m = model()
        m.reserve_prefill(m.of("a"), 1, 1.0, 0.0)
        for i in range(100):
            m.of("a").ready.observe(2.0, 2.0 + 0.02 * i)
        assert m.prefill_bound_s("a", 1.0) == pytest.approx(1.95)
        assert m.prefill_bound_s("b", 1.0) == 2.0, "nothing of it is b's"

    def test_of_a_pair_and_of_the_fleet(self) -> None:
        m = model()
        for _ in range(20):
            expected = m.transfer_s("a", "b", 30_000)
            m.observe_transfer("a", "b", 30_000, 1.5 * expected)
            m.observe_ttft(1.0, 4.0)
        assert m.transfer_bound_s("a", "b", 1.0) == pytest.approx(1.5)
        assert m.ttft_bound_s(0.5) == pytest.approx(2.0)

    def test_one_that_is_not_there_is_not_brought_back(self) -> None:
        m = model()
        m.of("gone").ready.observe(1.0, 9.0)
        assert m.prefill_bound_s("gone", 1.0) == 2.0
        assert m.wait_s("gone", 0.0) == 0.0
        assert not m._by_name.is_kept("gone")
