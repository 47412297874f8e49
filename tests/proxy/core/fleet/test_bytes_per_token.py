"""Bytes per token are learned, and nobody's reports but the fleet's as a whole move them far."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.accounts.instances import InstanceStates
from proxy.core.fleet.bytes_per_token import (
    LEAST_RATIO,
    MOST_MEDIA_TOKENS,
    MOST_RATIO,
    BytesPerToken,
)
from proxy.core.types import BYTES_PER_TOKEN_PRIOR, MEDIA_PRIOR
from tests.support.examples import examples

reports = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)), max_size=20)


def fleet_of(*names: str) -> BytesPerToken:
    """The ratios of a fleet of these instances."""
    states = InstanceStates()
    for name in names:
        states.add(name)
    return BytesPerToken(states)


def test_the_first_answer_replaces_the_prior_and_later_ones_move_it() -> None:
    ratios = fleet_of("a")
    ratios.learn("m", "a", 30_000, 10_000)
    assert ratios.of("m") == pytest.approx(3.0)
    ratios.learn("m", "a", 40_000, 10_000)
    assert 3.0 < ratios.of("m") < 4.0
    assert ratios.of("other") == BYTES_PER_TOKEN_PRIOR


@pytest.mark.parametrize(("size", "tokens"), [(100_000, 63), (1023, 500), (0, 0), (0, 10**6)])
def test_short_prompts_teach_nothing(size: int, tokens: int) -> None:
    ratios = fleet_of("a")
    ratios.learn("m", "a", size, tokens)
    assert ratios.of("m") == BYTES_PER_TOKEN_PRIOR


@given(reports)
def test_whatever_is_reported_the_ratio_stays_sane(seen: list[tuple[int, int]]) -> None:
    ratios = fleet_of("a")
    for size, tokens in seen:
        ratios.learn("m", "a", size, tokens)
    assert LEAST_RATIO * 0.999 < ratios.of("m") < MOST_RATIO * 1.001


def test_models_are_bounded_and_the_one_in_use_stays() -> None:
    states = InstanceStates()
    ratios, state = BytesPerToken(states), states.add("a")
    for i in range(1000):
        ratios.learn("used", "a", 30_000, 10_000)
        ratios.learn(f"m{i}", "a", 30_000, 10_000)
        ratios.adopt(f"other{i}", 3.0)
    assert len(ratios.all()) == len(state.bytes_per_token) == 64
    ratios.learn("used", "a", 30_000, 10_000)
    assert ratios.of("used") == pytest.approx(3.0)


@settings(max_examples=examples(60))
@given(
    reports,
    st.lists(st.floats(2.0, 6.0), min_size=2, max_size=6),
    st.integers(1, 40),
    st.booleans(),
)
def test_one_of_three_or_more_moves_the_estimate_no_further_than_the_others(
    lies: list[tuple[int, int]], honest: list[float], answers: int, begins: bool
) -> None:
    """Whatever it reports, and whenever; where their number is even the prior counts as one."""
    names = [f"h{i}" for i in range(len(honest))]
    ratios = fleet_of("liar", *names)
    told = [("liar", size, tokens) for size, tokens in lies * 5]
    true = [(name, round(r * 9000), 9000) for name, r in zip(names, honest, strict=True)]
    for name, size, tokens in told + true * answers if begins else true * answers + told:
        ratios.learn("m", name, size, tokens)
    among = [*honest, BYTES_PER_TOKEN_PRIOR] if len(honest) % 2 else honest
    assert min(among) * 0.999 <= ratios.of("m") <= max(among) * 1.001


@pytest.mark.parametrize("lie", [LEAST_RATIO, MOST_RATIO])
def test_two_instances_that_differ_leave_the_prior_between_them(lie: float) -> None:
    ratios = fleet_of("a", "b")
    for _ in range(100):
        ratios.learn("m", "a", round(lie * 8000), 8000)
        ratios.learn("m", "b", 24_000, 8000)
    assert ratios.of("m") == pytest.approx(4.0 if lie > 4 else 3.0)


@given(st.lists(st.floats(0.001, 1000.0), max_size=25))
def test_a_few_odd_answers_move_one_instance_a_little(odd: list[float]) -> None:
    """A client may have answers as it likes them; 25 in a row are less than a factor of 2."""
    ratios = fleet_of("a")
    for _ in range(20):
        ratios.learn("m", "a", 32_000, 8000)
    for ratio in odd:
        ratios.learn("m", "a", round(ratio * 80_000), 80_000)
    assert 2.0 < ratios.of("m") < 8.0


def test_it_learns_a_real_change() -> None:
    ratios = fleet_of("a", "b", "c")
    for ratio in (4.0, 2.5):
        for _ in range(60):
            for name in "abc":
                ratios.learn("m", name, round(ratio * 8000), 8000)
        assert ratios.of("m") == pytest.approx(ratio, rel=0.01)


def test_one_that_disagrees_is_doubted_once_and_believed_again() -> None:
    states = InstanceStates()
    ratios = BytesPerToken(states)
    for name in "abc":
        states.add(name)
    changes = []
    for ratio in (16.0, 4.0):
        for i in range(150):
            changed = [ratios.learn("m", name, 32_000, 8000) for name in "ab"]
            changed.append(ratios.learn("m", "c", round(ratio * 8000), 8000))
            assert changed[:2] == [False, False]
            if changed[2]:
                changes.append((ratio, states["c"].is_usage_doubted))
            assert i >= 8 or not states["c"].is_usage_doubted or ratio == 4.0
    assert changes == [(16.0, True), (4.0, False)]
    assert not any(state.is_usage_doubted for state in states)


def test_of_two_neither_is_doubted() -> None:
    ratios = fleet_of("a", "b")
    changed = [
        ratios.learn("m", name, round(ratio * 8000), 8000)
        for _ in range(100)
        for name, ratio in (("a", 1.0), ("b", 8.0))
    ]
    assert not any(changed)


def test_what_is_forgotten_with_an_instance() -> None:
    states = InstanceStates()
    ratios = BytesPerToken(states)
    for name, ratio in (("a", 1.0), ("b", 4.0)):
        states.add(name)
        ratios.learn("m", name, round(ratio * 8000), 8000)
    states.remove("a")
    ratios.learn("m", "a", 8000, 8000)
    ratios.learn("m", "b", 32_000, 8000)
    assert ratios.of("m") == pytest.approx(4.0)


@pytest.mark.parametrize("odd", [float("nan"), 0, -1.0, 1e9, float("inf")])
def test_an_odd_ratio_of_another_process_is_not_taken(odd: float) -> None:
    ratios = fleet_of()
    ratios.adopt("m", odd)
    assert ratios.of("m") == BYTES_PER_TOKEN_PRIOR


def test_a_ratio_of_another_process_is_where_instances_begin() -> None:
    ratios = fleet_of("a")
    ratios.adopt("m", 3.0)
    assert ratios.of("m") == 3.0
    ratios.learn("m", "a", 80_000, 8000)
    assert 3.0 < ratios.of("m") < 3.1


class TestMedia:
    """Tokens of an image, a sound, ...: what a prompt's text does not explain."""

    def test_the_first_answer_tells_and_later_ones_move_it(self) -> None:
        ratios = fleet_of("a")
        ratios.learn_media("m", {"image": 1}, 400, 1600)
        assert ratios.media("m", "image") == pytest.approx(1500)
        ratios.learn_media("m", {"image": 2}, 400, 100 + 2 * 3000)
        assert 1500 < ratios.media("m", "image") < 3000
        assert ratios.media("m", "audio") == MEDIA_PRIOR["audio"]
        assert ratios.media("other", "image") == MEDIA_PRIOR["image"]

    def test_a_small_picture_beside_a_long_text_teaches_nothing(self) -> None:
        """The text's own error is larger."""
        ratios = fleet_of("a")
        ratios.learn_media("m", {"image": 1}, 400_000, 100_900)
        assert ratios.media("m", "image") == MEDIA_PRIOR["image"]

    def test_text_is_not_learned_from_them(self) -> None:
        ratios = fleet_of("a")
        ratios.learn_media("m", {"audio": 1}, 4000, 5000)
        assert ratios.of("m") == BYTES_PER_TOKEN_PRIOR

    @given(st.lists(st.sampled_from(sorted(MEDIA_PRIOR)), min_size=1, max_size=5), reports)
    def test_whatever_is_reported_it_stays_sane(
        self, kinds: list[str], seen: list[tuple[int, int]]
    ) -> None:
        ratios = fleet_of("a")
        for size, tokens in seen:
            ratios.learn_media("m", Counter(kinds), size, tokens)
            assert all(1.0 <= ratios.media("m", kind) <= MOST_MEDIA_TOKENS for kind in MEDIA_PRIOR)
