"""The rivals' laws at chosen states."""

from __future__ import annotations

import pytest

from bench.planner.rules import rivals
from bench.planner.rules.policy import Iteration, Mean, Traffic, View
from bench.planner.rules.rivals import RIVALS
from tests.bench.planner.runs_for_tests import CONTEXT


def view(*engines: Iteration, now_s: float = 15.0, **rest: float) -> View:
    n = len(engines)
    traffic = Traffic(**{name: Mean(value, 10) for name, value in rest.items()})
    return View(now_s, n, n, engines, traffic)


def engine(running: int = 0, queued: int = 0, kv: int = 0, waiting: int = 0) -> Iteration:
    return Iteration(running, queued, kv, 0, waiting)


def test_in_flight_counts_running_and_queued() -> None:
    law = rivals.KedaInflight(CONTEXT)
    assert law.wish(view(engine(20, 10), engine(20))) == 4
    assert rivals.KedaInflight(CONTEXT, running=64).wish(view(engine(20, 10))) == 1


def test_one_queued_request_is_a_replica() -> None:
    law = rivals.KedaQueue(CONTEXT)
    assert law.wish(view(engine(16, 5), engine(16))) == 5
    assert law.wish(view(engine(40), engine(40))) == 5


def test_saturation_is_a_mean_unless_it_is_of_the_pool() -> None:
    full = view(engine(kv=80_000), engine(kv=80_000), engine(kv=80_000))
    assert rivals.KedaSaturation(CONTEXT, running=0).wish(full) == 2  # 1 / 0.7, rounded up
    assert rivals.KedaSaturation(CONTEXT, running=0, pool=True).wish(full) == 5
    assert rivals.KedaSaturation(CONTEXT).wish(view(engine(64, queued=5))) == 4


def test_the_token_law_takes_a_prompt_s_prefill_off_the_slo() -> None:
    law = rivals.KedaTokens(CONTEXT)
    # 6 s of backlog over 2 s - 20,000 tokens / 20,000 per second
    assert law.wish(view(engine(waiting=120_000), isl_tokens=20_000.0)) == 6
    # half of it is cached
    assert law.wish(view(engine(waiting=120_000), hit_ratio=0.5)) == 3
    assert rivals.KedaTokens(CONTEXT, threshold=1.5).wish(view(engine(waiting=120_000))) == 4
    assert law.wish(view(engine(kv=80_000), engine(kv=90_000), engine(kv=98_000))) == 4


@pytest.mark.parametrize(
    ("signal", "ready", "n", "wish"),
    [(0.5, 4, 4, 4), (1.1, 4, 4, 8), (1.1, 2, 4, 4), (0.2, 4, 4, 2), (0.0, 4, 4, 0)],
)
def test_the_slo_law_credits_what_starts(signal: float, ready: int, n: int, wish: int) -> None:
    assert rivals.LlmdSlo(CONTEXT).wished(signal, ready, n) == wish


def test_the_slo_law_looks_at_the_tail_of_a_minute() -> None:
    law = rivals.LlmdSlo(CONTEXT, tail=2.0)
    assert law.wish(view(engine(), engine(), ttft_ms=1100.0)) == 4  # signal 1.1
    late = view(engine(), engine(), now_s=200.0, ttft_ms=500.0)
    assert law.wish(late) == 2  # 0.5 is between both limits: what was long ago is forgotten
    promised = rivals.LlmdSlo(CONTEXT, predicted=True)
    assert promised.wish(view(engine(waiting=44_000))) == 2  # 2.2 s of 2 s


def test_an_hpa_on_kv() -> None:
    law = rivals.HpaKv(CONTEXT)
    assert law.wish(view(engine(kv=90_000), engine(kv=90_000))) == 3
    assert law.wish(view(engine(queued=9))) == 5


def test_a_wish_is_bounded_and_follows_the_autoscaler() -> None:
    law = rivals.KedaInflight(CONTEXT)
    assert law.replicas(view(*[engine(100)] * 6)) == 10
    assert law.replicas(view(*[engine()] * 10, now_s=30.0)) == 10  # the window of 300 s


@pytest.mark.parametrize("name", [name for name in RIVALS if not name.startswith("dynamo-")])
def test_every_setting_of_every_rival_is_one_of_its_own(name: str) -> None:
    rival = RIVALS[name]
    for settings in rival.settings:
        assert rival.make(CONTEXT, **settings).initial_tick_ms() == 15_000
