"""What a load is like, by figures that were computed elsewhere, and by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.schedule import PaceRules
from replayer.survey import profile as module
from replayer.survey.profile import arrivals, concurrency, profile
from replayer.trace.loaders import read_trace
from tests.support.traces import EXAMPLES, SAMPLE, write


def requests(tmp_path, *rows, block=4):
    full = [
        {"output_length": 2, "block_size": block, "request_id": f"r{number}"} | row
        for number, row in enumerate(rows)
    ]
    return list(read_trace(write(tmp_path / "t.jsonl", *full)))


def row(ids, at_ms=0, **more):
    return {"hash_ids": ids, "input_length": 4 * len(ids), "timestamp": at_ms} | more


def test_arrivals_at_equal_gaps():
    seen = arrivals([float(second) for second in range(25)])
    assert seen is not None
    assert (seen["requests"], seen["span_s"], seen["gap_cv"]) == (25, 24.0, 0.0)
    assert (seen["rate_rps"], seen["busiest_second"]) == (25 / 24, 1)
    assert seen["rates_rps"] == [1.0] * 11 + [1.5]


def test_arrivals_in_bursts():
    seen = arrivals([9.0, 9.0, 9.0, 3.0, 3.0, 3.0])
    assert seen is not None
    assert (seen["tied_ratio"], seen["busiest_second"], seen["gap_cv"]) == (0.8, 3, 2.0)


def test_arrivals_at_one_time_have_no_rate():
    assert arrivals([]) is None
    assert arrivals([5.0, 5.0]) is None


def test_prefixes_shared_within_and_across_sessions(tmp_path):
    made = requests(
        tmp_path,
        row([1, 2], 0, session_id="a"),
        row([1, 2, 3], 10, session_id="a"),
        row([1, 9], 20, session_id="b"),
        row([1, 9, 8], 30, session_id="b"),
    )
    prefixes = profile(made)["prefixes"]
    assert prefixes["ideal_hit_ratio"] == (8 + 4 + 8) / 40
    assert prefixes["mean_hit_ratio"] == pytest.approx((2 / 3 + 1 / 2 + 2 / 3) / 4)
    assert prefixes["within_sessions_ratio"] == (8 + 8) / 40
    assert prefixes["across_sessions_ratio"] == 4 / 40
    assert (prefixes["shared_blocks"], prefixes["working_set_tokens"]) == (5, 20)


def test_hits_are_of_the_order_of_time(tmp_path):
    later_first = requests(tmp_path, row([1, 2], 10), row([1], 0))
    assert profile(later_first)["new_tokens"]["max"] == 4
    undated = requests(tmp_path, row([1, 2], None), row([1], None))
    assert profile(undated)["new_tokens"]["max"] == 8


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=8))
def test_a_larger_cache_hits_more_up_to_the_ideal(tmp_path_factory, prompts):
    folder = tmp_path_factory.mktemp("t")
    prompts = [[sum(6**i * (1 + b) for i, b in enumerate(ids[:n])) for n in range(1, len(ids) + 1)]
               for ids in prompts]  # fmt: skip
    made = requests(folder, *[row(ids) for ids in prompts])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_CACHE_TOKENS", 4)
        seen = profile(made)["prefixes"]
    ratios = [one["hit_ratio"] for one in seen["by_cache"]]
    assert ratios == sorted(ratios)
    assert all(ratio <= seen["ideal_hit_ratio"] for ratio in ratios)


def test_what_is_not_known_is_left_out(tmp_path):
    plain = list(read_trace(write(tmp_path / "v.jsonl", EXAMPLES["vidur"])))
    assert profile(plain)["prefixes"] is None
    assert profile(plain)["new_tokens"] == {}
    text = requests(tmp_path, {"prompt": "say it " * 40, "timestamp": 0, "input_length": 90})
    assert profile(text * 2)["prefixes"].keys() == {
        *("ideal_hit_ratio", "mean_hit_ratio", "within_sessions_ratio", "across_sessions_ratio")
    }
    mixed = requests(tmp_path, row([1]), row([1], block_size=2, input_length=2))
    assert "by_cache" not in profile(mixed)["prefixes"]


def test_the_shipped_sample():
    seen = profile(list(read_trace(SAMPLE)))
    assert seen["sessions"] == 24
    assert seen["input_tokens"]["mean"] * 227 == pytest.approx(7_960_383)
    prefixes = seen["prefixes"]
    assert prefixes["within_sessions_ratio"] < prefixes["ideal_hit_ratio"] < 1


def test_requests_under_way(tmp_path):
    made = requests(tmp_path, *[row([n], 1000 * n) for n in range(6)])
    seen = concurrency(made, PaceRules(), lambda _: 2.5)
    assert seen == {"peak": 3, "mean": 15 / 7.5}
    assert concurrency(made, PaceRules(speedup=10), lambda _: 2.5)["peak"] == 6
    assert concurrency(made[:1], PaceRules(), lambda _: 0.0) == {"peak": 1, "mean": 0.0}


def test_a_turn_is_not_under_way_beside_the_one_before(tmp_path):
    made = requests(tmp_path, *[row([1], 0, session_id="s") for _ in range(5)])
    assert concurrency(made, PaceRules(), lambda _: 2.0) == {"peak": 1, "mean": 1.0}
