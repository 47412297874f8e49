"""A request log read as a load: what is shared, who waits for whom, and what is refused."""

from typing import Any

import pytest

from analysis.check.logged import LoggedLoad, read_load
from analysis.runs import RunError
from tests.support.logged import line, write_log


def load_of(tmp_path, *lines: dict[str, Any], model=None, kv_tokens=None, last=100) -> LoggedLoad:
    return read_load(write_log(tmp_path / "log", lines), model, kv_tokens, last)


def shared_blocks(load: LoggedLoad, one: int, other: int) -> int:
    a, b = (load.requests[at].planned.turn.blocks for at in (one, other))
    return len(set(a) & set(b))


def test_a_turn_shares_what_its_engine_had(tmp_path):
    load = load_of(
        tmp_path,
        line("s", 0, 0.0, prompt=1600, end=1.0),
        line("s", 1, 3.0, prompt=2000, cached=1600, end=4.0),
        line("s", 2, 4.5, prompt=2400, cached=800, end=5.0),
    )
    assert load.block_tokens == 16
    assert shared_blocks(load, 0, 1) == 100
    assert shared_blocks(load, 1, 2) == 50, "what came after was edited"
    turns = [one.planned for one in load.requests]
    assert [one.turn.new_tokens for one in turns] == [1600, 400, 1600]
    assert [one.wait_for for one in turns] == [(), (0,), (1,)]
    assert [one.earliest_s for one in turns] == [0.0, 3.0, 4.5]


def test_a_request_that_came_before_the_answer_waits_for_none(tmp_path):
    load = load_of(
        tmp_path, line("s", 0, 0.0, end=9.0), line("s", 1, 2.0, prompt=900, cached=800, end=8.0)
    )
    later = load.requests[1].planned
    assert (later.wait_for, later.earliest_s) == ((), 2.0)


def test_what_another_instance_had_counts(tmp_path):
    load = load_of(
        tmp_path,
        line("s", 0, 0.0, prompt=1600),
        line("s", 1, 3.0, prompt=1700, cached=0, hit=0, reachable=1600, decode_instance="b"),
    )
    assert load.requests[1].planned.turn.new_tokens == 100
    assert load.names == ("a", "b")


def test_kv_from_p_is_no_hit(tmp_path):
    moved: dict[str, Any] = {"prefill_instance": "b", "t_prefill_sent": 3.0, "t_prefill_done": 3.2}
    load = load_of(
        tmp_path, line("s", 0, 0.0), line("s", 1, 3.0, prompt=1700, cached=1700, hit=160, **moved)
    )
    assert load.requests[1].planned.turn.new_tokens == 1540


def test_first_turns_share_a_beginning(tmp_path):
    """The first of them computes it, so it has it too."""
    load = load_of(
        tmp_path,
        line("s", 0, 0.0, prompt=1600),
        line("t", 0, 1.0, prompt=1600, cached=320),
        line("u", 0, 2.0, prompt=1600, cached=640),
    )
    assert shared_blocks(load, 0, 1) == 20
    assert shared_blocks(load, 1, 2) == 20


def test_what_the_kv_had_no_room_for_is_shared_all_the_same(tmp_path):
    lines = (
        line("s", 0, 0.0, prompt=1600),
        line("t", 0, 1.0, prompt=4000),
        line("s", 1, 3.0, prompt=2000, cached=0),
    )
    assert load_of(tmp_path, *lines).requests[2].planned.turn.new_tokens == 2000
    assert load_of(tmp_path, *lines, kv_tokens=100_000).requests[2].planned.turn.new_tokens == 2000
    assert load_of(tmp_path, *lines, kv_tokens=4_500).requests[2].planned.turn.new_tokens == 400


def test_conversations_without_a_name_are_found_by_what_they_continue(tmp_path):
    load = load_of(
        tmp_path,
        line(None, 0, 0.0, prompt=1600),
        line(None, 0, 0.5, prompt=3200),
        line(None, 1, 3.0, prompt=1800, cached=1600),
        line(None, 1, 4.0, prompt=3300, cached=3200),
    )
    names = [one.planned.session_id for one in load.requests]
    assert names == ["request 0", "request 1", "request 0", "request 1"]


def test_what_began_before_the_log_is_load_only(tmp_path):
    load = load_of(
        tmp_path, line("s", 7, 0.0, cached=800), line("s", 8, 3.0, prompt=1700, cached=1600)
    )
    assert [one.known for one in load.requests] == [False, True]
    assert [one.ttft_s for one in load.requests] == [None, pytest.approx(0.25)]
    cut = load_of(tmp_path, line("s", 0, 0.0), line("s", 1, 3.0), line("s", 2, 6.0), last=2)
    assert [one.known for one in cut.requests] == [False, True]


