"""What a step contains: batching, seats, preemption."""

from dataclasses import replace

from replayer.engine.engine import Engine
from replayer.engine.types import Finished
from tests.support.jobs import COST, SMALL, finish, make_job


def test_a_decoding_request_shares_its_steps_with_a_prefill():
    engine = Engine(SMALL)
    first = engine.submit(make_job("a", 8, 50, chain=1), 0.0)
    engine.advance(0.0)
    long = engine.submit(make_job("b", 100, 1, chain=2), 0.05)
    finish(engine, 0.05)
    assert long.first_token_s is not None
    assert first.finished_s is not None
    # 100 tokens at 31 per step beside one decode: four steps, none of them a pure decode step.
    assert long.first_token_s - 0.05 > 4 * COST.a0
    assert engine.counters.steps == 50
    assert engine.counters.generated == 51


def test_requests_of_one_instant_share_a_step():
    engine = Engine(SMALL)
    both = [engine.submit(make_job(n, 8, 1, chain=c), 1.0) for c, n in enumerate("ab")]
    finish(engine, 1.0)
    assert both[0].first_token_s == both[1].first_token_s
    assert engine.counters.steps == 1


def test_a_seat_limit_makes_requests_wait_in_order():
    engine = Engine(replace(SMALL, max_num_seqs=1))
    requests = [engine.submit(make_job(n, 8, 5, chain=c), 0.0) for c, n in enumerate("abc")]
    events = finish(engine)
    assert [e.request for e in events if isinstance(e, Finished)] == requests
    firsts = [r.scheduled_s for r in requests]
    ends = [r.finished_s for r in requests]
    assert firsts[1:] == ends[:-1]


def test_out_of_blocks_preempts_the_latest_and_everybody_still_finishes():
    engine = Engine(replace(SMALL, num_blocks=16, max_model_len=64))
    early = engine.submit(make_job("a", 20, 30, chain=1), 0.0)
    late = engine.submit(make_job("b", 20, 30, chain=2), 0.0)
    finish(engine)
    assert engine.counters.preemptions == late.preemptions > 0
    assert early.preemptions == 0
    assert (early.output_tokens, late.output_tokens) == (30, 30)
    assert late.finished_s is not None
    assert early.finished_s is not None
    assert late.finished_s > early.finished_s
    engine.pool.check()


def test_a_preempted_request_comes_back_before_those_who_wait():
    engine = Engine(replace(SMALL, num_blocks=16, max_model_len=64))
    requests = [engine.submit(make_job(n, 20, 30, chain=c), 0.0) for c, n in enumerate("ab")]
    # Too big to run beside either, so it matters who is first in the queue.
    requests.append(engine.submit(make_job("c", 56, 1, chain=9), 0.0))
    events = finish(engine)
    assert requests[1].preemptions > 0
    assert [e.request for e in events if isinstance(e, Finished)] == requests


def test_nobody_overtakes_a_head_that_does_not_fit():
    engine = Engine(replace(SMALL, num_blocks=32, max_model_len=128))
    engine.submit(make_job("a", 60, 20, chain=1), 0.0)
    big = engine.submit(make_job("b", 100, 1, chain=2), 0.0)
    small = engine.submit(make_job("c", 4, 1, chain=3), 0.0)
    finish(engine)
    assert big.scheduled_s is not None
    assert small.scheduled_s is not None
    assert 0.0 < big.scheduled_s <= small.scheduled_s
