"""The waits of a client that got a 503."""

from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.retries import BACKOFF_CAP_S, RETRY_AFTER_CAP_S, Retries

UNIFORM = st.floats(0.0, 1.0, exclude_max=True)
AFTER_S = st.none() | st.floats(0.0, allow_infinity=True)


@given(st.integers(0, 2000), UNIFORM, AFTER_S)
def test_the_backoff_is_min_60_two_to_the_attempt_plus_jitter(attempt, uniform, after_s):
    wait_s = Retries.backoff().wait_s(attempt, after_s, uniform)
    assert wait_s == (2**attempt + uniform if attempt < 6 else BACKOFF_CAP_S)
    assert Retries.backoff(time_scale=6.0).wait_s(attempt, after_s, uniform) == wait_s / 6.0


@given(st.integers(0, 2000), UNIFORM, AFTER_S)
def test_else_the_wait_is_the_answers_retry_after(attempt, uniform, after_s):
    wait_s = Retries(1).wait_s(attempt, after_s, uniform)
    assert wait_s == (1.0 if after_s is None else min(after_s, RETRY_AFTER_CAP_S))


def test_five_tries_are_four_repetitions():
    assert Retries.backoff().most == 4
