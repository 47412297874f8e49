"""How long steps take."""

from dataclasses import replace

import pytest

from replayer.engine.costs import MOCKER, IntakeCost
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, Job
from tests.support.jobs import COST, SMALL, finish, make_job


def _alone(options: EngineOptions, job: Job) -> tuple[float, float]:
    """Return first-token and end time of a job on an idle engine."""
    engine = Engine(options)
    request = engine.submit(job, 0.0)
    finish(engine)
    assert request.first_token_s is not None
    assert request.finished_s is not None
    return request.first_token_s, request.finished_s


def test_step_times_follow_the_formula():
    first_s, end_s = _alone(SMALL, make_job("a", 40, 3))
    chunk1 = COST.a0 + COST.a1 * 32 + COST.a4 * 32 * 16
    chunk2 = COST.a0 + COST.a1 * 8 + COST.a4 * 8 * (32 + 4)
    decode = 2 * (COST.a0 + COST.a2) + COST.a3 * (40 + 41)
    assert first_s == pytest.approx(chunk1 + chunk2)
    assert end_s == pytest.approx(chunk1 + chunk2 + decode)


def test_the_preset_prefills_16k_at_20k_tokens_per_second():
    first_s, _end_s = _alone(EngineOptions(), Job("a", 16_000, [], 1))
    assert 16_000 / first_s == pytest.approx(20_000, rel=0.03)


def test_a_step_that_does_both_takes_both_of_an_engine_that_computes_them_in_turn() -> None:
    prompt_s, token_s = MOCKER.step_s(2_000, 9e6, 0, 0), MOCKER.step_s(0, 0.0, 3, 100_000)
    assert prompt_s == pytest.approx(4e-3 + 2_000 / 20_000)
    assert token_s == pytest.approx(0.01 + 3e-3)
    assert MOCKER.step_s(2_000, 9e6, 3, 100_000) == pytest.approx(prompt_s + token_s)
    assert MOCKER.step_s(2_000, 9e6, 0, 0, firsts=1) == pytest.approx(prompt_s + 0.01)


@pytest.mark.parametrize(
    "options",
    [SMALL, replace(SMALL, step=MOCKER, intake=IntakeCost(0.5, 1e-3))],
    ids=["with-context", "in-turn"],
)
@pytest.mark.parametrize("prompt_tokens", [1, 32, 33, 200])
def test_a_prompt_alone_takes_what_the_options_say(
    options: EngineOptions, prompt_tokens: int
) -> None:
    first_s, _end_s = _alone(options, make_job("a", prompt_tokens, 2))
    assert first_s == pytest.approx(options.alone_s(prompt_tokens))


def test_a_fresh_engine_is_slow_for_so_many_steps_that_prefill() -> None:
    engine = Engine(replace(SMALL, warm_up_steps=2, warm_up_factor=5.0))
    took = []
    for number in range(3):
        start_s = 10.0 * number
        request = engine.submit(make_job("a", 8, 2, chain=number), start_s)
        finish(engine, start_s)
        assert request.first_token_s is not None
        assert request.finished_s is not None
        took.append((request.first_token_s - start_s, request.finished_s - request.first_token_s))
    (first_s, decode_s), second, third = took
    assert first_s == pytest.approx(5.0 * third[0])
    assert second[0] == pytest.approx(first_s)
    assert decode_s == pytest.approx(third[1]), "only steps that prefill"


def test_the_way_comes_before_the_queue() -> None:
    there_s, _end_s = _alone(SMALL, replace(make_job("a", 8, 2), way_s=0.25))
    assert there_s == pytest.approx(0.25 + SMALL.alone_s(8))
