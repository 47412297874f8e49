"""The engine model: step times, batching, prefix hits, preemption, conservation."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.engine.costs import DecodeRun
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Finished, FirstToken, Job, SimRequest
from tests.support.examples import examples
from tests.support.jobs import SMALL, finish, make_job


def test_prefix_hits_are_whole_blocks_and_never_the_full_prompt():
    engine = Engine(SMALL)
    engine.submit(make_job("a", 16, 1), 0.0)
    finish(engine)
    same = engine.submit(make_job("b", 16, 1), 10.0)
    longer = engine.submit(make_job("c", 19, 1), 10.0)
    other = engine.submit(make_job("d", 16, 1, chain=9), 10.0)
    finish(engine, 10.0)
    assert [r.local_hit_tokens for r in (same, longer, other)] == [12, 16, 0]
    counters = engine.counters
    assert counters.prompt_computed + counters.prompt_local_hits == 16 + 16 + 19 + 16
    assert (counters.prefix_queries, counters.prefix_hits) == (67, 28)


def test_generated_tokens_become_cached_blocks():
    engine = Engine(SMALL)
    engine.submit(make_job("a", 10, 11), 0.0)
    finish(engine)
    # 10 + 11 tokens, the last one without KV: 20 tokens are five full blocks.
    next_turn = engine.submit(make_job("b", 30, 1), 10.0)
    finish(engine, 10.0)
    assert next_turn.local_hit_tokens == 20


def test_an_aborted_prefill_leaves_its_finished_chunks_cached():
    engine = Engine(SMALL)
    request = engine.submit(make_job("a", 96, 5), 0.0)
    engine.advance(0.0)
    second_chunk_s = engine.next_step_s() + 1e-3
    engine.advance(second_chunk_s)
    engine.abort(request, second_chunk_s)
    events = finish(engine, second_chunk_s)
    assert [type(e) for e in events] == [Finished]
    assert request.finish_reason == "abort"
    assert engine.pool.free_blocks == 64
    again = engine.submit(make_job("b", 96, 1), 10.0)
    finish(engine, 10.0)
    assert again.local_hit_tokens == 32


def test_aborting_what_is_finished_changes_nothing():
    engine = Engine(SMALL)
    request = engine.submit(make_job("a", 8, 2), 0.0)
    finish(engine)
    engine.abort(request, 5.0)
    assert request.finish_reason == "length"
    assert engine.counters.finished["abort"] == 0


def test_an_idle_engine_has_no_next_event():
    engine = Engine(SMALL)
    assert engine.next_event_s() == math.inf
    engine.submit(make_job("a", 8, 1), 3.0)
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
        todo.append((at_s, index, make_job(str(index), prompt, output, chain=chain)))
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


@settings(deadline=None, max_examples=examples(60))
@given(arrivals=_arrivals, blocks=st.integers(25, 80), budget=st.integers(1, 64))
def test_any_mix_of_requests_ends_and_gives_every_block_back(arrivals, blocks, budget):
    options = replace(SMALL, num_blocks=blocks, max_model_len=100, max_num_batched_tokens=budget)
    for (reason, tokens, _at_s), (_t, _p, output, _c, abort_s) in zip(
        _replay(options, arrivals, None), arrivals, strict=True
    ):
        assert reason in ("length", "abort")
        assert tokens == output or abort_s is not None


@settings(deadline=None, max_examples=examples(60))
@given(arrivals=_arrivals, blocks=st.integers(25, 80), every_s=st.floats(0.0, 0.05))
def test_looking_more_often_changes_nothing(arrivals, blocks, every_s):
    options = replace(SMALL, num_blocks=blocks, max_model_len=100)
    rarely, often = _replay(options, arrivals, None), _replay(options, arrivals, every_s)
    for seldom, seen in zip(rarely, often, strict=True):
        assert seldom[:2] == seen[:2]
        assert seldom[2] == pytest.approx(seen[2], abs=1e-6)


def test_the_first_token_is_announced_once():
    engine = Engine(SMALL)
    request = engine.submit(make_job("a", 40, 4), 0.0)
    first, finished = finish(engine)
    assert isinstance(first, FirstToken)
    assert isinstance(finished, Finished)
    assert first.request is finished.request is request
