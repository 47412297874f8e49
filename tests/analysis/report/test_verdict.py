"""The verdict: what is said first, and when engines knew a text."""

import pytest

from analysis.report.verdict import BAD, DOUBTFUL, GOOD, KNEW, known_ratio, verdict
from tests.support.runs import failed, placed, row, run, skipped

WHOLE = {"planned": 1}


def test_a_good_run_says_its_share_its_limits_its_hits_and_where_its_time_went():
    judged = verdict(run(placed("a"), **WHOLE, slo_s={"ttft": 2.0, "tpot": 1.5}))
    assert judged.level == GOOD
    assert judged.lines == (
        "1 of 1 ok",
        "TTFT p90 1.00 s of 2 s (100% keep it); TPOT p90 1.00 s of 1.5 s (100% keep it)",
        "hits 40.0% of all prompt tokens, ideal 50.0%; slowest phase: stream, 67%",
    )


def test_without_a_log_the_wait_for_the_first_token_is_set_against_the_stream():
    lines = verdict(run(row("a", first_token_s=2.5), **WHOLE)).lines
    assert lines[1] == "TTFT p90 2.50 s; TPOT p90 250.0 ms; no limits given (--goodput)"
    assert lines[2].endswith("slowest phase: first token, 83%")


@pytest.mark.parametrize(
    ("rows", "facts", "level", "first"),
    [
        ([failed("a", error="no such model", status=404)], WHOLE, BAD,
         "0 of 1 ok: timeout 404: no such model (1 x)"),
        ([failed("a"), skipped("b")], {"planned": 2}, BAD, "0 of 2 ok: 1 skipped, 1 timeout"),
        ([row("a")], {"planned": 2, "interrupted": True}, BAD, "1 of 2 ok"),
        ([row(str(n)) for n in range(9)] + [failed("x")], {"planned": 10}, DOUBTFUL,
         "9 of 10 ok: 1 timeout"),
        ([row("a")], {**WHOLE, "slo_s": {"ttft": 0.5}}, DOUBTFUL, "1 of 1 ok"),
        ([row("a")], {**WHOLE, "stopped": "stopped: why"}, BAD, "1 of 1 ok: stopped: why"),
        ([row("a", cached_tokens=100)], WHOLE, BAD, KNEW),
        ([], {"planned": 3}, BAD, "0 of 3 ok"),
    ],
)  # fmt: skip
def test_levels_and_first_lines(rows, facts, level, first):
    judged = verdict(run(*rows, **facts))
    assert judged.level == level
    assert judged.lines[0].startswith(first)


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"cached_tokens": 50}, 0.0),
        ({"cached_tokens": 75}, 0.5),
        ({"cached_tokens": 100}, 1.0),
        # A chat template of 20 tokens around the prompt is common to all prompts.
        ({"cached_tokens": 70, "prompt_tokens": 120}, 0.0),
        # Another tokenizer: two tokens for each of the trace's.
        ({"cached_tokens": 1000, "prompt_tokens": 2000, "input_length": 1000,
          "ideal_hit_tokens": 500}, 0.0),
        # Another request that was under way brought the text.
        ({"cached_tokens": 90, "possible_hit_tokens": 90}, 0.0),
        # KV of a peer, a second try, no word of what was cached, an impossible one.
        ({"cached_tokens": 100, "prefill_instance": "p"}, None),
        ({"cached_tokens": 100, "route_class": "HEAVY_P2P"}, None),
        ({"cached_tokens": 100, "attempts": 2}, None),
        ({"cached_tokens": 100, "retries": 1}, None),
        ({"cached_tokens": None}, None),
        ({"cached_tokens": 101}, None),
        # Literal text, of which only the share is known.
        ({"cached_tokens": 900, "prompt_tokens": 1000, "input_length": None,
          "ideal_hit_tokens": 800}, 0.0),
        ({"cached_tokens": 900, "prompt_tokens": 1000, "input_length": None,
          "ideal_hit_tokens": 0}, 772 / 872),
    ],
)  # fmt: skip
def test_how_much_of_the_new_text_was_known(fields, known):
    found = known_ratio([row("a", **fields)])
    assert found == (known if known is None else pytest.approx(known, abs=0.01))


def test_the_engines_own_counters_tell_it_where_answers_do_not():
    def counters(hits):
        read = {"local_queries": 100_000.0, "local_hits": hits}
        zero = dict.fromkeys(read, 0.0)
        return {"source": "engines", "before": {"e": zero}, "after": {"e": read}}

    silent = row("a", cached_tokens=None)
    assert run(silent, engine_counters=counters(50_000.0))["known_text_ratio"] == 0.0
    found = run(silent, engine_counters=counters(90_000.0))
    assert found["known_text_ratio"] == pytest.approx(0.8, abs=0.01)
    assert verdict(found).lines[0].startswith(KNEW)
