"""How long steps take."""

import pytest

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
