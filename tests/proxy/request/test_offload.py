"""The race of two attempts: every order of ends, and a cancel at every moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from proxy.core.connectors.base import Edits
from proxy.core.types import FailureKind, Fallback
from proxy.protocol.errors import UpstreamFailure
from proxy.request.offload import Local, race

EDITS = Edits({"kv": 1})
OOPS = UpstreamFailure(FailureKind.RESET, "oops")


class Course:
    """Two attempts that end after so many ticks, and what was heard of them."""

    def __init__(self, peer: tuple[int, Any], local: tuple[int, Any], *, may: bool = True) -> None:
        self.peer, self.local, self.may = peer, local, may
        self.heard: list[Any] = []
        self.open: set[str] = set()

    async def _p(self) -> Edits | Fallback:
        result: Edits | Fallback = await self._attempt(*self.peer)
        return result

    async def _attempt(self, ticks: int, result: Any) -> Any:
        name = f"{ticks}{result}"
        self.open.add(name)
        try:
            for _ in range(ticks):
                await asyncio.sleep(0)
            if isinstance(result, Exception):
                raise result
            return result
        finally:
            self.open.discard(name)

    def _start(self) -> bool:
        self.heard.append("start")
        return self.may

    def run(self) -> Coroutine[Any, Any, Any]:
        hear = self.heard.append
        local: Local[str] = Local(
            self._start,
            lambda: self._attempt(*self.local),
            hear,
            hear,
            lambda answer: self.heard.append(f"closed {answer}"),
            hear,
        )
        return race(self._p, local, 0.0)


P, D = (50, EDITS), (20, "answer")


@pytest.mark.parametrize(
    ("peer", "local", "result", "heard"),
    [
        (P, D, "answer", ["start"]),
        (P, (90, "answer"), EDITS, ["start"]),
        ((50, Fallback.P_ERROR), (90, "answer"), "answer", ["start", Fallback.P_ERROR]),
        (P, (20, OOPS), EDITS, ["start", OOPS]),
        ((50, Fallback.P_ERROR), (20, OOPS), Fallback.P_ERROR, ["start", OOPS]),
    ],
)
async def test_who_is_ready_first(peer: Any, local: Any, result: Any, heard: list[Any]) -> None:
    course = Course(peer, local)
    assert await course.run() == result
    assert course.heard == heard
    assert not course.open


async def test_both_fail() -> None:
    course = Course((20, Fallback.P_ERROR), (50, OOPS))
    with pytest.raises(UpstreamFailure):
        await course.run()
    assert course.heard == ["start", Fallback.P_ERROR]


async def test_only_p_where_d_may_not() -> None:
    course = Course(P, D, may=False)
    assert await course.run() == EDITS
    assert course.heard == ["start"]


@pytest.mark.parametrize("peer", [P, (50, Fallback.P_ERROR)])
@pytest.mark.parametrize("local", [D, (49, "answer"), (50, "answer"), (70, "answer"), (20, OOPS)])
async def test_a_cancel_at_any_moment(peer: Any, local: Any) -> None:
    """Nothing is left running; an answer is either given or closed, once."""
    for moment in range(100):
        course = Course(peer, local)
        task = asyncio.create_task(course.run())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        result: Any = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not course.open, moment
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert course.heard.count("closed answer") <= (result != "answer")
        # What P has handed over is given, or reported, once.
        has_answered = peer is P and moment > peer[0] + 4
        assert course.heard.count(EDITS) <= (result != EDITS)
        if has_answered and result not in (EDITS, "answer"):
            assert course.heard.count(EDITS) == 1


async def test_an_answer_that_comes_with_ps_is_closed() -> None:
    closed = 0
    for ticks in range(40, 60):
        course = Course(P, (ticks, "answer"))
        result = await course.run()
        assert result in (EDITS, "answer")
        closed += "closed answer" in course.heard
        assert ("closed answer" in course.heard) <= (result == EDITS)
    assert closed