def test_a_beginning_is_not_what_a_session_had_before_the_log(tmp_path):
    load = load_of(
        tmp_path,
        line("s", 7, 0.0, prompt=1600, cached=1440),
        line("t", 7, 1.0, prompt=1600, cached=1440),
        line("t", 8, 4.0, prompt=1900, cached=1600),
    )
    assert shared_blocks(load, 0, 1) == 0
    early, other, first, *_ = load.samples(load.middle(3))
    assert (early.leg.prompt_tokens, early.leg.blocks) == (1440, first.leg.blocks[:90])
    assert early.leg.sent_s < 0 > other.leg.sent_s
    assert early.first_s is None


def test_what_is_no_turn_stands_apart(tmp_path):
    load = load_of(
        tmp_path,
        line("s", 0, 0.0),
        line("s", None, 2.0, prompt=320),
        line("s", 1, 3.0, prompt=1700, cached=1600),
    )
    assert [one.planned.turn.new_tokens for one in load.requests] == [1600, 320, 100]
    assert [one.known for one in load.requests] == [True, True, True]
    assert load.requests[2].planned.wait_for == (0,)


def test_times_are_those_of_the_log(tmp_path):
    in_one_piece = line("t", 0, 1.0, t_first_token=None)
    load = load_of(tmp_path, line("s", 0, 0.0, output=11, end=1.25), in_one_piece)
    stream, whole = load.requests
    assert stream.ttft_s == pytest.approx(0.25)
    assert stream.tpot_s == pytest.approx(0.1)
    assert stream.e2e_s == pytest.approx(1.25)
    assert (whole.ttft_s, whole.tpot_s) == (None, None)
    assert [one.seconds for one in load.overheads(range(1))] == [pytest.approx(0.01)]
    first, second = load.samples(load.middle(2))
    assert first.first_s == pytest.approx(0.24)
    assert second.leg.sent_s == pytest.approx(1.01)
    assert second.first_s is None


def test_an_offload_that_has_no_times_is_one_leg(tmp_path):
    load = load_of(tmp_path, line("s", 0, 0.0, prefill_instance="b"))
    assert [one.kind for one in load.samples(load.middle(1))] == ["first"]


def test_what_was_not_served_is_left_out(tmp_path):
    refused = line("t", 0, 1.0, outcome="rejected")
    uncounted = line("u", 0, 1.0, osl_tokens=None)
    path = write_log(tmp_path / "log", [line("s", 0, 0.0), refused, uncounted])
    with path.open("ab") as file:
        file.write(b"no json\n[]\n")
    assert read_load(path, None, None, 100).left_out == 4


def test_a_log_that_cannot_be_repeated_is_one_line(tmp_path):
    good = line("s", 0, 0.0)
    old = {name: value for name, value in good.items() if name != "reachable_hit_tokens"}
    other = good | {"policy": "never"}
    for lines, text in (
        ([], "no line of a request that was served"),
        ([good | {"outcome": "rejected"}], "no line of a request that was served"),
        ([good | {"prompt_tokens": "many"}], "no line of a request that was served"),
        ([good | {"prompt_tokens": 10**9}], "no line of a request that was served"),
        ([good | {"t_first_token": None}], "has no streams with counted tokens"),
        ([good | {"turn": 3}], "has no streams with counted tokens whose session began in it"),
        ([good, old], "log:2: is of an older form: it has no reachable_hit_tokens"),
        ([good, other], "must be of one policy, not of cost, never"),
        (
            [good, good | {"model": "n\n"}],
            r"has several models: --model must be one of 'm', 'n\\n'",
        ),
        ([line("s", 0, 500.0), good], "log:2: ended 500 s before the line above"),
        ([good, line("s", 1, 9e5)], "must span 8 days at most"),
    ):
        with pytest.raises(RunError, match=text) as raised:
            load_of(tmp_path, *lines)
        assert "\n" not in str(raised.value)
    with pytest.raises(RunError, match="--model must be one of 'm', not 'n'"):
        load_of(tmp_path, good, model="n")
    with pytest.raises(RunError, match="nix: cannot be read: No such file"):
        read_load(tmp_path / "nix", None, None, 100)


def test_one_of_several_models_can_be_taken(tmp_path):
    load = load_of(tmp_path, line("s", 0, 0.0), line("t", 0, 1.0, model="n"), model="n")
    assert [one.planned.session_id for one in load.requests] == ["t"]
