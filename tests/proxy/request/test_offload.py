"""The race of P and D: every order of ends, and a cancel at every moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core.config import RouterConfig
from proxy.core.connectors.base import Edits
from proxy.core.fleet.retries import Budget
from proxy.core.placement.scene import Choice, PlacementView, chosen
from proxy.core.routing.request_flow import (
    LegCaps,
    LegFailure,
    RequestFlow,
    SendHedge,
    SendPrefill,
    State,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind, Fallback, Instance, Reason, RequestFacts
from proxy.protocol.errors import UpstreamFailure
from proxy.request import offload
from proxy.request.offload import PrefillFailed, PrefillRace
from proxy.telemetry.record import RequestRecord

EDITS = Edits({"kv": 1})
GONE = PrefillFailed(Fallback.P_ERROR)
OOPS = UpstreamFailure(FailureKind.RESET, "oops")


class Answer:
    """Stands for an instance's answer: the race only closes it."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def flow_of(*, hedge: bool) -> RequestFlow:
    def choose(view: PlacementView) -> Choice:
        d, p = view.free[0], view.free[1]
        return chosen(view, d, p, Reason.P_IDLE_D_BUSY, placed=True)

    router = Router(RouterConfig(prefill_throughput=20_000.0, hedge=hedge), choose)
    for name in ("d", "p"):
        router.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
    facts = RequestFacts("m", "s", 30_000, [], 64.0)
    route = router.admit(facts, 0.0)
    assert isinstance(route, Route)
    caps = LegCaps(120.0, 120.0, 30.0)
    return RequestFlow(router, Budget(), facts, route, caps, 0.0, streams=True)


class LatencyTracker:
    """Two attempts that end after so many ticks, what was heard of them, and what is left."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        peer: tuple[int, Any],
        local: tuple[int, Any],
        *,
        may: bool = True,
    ) -> None:
        self.peer, self.local = peer, local
        self.released: list[Edits] = []
        self.answer = Answer()
        self.open: set[str] = set()
        self.flow = flow_of(hedge=may)
        (leg,) = self.flow.begin(0.0)
        assert isinstance(leg, SendPrefill)
        self.leg = SendPrefill(leg.instance, leg.limit, 0.0)
        clock = SimpleNamespace(now_s=lambda: 0.0, unix=lambda now_s: now_s)
        metrics = SimpleNamespace(prefill_leg=SimpleNamespace(observe=lambda seconds: None))
        state: Any = SimpleNamespace(clock=clock, metrics=metrics)
        legs: Any = SimpleNamespace(
            decode=self._decode,
            failure=lambda failure: LegFailure(failure.kind, str(failure)),
            note_limit=lambda limit, seconds: None,
            tell=lambda actions: None,
        )
        monkeypatch.setattr(offload, "release", lambda s, r, p, edits: self.released.append(edits))
        self.race = PrefillRace(state, RequestRecord(request_id="r"), self.flow, legs)

        async def prefill(race: PrefillRace, out: Any, leg: SendPrefill) -> Any:
            result = await self._attempt(*self.peer)
            if isinstance(result, Edits):
                race.handed.append(result)
            return result

        monkeypatch.setattr(PrefillRace, "prefill", prefill)

    async def _decode(self, out: Any, leg: SendHedge) -> Any:
        return await self._attempt(*self.local)

    async def _attempt(self, ticks: int, result: Any) -> Any:
        name = f"{ticks}{result}"
        self.open.add(name)
        try:
            for _ in range(ticks):
                await asyncio.sleep(0)
            if isinstance(result, Exception):
                raise result
            return self.answer if result == "answer" else result
        finally:
            self.open.discard(name)

    async def run(self) -> Any:
        out: Any = None
        _, got = await self.race.run(out, self.leg)
        given: Any = got
        return "answer" if given is self.answer else given


P, D = (50, EDITS), (20, "answer")


@pytest.mark.parametrize(
    ("peer", "local", "result", "state"),
    [
        (P, D, "answer", State.ANSWERED),
        (P, (90, "answer"), EDITS, State.FETCHING),
        ((50, GONE), (90, "answer"), "answer", State.ANSWERED),
        (P, (20, OOPS), EDITS, State.FETCHING),
        ((50, GONE), (20, OOPS), None, State.COMPUTING),
    ],
)
async def test_who_is_ready_first(
    monkeypatch: pytest.MonkeyPatch, peer: Any, local: Any, result: Any, state: State
) -> None:
    course = LatencyTracker(monkeypatch, peer, local)
    assert await course.run() == result
    assert course.flow.state is state
    assert not course.open


async def test_both_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    course = LatencyTracker(monkeypatch, (20, GONE), (50, OOPS))
    with pytest.raises(UpstreamFailure):
        await course.run()
    assert course.flow.state is State.COMPUTING


async def test_only_p_where_d_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    course = LatencyTracker(monkeypatch, P, D, may=False)
    assert await course.run() == EDITS
    assert course.flow.state is State.FETCHING


@pytest.mark.parametrize("peer", [P, (50, GONE)])
@pytest.mark.parametrize("local", [D, (49, "answer"), (50, "answer"), (70, "answer"), (20, OOPS)])
async def test_a_cancel_at_any_moment(
    monkeypatch: pytest.MonkeyPatch, peer: Any, local: Any
) -> None:
    """Nothing is left running; an answer is either given or closed; P's KV is taken or released."""
    for moment in range(100):
        course = LatencyTracker(monkeypatch, peer, local)
        task = asyncio.create_task(course.run())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not course.open, moment
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert course.answer.is_closed <= (result != "answer")
        assert len(course.released) <= (result != EDITS)
        has_answered = peer is P and moment > peer[0] + 4
        if has_answered and result not in (EDITS, "answer"):
            assert course.released == [EDITS]
        course.flow.end(0.0)


async def test_an_answer_that_comes_with_ps_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = 0
    for ticks in range(40, 60):
        course = LatencyTracker(monkeypatch, P, (ticks, "answer"))
        result = await course.run()
        assert result in (EDITS, "answer")
        closed += course.answer.is_closed
        assert course.answer.is_closed <= (result == EDITS)
    assert closed
