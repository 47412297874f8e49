"""The virtual driver: the shell's calls in the shell's order, and every request accounted for."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.admission.queue import QueueLimits
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.routing.router import Router
from proxy.core.thermal.readings import HeatLimits
from proxy.core.types import Reason, RouterConfig, Thresholds
from replayer.engine.engine import Engine
from replayer.engine.types import EngineOptions, FirstToken, Job
from replayer.virtual.arrivals import Planned
from replayer.virtual.fleet import simulate
from replayer.virtual.load import TraceTurn
from replayer.virtual.requests import Retry, VirtualOptions, VirtualRun, WayNoise

BLOCK = 512
ENGINE = EngineOptions(block_size=BLOCK, num_blocks=1000, max_model_len=1000 * BLOCK)


def _planned(session: str, blocks: int, start_s: float = 0.0, **values: Any) -> Planned:
    names = {"a": 1, "b": 2, "c": 3}
    ids = tuple(names[session] * 1000 + n for n in range(blocks))
    turn = TraceTurn(session, blocks * BLOCK + 100, 20, 100, ids, 0, (), 0.0, 0.0)
    defaults: dict[str, Any] = {"delay_s": 0.0, "wait_for": ()}
    return Planned(turn, session, start_s, **{**defaults, **values})


def _options(engines: int = 2, **values: Any) -> VirtualOptions:
    return VirtualOptions((ENGINE,) * engines, BLOCK, **values)


def _router(policy: str = "never", **values: Any) -> Router:
    return Router(
        FleetState(RouterConfig(prefill_throughput=20_000, offload_policy=policy, **values))
    )


def _run(planned: list[Planned], router: Router, options: VirtualOptions) -> VirtualRun:
    run = simulate(planned, router, options)
    assert run.drift == 0
    assert router.known.ledger.live == 0
    return run


def test_alone_it_takes_what_the_engine_takes() -> None:
    engine = Engine(ENGINE)
    engine.submit(Job("x", 20 * BLOCK + 100, list(range(20)), 20), 0.0)
    first = None
    while first is None:
        events = engine.advance(engine.next_event_s())
        first = next((e.at_s for e in events if isinstance(e, FirstToken)), None)
    row = _run([_planned("a", 20)], _router(), _options()).rows[0]
    assert row.ttft_s == pytest.approx(first)
    assert row.computed_tokens == row.prompt_tokens
    assert row.outcome == "ok"


def test_a_next_turn_waits_and_finds_its_prefix() -> None:
    planned = [
        _planned("a", 20),
        _planned("a", 24, wait_for=(0,), delay_s=3.0),
    ]
    first, second = _run(planned, _router(), _options()).rows
    assert first.end_s is not None
    assert second.arrival_s == pytest.approx(first.end_s + 3.0)
    assert second.decode == first.decode
    assert second.cached_tokens == 20 * BLOCK
    assert second.computed_tokens == 4 * BLOCK + 100


def _split(scene: PlacementView) -> Choice:
    """D is the first instance, P the second."""
    d, p = sorted(scene.free, key=lambda c: c.instance.name)[:2]
    return chosen(scene, d, p, Reason.POLICY_ALWAYS, placed=True)


def _splitting() -> Router:
    return Router(FleetState(RouterConfig(prefill_throughput=20_000)), decide=_split)


def test_an_offload_prefills_on_p_and_moves_the_kv_to_d() -> None:
    row = _run([_planned("a", 40)], _splitting(), _options()).rows[0]
    assert (row.decode, row.prefill) == ("e0", "e1")
    assert row.route_class == "HEAVY_P2P"
    assert row.external_tokens == row.prompt_tokens
    # P computes the prompt; D computes nothing but the step that samples the first token.
    assert row.computed_tokens == row.prompt_tokens
    alone = _run([_planned("a", 40)], _router(), _options()).rows[0]
    assert row.ttft_s is not None
    assert alone.ttft_s is not None
    transfer_s = ENGINE.transfer.transfer_s(row.prompt_tokens)
    assert row.ttft_s == pytest.approx(alone.ttft_s + transfer_s, abs=0.02)


def test_bytes_moved_are_counted_by_the_senders() -> None:
    run = _run([_planned("a", 40)], _splitting(), _options())
    per_token = ENGINE.transfer.bytes_per_token
    assert run.moved_bytes == run.rows[0].external_tokens * per_token


@pytest.mark.parametrize(
    ("limits", "fallback"),
    [({"prefill_timeout_s": 0.1}, "p_timeout"), ({"transfer_timeout_s": 0.1}, "transfer_timeout")],
)
def test_a_late_leg_falls_back_to_d(limits: dict[str, Any], fallback: str) -> None:
    row = _run([_planned("a", 60)], _splitting(), _options(**limits)).rows[0]
    assert row.outcome == "ok"
    assert row.fallback == fallback
    assert row.route_class == "HEAVY_COLO"
    assert row.external_tokens == 0


@pytest.mark.parametrize(
    ("slower", "hedge", "winner", "fallback"),
    [
        (20.0, True, "local", "p_late"),
        (20.0, False, None, "p_timeout"),
        (2.2, True, "peer", None),
        (1.0, True, None, None),
    ],
)
def test_a_late_p_is_hedged(
    slower: float, hedge: bool, winner: str | None, fallback: str | None
) -> None:
    """Late is twice the prediction: a much slower P loses, a little slower one is ready first.

    Without hedges a much slower one meets the prefill leg's limit, which scales with predictions.
    """
    step = ENGINE.step
    slow = replace(ENGINE, step=replace(step, a1=step.a1 * slower, a4=step.a4 * slower))
    config = RouterConfig(prefill_throughput=1 / step.a1, hedge=hedge)
    options = VirtualOptions((ENGINE, slow), BLOCK)
    row = _run([_planned("a", 40)], Router(FleetState(config), decide=_split), options).rows[0]
    assert (row.outcome, row.hedge, row.fallback) == ("ok", winner, fallback)
    assert (row.external_tokens > 0) == (fallback is None)


def test_one_that_is_late_is_tried_elsewhere_once() -> None:
    """An engine that has slowed down without a sign: the first token limit sends its request on."""
    step = ENGINE.step
    slow = replace(ENGINE, step=replace(step, a1=step.a1 * 50, a4=step.a4 * 50))
    router = Router(FleetState(RouterConfig(prefill_throughput=1 / step.a1)), decide=_first)
    row = _run([_planned("a", 40)], router, VirtualOptions((slow, ENGINE), BLOCK)).rows[0]
    assert (row.outcome, row.decode, row.retries) == ("ok", "e1", 1)


def _first(view: PlacementView) -> Choice:
    d = min(view.free, key=lambda c: c.instance.name)
    return chosen(view, d, None, Reason.D_IDLE, placed=True)


def test_a_client_that_waits_too_long_goes_and_its_session_goes_on() -> None:
    planned = [_planned("a", 200), _planned("a", 2, wait_for=(0,), delay_s=1.0)]
    first, second = _run(planned, _router(), _options(timeout_s=2.0)).rows
    assert first.outcome == "timeout"
    assert first.ttft_s is first.end_s is None
    assert second.arrival_s == pytest.approx(3.0)
    assert second.outcome == "ok"


def test_a_rejected_request_waits_in_the_queue_for_its_turn() -> None:
    planned = [_planned("a", 40), _planned("b", 40, 0.1)]
    first, second = _run(planned, _router(thresholds=BUSY), _options(1)).rows
    assert (second.outcome, second.rejects) == ("ok", 0)
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.ttft_s > first.ttft_s, "it began when the first prefill had ended"


BUSY = Thresholds(active_prefill_tokens_threshold=1)


@pytest.mark.parametrize(("again", "outcome"), [(True, "ok"), (False, "rejected")])
def test_a_rejected_request_comes_back_after_retry_after(again: bool, outcome: str) -> None:
    planned = [_planned("a", 40), _planned("b", 40, 0.1)]
    router = _router(thresholds=BUSY)
    options = _options(1, retry=Retry(None if again else 0), queue=QueueLimits(0, 0, 0.0))
    second = _run(planned, router, options).rows[1]
    assert second.outcome == outcome
    assert second.rejects == 1 if not again else second.rejects >= 1
    if again:
        assert second.ttft_s is not None
        assert second.ttft_s > 1.0


def test_estimates_may_be_wrong_without_harm() -> None:
    planned = [_planned("a", 20), _planned("a", 24, wait_for=(0,))]
    rows = _run(planned, _router(), _options(estimate_factor=1.3)).rows
    assert rows[0].estimated_new_tokens == round(rows[0].prompt_tokens * 1.3)
    assert rows[1].cached_tokens == 20 * BLOCK


class _Observer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_prefill_done(self, *values: Any) -> None:
        self.calls.append("prefill_done")

    def on_first_token(self, *values: Any) -> None:
        self.calls.append("first_token")

    def on_finish(self, *values: Any) -> None:
        self.calls.append("finish")

    def on_failed(self, *values: Any) -> None:
        self.calls.append("failed")


def test_observers_hear_the_course_of_a_request() -> None:
    observer = _Observer()
    simulate([_planned("a", 40)], _splitting(), _options(), [observer])
    assert observer.calls == ["prefill_done", "first_token", "finish"]


def test_observers_hear_of_a_client_that_left() -> None:
    observer = _Observer()
    simulate([_planned("a", 200)], _router(), _options(timeout_s=1.0), [observer])
    assert observer.calls == ["failed"]


def test_the_router_hears_how_much_kv_there_is() -> None:
    router = _router()
    simulate([_planned("a", 40)], router, _options(1))
    assert router.known.gate.kv_tokens("e0") == 1000 * BLOCK


def test_equal_runs_give_equal_rows() -> None:
    planned = [_planned(s, 30 + n, 0.2 * n) for n, s in enumerate("abcabcabc")]
    runs = [_run(planned, _router("always"), _options(3)).rows for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_run_can_be_cut() -> None:
    planned = [_planned("a", 20), _planned("b", 20, 100.0)]
    run = simulate(planned, _router(), replace(_options(), until_s=50.0))
    assert len(run.rows) == 1
    assert run.rows[0].end_s is not None


def test_engines_without_gauges_leave_the_size_of_their_kv_unknown() -> None:
    router = _router()
    run = _run([_planned("a", 40)], router, _options(1, reports_kv=False))
    assert router.known.gate.kv_tokens("e0") is None
    assert run.rows[0].outcome == "ok"


def test_an_engine_that_joins_late_serves_from_then_on() -> None:
    planned = [_planned("abc"[n % 3], 30, 1.0 * n) for n in range(12)]
    rows = _run(planned, _router(placement="round-robin"), _options(2, joins_s=(0.0, 5.5))).rows
    assert {row.decode for row in rows if row.arrival_s < 5.5} == {"e0"}
    assert "e1" in {row.decode for row in rows if row.arrival_s > 5.5}


def test_the_way_has_the_same_noise_under_every_policy() -> None:
    planned = [_planned(s, 20, 20.0 * n) for n, s in enumerate("abcabc")]
    near, far = (_options(2, way=WayNoise(mean_s)) for mean_s in (0.0, 0.02))

    def noise_s(policy: str) -> list[float]:
        runs = [_run(planned, _router(policy), options).rows for options in (near, far)]
        pairs = zip(*runs, strict=True)
        return [(b.ttft_s or 0.0) - (a.ttft_s or 0.0) for a, b in pairs]

    drawn = noise_s("never")
    assert drawn == pytest.approx(noise_s("cost"))
    assert drawn == pytest.approx([WayNoise(0.02).delay_s(n, s, 1) for n, s in enumerate("abcabc")])
    assert len({round(one, 9) for one in drawn}) == 6


def test_noise_has_its_mean() -> None:
    drawn = [WayNoise(0.02).delay_s(index, "s", 1) for index in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(0.02, rel=0.03)
    assert min(drawn) >= 0.0


class _LooseLimits:
    """From the first request's end on, limits that forbid nothing."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def on_finish(self, *args: object) -> None:
        del args
        for name in ("e0", "e1"):
            self._router.known.limit_heat(name, HeatLimits(cap=10**6))


@pytest.mark.parametrize("policy", ["cost", "seed-heuristic"])
def test_limits_that_limit_nothing_change_no_row(policy: str) -> None:
    """The gate, the weights and the prices of heat are asked, and no decision differs."""
    planned = [
        _planned("abc"[n % 3], 20 + 8 * (n // 3), 0.2 * n, wait_for=(n - 3,) if n >= 3 else ())
        for n in range(18)
    ]
    off, limited = _router(policy), _router(policy)
    rows = simulate(planned, off, _options()).rows
    assert simulate(planned, limited, _options(), [_LooseLimits(limited)]).rows == rows
    assert off.known.heat.is_cool
    assert not limited.known.heat.is_cool
