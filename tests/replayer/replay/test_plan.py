"""What a selection keeps, and what a cache without end would hit in it."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.options import parse_options
from replayer.replay.plan import BusyCache, IdealCache, ideal_hits, make_plan
from replayer.trace.loaders import TraceRequest
from replayer.trace.rows import TraceError


def request(name, ids, *, tokens=None, block=4):
    return TraceRequest(
        request_id=name,
        session_id=None,
        turn=0,
        arrival_s=0.0,
        input_tokens=len(ids) * block if tokens is None else tokens,
        output_tokens=1,
        runs=tuple((one, 1) for one in ids),
        block_tokens=block,
        line=1,
    )


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=8))
def test_an_ideal_hit_is_the_leading_blocks_that_came_before(prompts):
    hits = ideal_hits(request(str(index), ids) for index, ids in enumerate(prompts))
    seen: set[int] = set()
    for index, ids in enumerate(prompts):
        known = [one in seen for one in ids]
        assert hits[str(index)] == [*known, False].index(False) * 4
        seen.update(ids)


def test_a_hit_is_never_longer_than_the_prompt():
    assert ideal_hits([request("a", [1, 2]), request("b", [1, 2], tokens=5)])["b"] == 5


ROWS = [
    {"session_id": "a", "timestamp": 2000, "input_length": 4},
    {"session_id": "b", "timestamp": 3000, "input_length": 8},
    {"session_id": "a", "input_length": 20, "delay": 50},
    {"session_id": "a", "input_length": 8},
    {"session_id": "a/x", "parent_session_id": "a", "wait_for": ["a:1"], "input_length": 4},
    {"session_id": "b", "timestamp": 9000, "input_length": 12, "wait_for": ["b:0"]},
]


def plan(tmp_path, *more):
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        b"\n".join(orjson.dumps({"output_length": 9, "block_size": 4} | row) for row in ROWS)
    )
    return make_plan(parse_options([str(path), *more]))


def kept(tmp_path, *more):
    return [one.request_id for one in plan(tmp_path, *more).requests]


def test_without_a_selection_all_is_kept_and_starts_at_zero(tmp_path):
    made = plan(tmp_path)
    assert len(made.requests) == len(ROWS)
    assert [one.arrival_s for one in made.requests] == [0.0, 1.0, None, None, None, 7.0]
    assert made.notes == ()


def test_a_window_keeps_what_follows_from_it(tmp_path):
    assert kept(tmp_path, "--window", "2.5:9") == ["b:0"]
    assert kept(tmp_path, "--window", ":3") == ["a:0", "a:1", "a:2", "a/x:0"]
    assert plan(tmp_path, "--window", "1:").requests[0].arrival_s == 1.0


def test_long_prompts_end_their_session_and_what_started_from_it(tmp_path):
    made = plan(tmp_path, "--max-input", "12")
    assert [one.request_id for one in made.requests] == ["a:0", "b:0", "b:1"]
    assert made.notes[0].startswith("dropped 3 of 6 requests: longer than 12 tokens")
    assert made.notes[1].startswith("ideal cache hit")


def test_samples_take_whole_sessions_by_the_seed(tmp_path):
    samples = {tuple(kept(tmp_path, "--sample-sessions", "1", "--seed", str(s))) for s in range(9)}
    assert samples == {("a:0", "a:1", "a:2", "a/x:0"), ("b:0", "b:1")}
    assert kept(tmp_path, "--sample-sessions", "0.5", "--seed", "3") in map(list, samples)
    assert len(kept(tmp_path, "--sample-sessions", "1.0")) == len(ROWS)


def test_outputs_are_cut_and_the_number_limited(tmp_path):
    made = plan(tmp_path, "--max-output", "5", "--limit", "2")
    assert [one.output_tokens for one in made.requests] == [5, 5]


def test_an_empty_selection_is_refused(tmp_path):
    with pytest.raises(TraceError, match="the selection leaves no request"):
        plan(tmp_path, "--max-input", "1")


def test_a_busy_cache_has_what_others_sent_whoever_was_first():
    """Engines may begin requests in another order than that of sending."""

    def made(name, *ids):
        return TraceRequest(name, None, 0, 0.0, 4 * len(ids), 1, tuple((i, 1) for i in ids), 4, 1)

    first, later, alone = made("a", 1, 2), made("b", 1, 3), made("c", 9)
    cache = BusyCache([(first, 0.0), (later, 1.0), (alone, 2.0)])
    assert cache.share(first, 0.5) == 0.0
    assert cache.share(first, 1.0) == 0.5
    assert cache.share(later, 1.0) == 0.5
    assert cache.share(alone, 99.0) == 0.0


def test_literal_prompts_share_the_text_that_they_begin_with():
    def made(name, text, **fields):
        return TraceRequest(name, None, 0, 0.0, None, 1, (), 512, 1, prompt=text, **fields)

    cache = IdealCache()
    assert cache.add(made("a", "x" * 640)) == 0.0
    assert cache.add(made("b", "x" * 640 + "y" * 640)) == 0.5
    assert cache.add(made("c", "y" + "x" * 639)) == 0.0
    assert ideal_hits([made("a", "x" * 640), made("b", "x" * 640)]) == {"a": 0, "b": 0}
