"""The engine model: step times, batching, prefix hits, preemption, conservation."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.engine.costs import DecodeRun, StepCost
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Event, Finished, FirstToken, Job, SimRequest

COST = StepCost(a0=0.01, a1=1e-4, a2=1e-3, a3=1e-6, a4=1e-8)
SMALL = EngineOptions(
    block_size=4, num_blocks=64, max_num_batched_tokens=32, max_model_len=256, step=COST
)


def _job(name: str, prompt: int, output: int, *, chain: int = 0, block: int = 4) -> Job:
    """Make a job; jobs of one `chain` share their prefix, outputs included."""
    hashes = [chain * 10_000 + index for index in range(1_000)]
    full = prompt // block

    def output_hashes(tokens: int) -> list[int]:
        return hashes[full : (prompt + tokens) // block]

    return Job(name, prompt, hashes[:full], output, output_hashes=output_hashes)


def _finish(engine: Engine, now_s: float = 0.0) -> list[Event]:
    events = []
    while now_s < math.inf:
        events += engine.advance(now_s)
        now_s = engine.next_event_s()
    return events


def _alone(options: EngineOptions, job: Job) -> tuple[float, float]:
    """Return first-token and end time of a job on an idle engine."""
    engine = Engine(options)
    request = engine.submit(job, 0.0)
    _finish(engine)
    assert request.first_token_s is not None
    assert request.finished_s is not None
    return request.first_token_s, request.finished_s


def test_step_times_follow_the_formula():
    first_s, end_s = _alone(SMALL, _job("a", 40, 3))
    chunk1 = COST.a0 + COST.a1 * 32 + COST.a4 * 32 * 16
    chunk2 = COST.a0 + COST.a1 * 8 + COST.a4 * 8 * (32 + 4)
    decode = 2 * (COST.a0 + COST.a2) + COST.a3 * (40 + 41)
    assert first_s == pytest.approx(chunk1 + chunk2)
    assert end_s == pytest.approx(chunk1 + chunk2 + decode)


def test_the_preset_prefills_16k_at_20k_tokens_per_second():
    first_s, _end_s = _alone(EngineOptions(), Job("a", 16_000, [], 1))
    assert 16_000 / first_s == pytest.approx(20_000, rel=0.03)


def test_a_decoding_request_shares_its_steps_with_a_prefill():
    engine = Engine(SMALL)
    first = engine.submit(_job("a", 8, 50, chain=1), 0.0)
    engine.advance(0.0)
    long = engine.submit(_job("b", 100, 1, chain=2), 0.05)
    _finish(engine, 0.05)
    assert long.first_token_s is not None
    assert first.finished_s is not None
    # 100 tokens at 31 per step beside one decode: four steps, none of them a pure decode step.
    assert long.first_token_s - 0.05 > 4 * COST.a0
    assert engine.counters.steps == 50
    assert engine.counters.generated == 51


def test_requests_of_one_instant_share_a_step():
    engine = Engine(SMALL)
    both = [engine.submit(_job(n, 8, 1, chain=c), 1.0) for c, n in enumerate("ab")]
    _finish(engine, 1.0)
    assert both[0].first_token_s == both[1].first_token_s
    assert engine.counters.steps == 1


def test_a_seat_limit_makes_requests_wait_in_order():
    engine = Engine(replace(SMALL, max_num_seqs=1))
    requests = [engine.submit(_job(n, 8, 5, chain=c), 0.0) for c, n in enumerate("abc")]
    events = _finish(engine)
    assert [e.request for e in events if isinstance(e, Finished)] == requests
    firsts = [r.scheduled_s for r in requests]
    ends = [r.finished_s for r in requests]
    assert firsts[1:] == ends[:-1]


def test_prefix_hits_are_whole_blocks_and_never_the_full_prompt():
    engine = Engine(SMALL)
    engine.submit(_job("a", 16, 1), 0.0)
    _finish(engine)
    same = engine.submit(_job("b", 16, 1), 10.0)
    longer = engine.submit(_job("c", 19, 1), 10.0)
    other = engine.submit(_job("d", 16, 1, chain=9), 10.0)
    _finish(engine, 10.0)
    assert [r.local_hit_tokens for r in (same, longer, other)] == [12, 16, 0]
    counters = engine.counters
    assert counters.prompt_computed + counters.prompt_local_hits == 16 + 16 + 19 + 16
    assert (counters.prefix_queries, counters.prefix_hits) == (67, 28)


def test_generated_tokens_become_cached_blocks():
    engine = Engine(SMALL)
    engine.submit(_job("a", 10, 11), 0.0)
    _finish(engine)
    # 10 + 11 tokens, the last one without KV: 20 tokens are five full blocks.
    next_turn = engine.submit(_job("b", 30, 1), 10.0)
    _finish(engine, 10.0)
    assert next_turn.local_hit_tokens == 20


def test_out_of_blocks_preempts_the_latest_and_everybody_still_finishes():
    engine = Engine(replace(SMALL, num_blocks=16, max_model_len=64))
    early = engine.submit(_job("a", 20, 30, chain=1), 0.0)
    late = engine.submit(_job("b", 20, 30, chain=2), 0.0)
    _finish(engine)
    assert engine.counters.preemptions == late.preemptions > 0
    assert early.preemptions == 0
    assert (early.output_tokens, late.output_tokens) == (30, 30)
    assert late.finished_s is not None
    assert early.finished_s is not None
    assert late.finished_s > early.finished_s
    engine.pool.check()


def test_a_preempted_request_comes_back_before_those_who_wait():
    engine = Engine(replace(SMALL, num_blocks=16, max_model_len=64))
    requests = [engine.submit(_job(n, 20, 30, chain=c), 0.0) for c, n in enumerate("ab")]
    # Too big to run beside either, so it matters who is first in the queue.
    requests.append(engine.submit(_job("c", 56, 1, chain=9), 0.0))
    events = _finish(engine)
    assert requests[1].preemptions > 0
    assert [e.request for e in events if isinstance(e, Finished)] == requests


def test_nobody_overtakes_a_head_that_does_not_fit():
    engine = Engine(replace(SMALL, num_blocks=32, max_model_len=128))
    engine.submit(_job("a", 60, 20, chain=1), 0.0)
    big = engine.submit(_job("b", 100, 1, chain=2), 0.0)
    small = engine.submit(_job("c", 4, 1, chain=3), 0.0)
    _finish(engine)
    assert big.scheduled_s is not None
    assert small.scheduled_s is not None
    assert 0.0 < big.scheduled_s <= small.scheduled_s


def test_an_aborted_prefill_leaves_its_finished_chunks_cached():
    engine = Engine(SMALL)
    request = engine.submit(_job("a", 96, 5), 0.0)
    engine.advance(0.0)
    second_chunk_s = engine.next_step_s() + 1e-3
    engine.advance(second_chunk_s)
    engine.abort(request, second_chunk_s)
    events = _finish(engine, second_chunk_s)
    assert [type(e) for e in events] == [Finished]
    assert request.finish_reason == "abort"
    assert engine.pool.free_blocks == 64
    again = engine.submit(_job("b", 96, 1), 10.0)
    _finish(engine, 10.0)
    assert again.local_hit_tokens == 32


def test_aborting_what_is_finished_changes_nothing():
    engine = Engine(SMALL)
    request = engine.submit(_job("a", 8, 2), 0.0)
    _finish(engine)
    engine.abort(request, 5.0)
    assert request.finish_reason == "length"
    assert engine.counters.finished["abort"] == 0


def test_an_idle_engine_has_no_next_event():
    engine = Engine(SMALL)
    assert engine.next_event_s() == math.inf
    engine.submit(_job("a", 8, 1), 3.0)
    assert engine.next_event_s() == 3.0


def test_a_cache_smaller_than_one_request_is_refused():
    with pytest.raises(ValueError, match="max_model_len 256 exceeds"):
        replace(SMALL, num_blocks=8)


@given(
    first=st.floats(1e-3, 1.0),
    growth=st.floats(0.0, 1e-3),
    steps=st.integers(1, 5_000),
    share=st.floats(0.0, 1.1),
)
def test_a_runs_closed_form_counts_exactly_the_steps_that_are_over(first, growth, steps, share):
    run = DecodeRun(5.0, first, growth, steps)
    now_s = 5.0 + share * (run.end_s(steps) - 5.0)
    done = run.steps_by(now_s)
    assert 0 <= done <= steps
    assert done == 0 or run.end_s(done) <= now_s
    assert done == steps or run.end_s(done + 1) > now_s
    assert run.steps_by(run.end_s(steps)) == steps
    if done < steps:
        assert run.after(done).end_s(steps - done) == pytest.approx(run.end_s(steps))


_arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 1.0),  # arrival, s
        st.integers(1, 60),  # prompt, tokens
        st.integers(1, 40),  # output, tokens
        st.integers(0, 3),  # chain
        st.one_of(st.none(), st.none(), st.floats(0.0, 0.5)),  # abort after, s
    ),
    min_size=1,
    max_size=12,
)


def _replay(options: EngineOptions, arrivals, look_every_s: float | None):
    """Run jobs to the end, also looking at the model in between when told to."""
    engine = Engine(options)
    todo: list[tuple[float, int, Job | None]] = []
    requests: dict[int, SimRequest] = {}
    for index, (at_s, prompt, output, chain, abort_s) in enumerate(arrivals):
        todo.append((at_s, index, _job(str(index), prompt, output, chain=chain)))
        if abort_s is not None:
            todo.append((at_s + abort_s, index, None))
    for at_s, index, job in sorted(todo, key=lambda item: (item[0], item[1], item[2] is None)):
        _run_until(engine, at_s, look_every_s)
        if job is None:
            engine.abort(requests[index], at_s)
        else:
            requests[index] = engine.submit(job, at_s)
        engine.pool.check()
    _run_until(engine, math.inf, look_every_s)
    engine.pool.check()
    assert engine.pool.free_blocks == options.num_blocks
    assert not engine.running
    assert not engine.waiting
    return [(r.finish_reason, r.output_tokens, r.finished_s) for _i, r in sorted(requests.items())]


def _run_until(engine: Engine, until_s: float, look_every_s: float | None) -> None:
    while (due_s := engine.next_event_s()) < until_s:
        if look_every_s is not None and engine.running:
            due_s = min(due_s, engine.next_step_s() + look_every_s)
        engine.advance(due_s)


@settings(deadline=None, max_examples=60)
@given(arrivals=_arrivals, blocks=st.integers(25, 80), budget=st.integers(1, 64))
def test_any_mix_of_requests_ends_and_gives_every_block_back(arrivals, blocks, budget):
    options = replace(SMALL, num_blocks=blocks, max_model_len=100, max_num_batched_tokens=budget)
    for (reason, tokens, _at_s), (_t, _p, output, _c, abort_s) in zip(
        _replay(options, arrivals, None), arrivals, strict=True
    ):
        assert reason in ("length", "abort")
        assert tokens == output or abort_s is not None


@settings(deadline=None, max_examples=60)
@given(arrivals=_arrivals, blocks=st.integers(25, 80), every_s=st.floats(0.0, 0.05))
def test_looking_more_often_changes_nothing(arrivals, blocks, every_s):
    options = replace(SMALL, num_blocks=blocks, max_model_len=100)
    rarely, often = _replay(options, arrivals, None), _replay(options, arrivals, every_s)
    for seldom, seen in zip(rarely, often, strict=True):
        assert seldom[:2] == seen[:2]
        assert seldom[2] == pytest.approx(seen[2], abs=1e-6)


def test_the_first_token_is_announced_once():
    engine = Engine(SMALL)
    request = engine.submit(_job("a", 40, 4), 0.0)
    first, finished = _finish(engine)
    assert isinstance(first, FirstToken)
    assert isinstance(finished, Finished)
    assert first.request is finished.request is request
