"""Targets that an instance would miss: of a further request, or of what runs there."""

from __future__ import annotations

import math
import random

import pytest

from proxy.core.admission.targets import (
    FEW_STREAMS,
    GOES_ON_S,
    LASTS_S,
    MOST_LANES,
    WAIT_RATIO,
    Targets,
)
from proxy.core.known.fleet_state import FleetState
from proxy.core.latency.pace import RECENT_S
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import Instance, Reject, RejectReason, RequestFacts, RouterConfig

CONFIG = RouterConfig(prefill_throughput=20_000, late="refuse", ttft_slo_s=2.0, tpot_slo_s=0.05)
NAMES = ("a", "b")
LONG = 40_000
"""Tokens of a prompt that takes longer than others may wait."""


def router(config: RouterConfig = CONFIG) -> Router:
    made = Router(FleetState(config))
    for name in NAMES:
        made.known.add(Instance(name, f"http://{name}"))
    return made


def facts(tokens: int = LONG, session: str | None = None) -> RequestFacts:
    return RequestFacts("m", session, tokens, [], 16.0)


def placed(of: Router, now_s: float, tokens: int = LONG) -> Route:
    answer = of.admit(facts(tokens), now_s)
    assert isinstance(answer, Route)
    return answer


def test_a_request_waits_while_every_first_token_would_be_late() -> None:
    one = router()
    first, second = placed(one, 0.0), placed(one, 0.0)
    assert {first.decode.name, second.decode.name} == set(NAMES)
    refused = one.admit(facts(), 0.0)
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.TTFT_SLO
    assert {check.instance for check in refused.past} == set(NAMES)
    may_wait_s = WAIT_RATIO * CONFIG.ttft_slo_s
    alone_s = one.known.latency.of("a").pace().wait_s(0.0)
    assert refused.wait_s == pytest.approx(alone_s - may_wait_s)
    assert isinstance(one.admit(facts(), refused.wait_s + 0.01), Route), "as was promised"


def test_what_has_begun_to_answer_is_out_of_the_way() -> None:
    one = router()
    first, _ = placed(one, 0.0), placed(one, 0.0)
    assert isinstance(one.admit(facts(), 1.0), Reject)
    one.prefill_done(first, facts(), 1.0)
    one.first_token(first, facts(), 1.0)
    assert placed(one, 1.0).decode is first.decode


def test_without_it_all_are_placed() -> None:
    one = router(RouterConfig(prefill_throughput=20_000))
    for _ in range(20):
        placed(one, 0.0)
    assert one.known.targets.patience_s == math.inf


def test_it_is_switched_while_the_proxy_runs() -> None:
    one = router()
    for _ in NAMES:
        placed(one, 0.0)
    assert isinstance(one.admit(facts(), 0.0), Reject)
    one.known.reconfigure(RouterConfig(prefill_throughput=20_000))
    placed(one, 0.0)
    one.known.reconfigure(CONFIG)
    assert isinstance(one.admit(facts(), 0.0), Reject)


def streaming(one: Router, seconds: int, part: float) -> tuple[float, list[Route]]:
    """Prompts one after the other for this part of the time; the time then, and what streams."""
    streams: list[Route] = []
    for second in range(seconds):
        if len(streams) >= 10:
            one.finish(streams.pop(0), float(second), 160)
        tokens = round(20_000 * part)
        answer = one.admit(facts(tokens), float(second))
        if isinstance(answer, Route):
            one.prefill_done(answer, facts(tokens), second + part)
            one.first_token(answer, facts(tokens), second + part)
            streams.append(answer)
    return float(seconds), streams


def alone(config: RouterConfig) -> Router:
    made = Router(FleetState(config))
    made.known.add(Instance("a", "http://a"))
    return made


