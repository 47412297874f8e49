"""The cap, the tokens of a step, and who gives way; without any vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_thermal.control import FIELDS, MOST, VICTIMS, Control, Running, Wish, WishError, ranked

REQUESTS = [
    Running("old", 1.0, kv_tokens=10, output_tokens=9, max_tokens=10, priority=0, last_step=7),
    Running("long", 2.0, kv_tokens=900, output_tokens=50, max_tokens=60, priority=1, last_step=7),
    Running("open", 3.0, kv_tokens=20, output_tokens=20, max_tokens=800, priority=2, last_step=7),
    Running("idle", 4.0, kv_tokens=30, output_tokens=40, max_tokens=50, priority=0, last_step=3),
    Running("new", 5.0, kv_tokens=40, output_tokens=1, max_tokens=20, priority=1, last_step=7),
]
FIRST = {
    "newest": ["new", "idle"],
    "largest_kv": ["long", "new"],
    "most_remaining": ["open", "new"],
    "least_progress": ["new", "old"],
    "lowest_priority": ["open", "new"],
    "lru": ["idle", "new"],
}


def test_every_victim_policy_takes_its_first():
    assert FIRST.keys() == VICTIMS.keys()
    for victim, first in FIRST.items():
        assert [r.request_id for r in ranked(REQUESTS, victim)][:2] == first, victim


@given(st.permutations(REQUESTS), st.sampled_from(sorted(VICTIMS)))
def test_the_order_does_not_depend_on_that_of_the_engine(running, victim):
    assert ranked(running, victim) == ranked(REQUESTS, victim)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (None, "the body is not a JSON object"),
        ([], "the body is not a JSON object"),
        ({}, "the body is empty: it may have cap, victim, preempt, max_tokens_per_step, ttl_s"),
        ({"cap": -1}, f"cap is -1: it must be a whole number from 0 to {MOST}, or null"),
        ({"cap": True}, f"cap is True: it must be a whole number from 0 to {MOST}, or null"),
        ({"cap": 2.0}, f"cap is 2.0: it must be a whole number from 0 to {MOST}, or null"),
        ({"cap": MOST + 1}, f"cap is {MOST + 1}: it must be a whole number from 0 to {MOST}"),
        ({"max_tokens_per_step": "9"}, "max_tokens_per_step is '9': it must be a whole number"),
        ({"preempt": 1}, "preempt is 1: it must be true or false"),
        ({"victim": "oldest"}, "victim is 'oldest': it must be one of newest, largest_kv, "),
        ({"victim": None}, "victim is None: it must be one of newest, largest_kv, "),
        ({"ttl_s": 0}, "ttl_s is 0: it must be above 0 to 86400, or null"),
        ({"ttl_s": float("nan")}, "ttl_s is nan: it must be above 0 to 86400, or null"),
        ({"ttl_s": False}, "ttl_s is False: it must be above 0 to 86400, or null"),
        ({"cap": 2, "caps": 3}, "there is no field 'caps': the body may have cap, victim"),
    ],
)
def test_what_cannot_be_understood_is_refused_whole(body, wrong):
    control = Control(16, 2048)
    with pytest.raises(WishError) as error:
        control.change(body, 0.0, 8)
    assert str(error.value).startswith(wrong)
    assert control.wish == Wish()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@pytest.mark.long
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=5), JSON, max_size=4))
def test_any_body_is_understood_or_refused_in_one_line(body):
    control, said = Control(16, 2048, 32), "understood"
    try:
        control.change(body, 0.0, 8)
    except WishError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    assert len(said) < 250
    assert 1 <= control.cap() <= 16
    assert 1 <= control.tokens(8, 1) <= 2048


def test_a_field_that_is_not_named_stays_as_it_is():
    wish = Wish().changed({"cap": 2, "victim": "lru"}).changed({"preempt": False})
    assert wish == Wish(cap=2, victim="lru", preempt=False)
    assert wish.changed({"cap": None}) == Wish(victim="lru", preempt=False)


def test_the_cap_is_kept_within_one_and_what_the_engine_was_started_with():
    control = Control(16, 2048)
    for asked, cap in ((0, 1), (1, 1), (7, 7), (16, 16), (17, 16), (None, 16)):
        control.change({"cap": asked}, 0.0, 0)
        assert control.cap() == cap
        assert control.status(0.0, 0, 0)["cap"] == (None if asked is None else cap)


def test_requests_above_the_cap_give_way_in_the_next_step():
    control = Control(16, 2048)
    assert control.begin_step(0.0, 8) == 0
    control.end_choice(8, 0, 0)
    control.change({"cap": 2}, 0.0, 8)
    assert control.status(0.0, 8, 0)["steps_to_limit"] is None
    assert control.begin_step(0.1, 8) == 6
    control.end_choice(2, 6, 0)
    status = control.status(0.1, 2, 6)
    assert (status["steps_to_limit"], status["preempted"], status["steps"]) == (1, 6, 2)


def test_one_that_cannot_give_way_yet_does_in_a_later_step():
    control = Control(16, 2048)
    control.change({"cap": 2}, 0.0, 8)
    assert control.begin_step(0.0, 8) == 6
    control.end_choice(4, 4, 2)
    assert control.status(0.0, 4, 4)["steps_to_limit"] is None
    assert control.begin_step(0.0, 4) == 2
    control.end_choice(2, 2, 0)
    status = control.status(0.0, 2, 6)
    assert (status["steps_to_limit"], status["preempted"], status["skipped"]) == (2, 6, 2)


def test_without_preemption_none_gives_way_and_none_begins():
    control = Control(16, 2048)
    control.change({"cap": 2, "preempt": False}, 0.0, 8)
    assert control.begin_step(0.0, 8) == 0
    assert control.cap() == 2


def test_limits_with_a_time_to_live_end_by_themselves():
    control = Control(16, 2048)
    control.change({"cap": 2, "max_tokens_per_step": 64, "victim": "lru", "ttl_s": 5}, 10.0, 8)
    control.change({"preempt": False}, 12.0, 8)
    assert control.status(12.0, 8, 0)["ttl_s"] == 3.0
    control.begin_step(14.9, 8)
    assert control.cap() == 2
    control.begin_step(15.0, 8)
    assert control.wish == Wish(victim="lru", preempt=False)
    assert (control.cap(), control.tokens(8, 1)) == (16, 2048)
    control.change({"cap": 2, "ttl_s": 5}, 20.0, 8)
    control.change({"ttl_s": None}, 20.0, 8)
    control.begin_step(99.0, 8)
    assert control.cap() == 2


def test_the_lower_of_two_caps_holds():
    control = Control(16, 2048)
    control.change({"cap": 8}, 0.0, 10)
    assert control.begin_step(0.0, 10, policy_cap=3) == 7
    assert control.is_by_policy
    assert control.begin_step(0.0, 10, policy_cap=12) == 2
    assert not control.is_by_policy


def test_a_step_has_a_token_for_each_running_request_and_a_block_beside():
    control = Control(16, 2048, least_tokens=32)
    control.change({"max_tokens_per_step": 1}, 0.0, 0)
    assert control.tokens(running=8, per_request=3) == 32 + 24
    control.change({"max_tokens_per_step": 512}, 0.0, 0)
    assert control.tokens(8, 3) == 512
    control.change({"max_tokens_per_step": MOST}, 0.0, 0)
    assert control.tokens(8, 3) == control.status(0.0, 0, 0)["max_tokens_per_step"] == 2048


def test_tokens_are_refused_where_prompts_are_not_cut():
    control = Control(16, 2048, needs_whole_steps="chunked prefill is off")
    with pytest.raises(WishError, match="cannot be set: chunked prefill is off"):
        control.change({"max_tokens_per_step": 512}, 0.0, 0)
    control.change({"max_tokens_per_step": None, "cap": 2}, 0.0, 0)
    assert control.cap() == 2
