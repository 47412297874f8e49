"""The race of P and D: every order of ends, and a cancel at every moment."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.core import is_compiled
from proxy.core.connectors.base import Edits
from proxy.core.fleet.retries import Budget
from proxy.core.known.fleet_state import FleetState
from proxy.core.placement.decision import Choice, PlacementView, chosen
from proxy.core.routing.actions import (
    LegCaps,
    SendDecode,
    SendPrefill,
)
from proxy.core.routing.request_flow import (
    RequestFlow,
    State,
)
from proxy.core.routing.route import Route
from proxy.core.routing.router import Router
from proxy.core.types import FailureKind, Fallback, Instance, Reason, RequestFacts, RouterConfig
from proxy.protocol.endpoints import OTHER
from proxy.protocol.errors import UpstreamFailure
from proxy.request.attempts import Attempts, PrefillFailed, PrefillRace
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.record import RequestRecord

pytestmark = pytest.mark.skipif(is_compiled(), reason="Scripted inherits from what is compiled")

Leg = tuple[int, Any]
"""After how many ticks it ends, and how."""
METRICS = Metrics()
"""Nothing here looks at them, and to make them takes longer than a race."""
EDITS = Edits({"kv": 1})
GONE = PrefillFailed(Fallback.P_ERROR)
OOPS = UpstreamFailure(FailureKind.RESET, "oops")
HOLLOW = UpstreamFailure(FailureKind.HOLLOW, "it has nothing in it", status=200)


class Answer:
    """Stands for an instance's answer: the race only closes it."""

    def __init__(self) -> None:
        self.is_closed, self.status = False, 200

    def close(self) -> None:
        self.is_closed = True


def flow_of(*, hedge: bool) -> RequestFlow:
    def choose(view: PlacementView) -> Choice:
        d, p = view.free[0], view.free[1]
        return chosen(view, d, p, Reason.P_IDLE_D_BUSY, placed=True)

    router = Router(FleetState(RouterConfig(prefill_throughput=20_000.0, hedge=hedge)), choose)
    for name in ("d", "p"):
        router.known.add(Instance(name, f"http://{name}", f"http://{name}:8998"))
    facts = RequestFacts("m", "s", 30_000, [], 64.0)
    route = router.admit(facts, 0.0)
    assert isinstance(route, Route)
    caps = LegCaps(120.0, 120.0, 30.0, 300.0)
    return RequestFlow(router, Budget(), facts, route, caps, 0.0, streams=True)


class Scripted(Attempts):
    """Attempts of one request whose two legs end after so many ticks, in no network."""

    def __init__(self, owners: Any, flow: RequestFlow, peer: Leg, local: Leg) -> None:
        super().__init__(owners, RequestRecord(request_id="r"), flow, OTHER)
        self.peer, self.local = peer, local
        self.answer = Answer()
        self.is_hollow = False
        self.open: set[str] = set()

    async def prefill(self, out: Any, leg: SendPrefill) -> Any:
        return await self._attempt(*self.peer)

    async def decode(self, out: Any, leg: Any) -> Any:
        return await self._attempt(*self.local)

    def hollow_of(self, answer: Any) -> UpstreamFailure | None:
        return HOLLOW if self.is_hollow else None

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


class Race:
    """The two attempts, what was released of them, and what is left."""

    def __init__(self, peer: Leg, local: Leg, *, may: bool = True) -> None:
        self.released: list[Edits] = []
        self.flow = flow_of(hedge=may)
        leg = self.flow.begin(0.0)
        assert isinstance(leg, SendPrefill)
        clock = SimpleNamespace(now_s=lambda: 0.0, unix=lambda now_s: now_s)
        releases = SimpleNamespace(
            release=lambda ask, edits, key, on_over: self.released.append(edits)
        )
        owners = SimpleNamespace(
            clock=clock,
            metrics=METRICS,
            releases=releases,
            instances=SimpleNamespace(get=lambda name: None, act=lambda *told: None),
        )
        self.attempts = Scripted(owners, self.flow, peer, local)
        self.answer, self.open = self.attempts.answer, self.attempts.open
        out: Any = None
        self.race = PrefillRace(self.attempts, out, SendPrefill(leg.instance, leg.limit, 0.0))

    async def run(self) -> Any:
        """D's answer, or P's edits where D is to fetch; None where neither is there."""
        got: Any = await self.race.run()
        if got is self.answer:
            return "answer"
        return EDITS if isinstance(got, SendDecode) and got.fetch_from is not None else None


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
async def test_who_is_ready_first(peer: Leg, local: Leg, result: Any, state: State) -> None:
    race = Race(peer, local)
    assert await race.run() == result
    assert race.flow.state is state
    assert not race.open


async def test_both_fail() -> None:
    race = Race((20, GONE), (50, OOPS))
    with pytest.raises(UpstreamFailure):
        await race.run()
    assert race.flow.state is State.COMPUTING


async def test_a_hollow_answer_does_not_win() -> None:
    """It is there at once."""
    race = Race(P, (1, "answer"))
    race.attempts.is_hollow = True
    assert await race.run() == EDITS
    assert race.answer.is_closed


async def test_only_p_where_d_may_not() -> None:
    race = Race(P, D, may=False)
    assert await race.run() == EDITS
    assert race.flow.state is State.FETCHING


@pytest.mark.long
@pytest.mark.parametrize("peer", [P, (50, GONE)])
@pytest.mark.parametrize("local", [D, (49, "answer"), (50, "answer"), (70, "answer"), (20, OOPS)])
async def test_a_cancel_at_any_moment(peer: Leg, local: Leg) -> None:
    """Nothing is left running; an answer is either given or closed; P's KV is taken or released."""
    for moment in range(100):
        race = Race(peer, local)
        task = asyncio.create_task(race.run())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not race.open, moment
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert race.answer.is_closed <= (result != "answer")
        assert len(race.released) <= (result != EDITS)
        has_answered = peer is P and moment > peer[0] + 4
        if has_answered and result not in (EDITS, "answer"):
            assert race.released == [EDITS]
        race.flow.end(0.0)


async def test_an_answer_that_comes_with_ps_is_closed() -> None:
    closed = 0
    for ticks in range(40, 60):
        race = Race(P, (ticks, "answer"))
        result = await race.run()
        assert result in (EDITS, "answer")
        closed += race.answer.is_closed
        assert race.answer.is_closed <= (result == EDITS)
    assert closed
