"""Histograms of an engine's steps: against its own counters, and against the times of requests."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.engine.engine import Engine
from replayer.engine.iterations import Iterations, Spread
from replayer.engine.types import SimRequest
from tests.support.examples import examples
from tests.support.jobs import SMALL, finish, make_job

SIZES = st.tuples(st.integers(1, 60), st.integers(0, 30), st.floats(0.0, 2.0))


def counted(sizes: list[tuple[int, int, float]], look_s: float) -> tuple[Engine, list[SimRequest]]:
    """An engine with few blocks, after these requests; it is looked at every so many seconds."""
    engine = Engine(replace(SMALL, num_blocks=24, max_model_len=96))
    engine.iterations = Iterations()
    requests = []
    for number, (prompt, output, at_s) in enumerate(sorted(sizes, key=lambda one: one[2])):
        requests.append(engine.submit(make_job(str(number), prompt, output, chain=number), at_s))
    at_s = 2.0
    while look_s and any(request.finish_reason is None for request in requests):
        engine.advance(at_s)
        at_s += look_s
    finish(engine, at_s)
    return engine, requests


def test_chunks_that_put_nothing_out_are_not_counted() -> None:
    engine, (request,) = counted([(80, 10, 0.0)], 0.0)
    found = engine.iterations
    assert found is not None
    assert engine.counters.steps == 3 + 9, "chunks of 32, 32 and 16 tokens"
    assert (found.tokens.count, found.tokens.sum) == (1 + 9, 80 + 10)
    assert dict(found.tokens.cumulated())["64.0"] == 9, "all but the last chunk, with the prompt"
    assert request.first_token_s is not None
    assert request.finished_s is not None
    assert found.gaps.count == 9
    assert found.gaps.sum == pytest.approx(request.finished_s - request.first_token_s)


def test_the_mean_gap_is_the_time_of_a_step() -> None:
    engine, requests = counted([(4, 20, 0.0), (4, 20, 0.0), (4, 20, 0.0)], 0.0)
    found, (one, *_) = engine.iterations, requests
    assert found is not None
    assert one.finished_s is not None
    assert one.first_token_s is not None
    assert (found.tokens.count, found.gaps.count) == (20, 3 * 19)
    wall_s = found.gaps.sum / found.gaps.count
    assert wall_s * (found.tokens.count - 1) == pytest.approx(one.finished_s - one.first_token_s)


@settings(max_examples=examples(100))
@given(sizes=st.lists(SIZES, min_size=1, max_size=8), look_s=st.floats(0.01, 1.0))
def test_every_token_is_counted_however_often_one_looks(
    sizes: list[tuple[int, int, float]], look_s: float
) -> None:
    engine, requests = counted(sizes, look_s)
    found, done = engine.iterations, engine.counters
    assert found is not None
    assert found.tokens.sum == done.generated + done.prompt_computed
    assert found.tokens.count <= done.steps
    assert found.gaps.count == sum(max(0, r.output_tokens - 1) for r in requests)
    lives_s = [r.finished_s - r.first_token_s for r in requests if r.finished_s and r.first_token_s]
    assert found.gaps.sum == pytest.approx(sum(lives_s), abs=1e-9), "pauses of preempted ones too"
    at_once = counted(sizes, 0.0)[0].iterations
    assert at_once is not None
    assert list(found.tokens.cumulated()) == list(at_once.tokens.cumulated())


def test_a_value_at_a_bound_is_below_it() -> None:
    spread = Spread((1, 8))
    for value, times in ((1, 2), (8, 1), (9, 3)):
        spread.observe(value, times)
    assert list(spread.cumulated()) == [("1.0", 2.0), ("8.0", 3.0), ("+Inf", 6.0)]
    assert (spread.count, spread.sum) == (6, 37)
