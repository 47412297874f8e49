"""When overload is said, how often, in which words, and when it is over."""

from __future__ import annotations

import pytest

from proxy.core.admission.overload import LONG_S, WINDOW_S, Overload, cause
from proxy.core.types import OFF, PastCheck, Reject, RejectReason, Thresholds

R = RejectReason
LIMITS = Thresholds(0.85, 5000, 1.5)


def past(*checks: R, reason: R = R.QUEUE_FULL) -> Reject:
    each = tuple(PastCheck(f"i{n}", (check,), 1.0 + n) for n, check in enumerate(checks))
    return Reject(reason, 1, past=each)


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ((R.DECODE_BLOCKS,) * 3, "3 of 3 instances past active_decode_blocks 0.85"),
        ((R.PREFILL_TOKENS,), "1 of 1 instances past active_prefill_tokens 5000"),
        ((R.PREFILL_FRAC,), "1 of 1 instances past active_prefill_tokens_frac 1.5"),
        ((R.UPSTREAM_BUSY,) * 2, "2 of 2 instances report that they are busy"),
        ((R.HEAT_CAP,), "1 of 1 instances at their thermal cap"),
        (
            (R.UPSTREAM_BUSY, R.DECODE_BLOCKS, R.DECODE_BLOCKS),
            "2 of 3 instances past active_decode_blocks 0.85, "
            "1 of 3 instances report that they are busy",
        ),
        ((), "every instance is busy"),
    ],
)
def test_the_cause_names_the_check_and_its_limit(checks: tuple[R, ...], said: str) -> None:
    assert cause(past(*checks), LIMITS) == said


def test_the_model_is_named_where_there_are_others() -> None:
    said = cause(past(R.DECODE_BLOCKS), LIMITS, "llama")
    assert said == "1 of 1 instances of llama past active_decode_blocks 0.85"


def test_a_limit_that_is_gone_is_not_named() -> None:
    assert cause(past(R.DECODE_BLOCKS), OFF) == "1 of 1 instances past active_decode_blocks"


def test_memory_is_a_cause_of_its_own() -> None:
    assert "--max-memory-bytes" in cause(Reject(R.MEMORY, 5), OFF)


def test_the_check_behind_a_refusal_is_that_of_the_first_to_be_free() -> None:
    assert past(R.HEAT_CAP, R.DECODE_BLOCKS).check is R.HEAT_CAP
    assert Reject(R.NO_INSTANCE, 5).check is None


def test_a_line_at_once_and_then_one_in_ten_seconds() -> None:
    overload = Overload()
    lines = []
    for tick in range(50):  # 25 s
        now_s = 100.0 + tick / 2
        overload.refused(past(R.DECODE_BLOCKS), now_s)
        if overload.look(None, now_s):
            lines.append(now_s - 100.0)
    assert lines == [0.0, 10.0, 20.0]
    assert overload.since_s == 100.0
    assert (overload.total, overload.refused_lately(124.5)) == (50, 20)


def test_it_is_over_after_a_calm_and_begins_anew() -> None:
    overload = Overload()
    overload.refused(past(R.DECODE_BLOCKS), 5.0)
    assert overload.look(None, 5.0)
    assert not overload.look(None, 5.0 + WINDOW_S)
    assert overload.since_s == 5.0
    assert not overload.look(None, 5.5 + WINDOW_S)
    overload.refused(Reject(R.QUEUE_FULL, 1), 30.0)
    assert overload.reject == Reject(R.QUEUE_FULL, 1), "not what was behind the one before"
    overload.refused(past(R.HEAT_CAP), 30.0)
    assert (overload.since_s, overload.total, overload.refused_lately(30.0)) == (30.0, 2, 2)
    assert overload.look(None, 30.0), "another overload has a line at once"


def test_waiting_is_overload_once_it_is_long() -> None:
    overload = Overload()
    waits = past(R.PREFILL_TOKENS, reason=R.PREFILL_TOKENS)
    assert not overload.look((LONG_S / 2, waits), 1.0)
    assert overload.since_s is None
    assert overload.look((LONG_S, waits), 2.0)
    assert overload.reject is waits
    assert (overload.longest_s, overload.refused_lately(2.0)) == (LONG_S, 0)


@pytest.mark.parametrize("reason", [R.NO_INSTANCE, R.ASLEEP, R.HOLDER_DOWN, R.DRAINING])
def test_what_more_instances_would_not_have_spared_is_no_overload(reason: R) -> None:
    overload = Overload()
    overload.refused(Reject(reason, 5), 1.0)
    assert not overload.look((60.0, Reject(reason, 5)), 61.0)
    assert overload.since_s is None


def test_a_refusal_without_instances_hides_no_cause() -> None:
    overload = Overload()
    known = past(R.DECODE_BLOCKS)
    overload.refused(known, 1.0)
    overload.refused(Reject(R.QUEUE_FULL, 1), 2.0)
    assert overload.reject is known


def test_a_full_queue_is_told_as_long_as_it_refuses() -> None:
    overload = Overload()
    assert not overload.is_queue_full(0.0)
    overload.refused(past(R.DECODE_BLOCKS), 1.0)
    overload.refused(past(R.DECODE_BLOCKS, reason=R.QUEUE_TIMEOUT), 5.0)
    assert overload.is_queue_full(1.0 + WINDOW_S)
    assert not overload.is_queue_full(1.1 + WINDOW_S)