def test_streams_are_not_slowed_beyond_their_target() -> None:
    one = alone(CONFIG)
    now_s, streams = streaming(one, 300, 0.98)
    refused = one.admit(facts(100), now_s)
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.TPOT_SLO
    pace, load = one.known.latency.of("a").pace(), one.known.ledger.load("a")
    step_s = pace.step_s(load.decode_tokens)
    few_s = FEW_STREAMS * pace.step_s(load.decode_tokens // load.running_requests)
    assert step_s / (1.0 - pace.busy_ratio(now_s)) > max(few_s, CONFIG.tpot_slo_s)
    assert isinstance(one.admit(facts(100), now_s + RECENT_S / 2), Reject), "nothing has ended"
    for stream in streams[1:]:
        one.finish(stream, now_s, 160)
    assert isinstance(one.admit(facts(100), now_s + RECENT_S / 2), Route), "less is computed now"


def test_a_target_out_of_reach_leaves_room_for_a_few() -> None:
    """Engines that are too slow for it, even alone, would serve one request at a time."""
    slow = RouterConfig(prefill_throughput=20_000, late="refuse", tpot_slo_s=1e-6)
    one = alone(slow)
    first = placed(one, 0.0, 100)
    one.prefill_done(first, facts(100), 0.1)
    one.first_token(first, facts(100), 0.1)
    assert isinstance(one.admit(facts(100), 0.2), Route)


def test_a_lack_of_room_lasts_that_comes_again_and_again() -> None:
    targets = Targets(CONFIG)
    targets.lacks_room("m", 100.0)
    assert not targets.lasts("m", 100.0), "it may be a burst's"
    targets.lacks_room("m", 100.0 + LASTS_S)
    assert targets.lasts("m", 100.0 + LASTS_S)
    assert not targets.lasts("other", 100.0 + LASTS_S)
    over_s = 100.0 + LASTS_S + GOES_ON_S
    assert targets.lasts("m", over_s)
    assert not targets.lasts("m", over_s + 0.1)
    targets.lacks_room("m", over_s + 0.1)
    assert not targets.lasts("m", over_s + 0.1), "another one"
    for number in range(2 * MOST_LANES):
        targets.lacks_room(f"m{number}", 200.0)
    assert len(targets._full) == MOST_LANES


def test_where_it_lasts_streams_are_bounded_by_their_number() -> None:
    """At once: what prefills take is a mean over a minute, which a burst outruns."""
    one = alone(CONFIG)
    streaming(one, 60, 0.3)
    state = one.known.fleet.states.of("a")
    streams = state.account.load().running_requests
    assert streams
    assert one.known.targets.missed(state, 61.0) is None
    assert one.known.targets.missed(state, 61.0, 5_000.0) is None, "long answers are many streams"
    missed = one.known.targets.missed(state, 61.0, 10.0)
    assert missed is not None
    assert missed[0] is RejectReason.TPOT_SLO
    assert 0.0 < missed[1] < 10.0, "until some have ended"


@pytest.mark.parametrize("seed", range(5))
def test_decisions_are_the_same_until_one_is_refused(seed: int) -> None:
    pick = random.Random(seed)
    with_it, without = router(), router(RouterConfig(prefill_throughput=20_000))
    now_s, decided = 0.0, 0
    live: list[tuple[Route, Route, RequestFacts]] = []
    while True:
        now_s += pick.expovariate(0.8)
        asked = facts(pick.choice([200, 5_000, 20_000, 60_000]), f"s{pick.randrange(20)}")
        one, other = with_it.admit(asked, now_s), without.admit(asked, now_s)
        assert isinstance(other, Route)
        if isinstance(one, Reject):
            break
        assert (one.decode.name, one.prefill, one.reason) == (
            other.decode.name,
            other.prefill,
            other.reason,
        )
        live.append((one, other, asked))
        decided += 1
        for route, same, of in [each for each in live if pick.random() < 0.3]:
            for at, which in ((with_it, route), (without, same)):
                at.prefill_done(which, of, now_s)
                at.first_token(which, of, now_s)
                at.finish(which, now_s, 50)
            live.remove((route, same, of))
    assert decided > 3
