"""Decisions that another orchestrator asks for and acknowledges."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from planner.scalers.base import Applied, Decision, Fleet
from planner.scalers.virtual import UnknownDecisionError, VirtualScaler

FLEET = cast(Fleet, object())
"""These scalers look at no instance."""


def decision(number: int, count: int = 2) -> Decision:
    return Decision(number, {"combined": count}, 0.0)


async def test_a_decision_is_done_once_it_is_acknowledged() -> None:
    scaler = VirtualScaler()
    assert await scaler.apply(decision(0), FLEET) == Applied("decision 0 is not acknowledged")
    assert scaler.acknowledge(0)
    assert not scaler.acknowledge(0), "again: no effect"
    assert (await scaler.apply(decision(0), FLEET)).is_done
    assert not (await scaler.apply(decision(1), FLEET)).is_done


@pytest.mark.parametrize("wrong", [0, 2, -1])
async def test_an_older_or_unknown_id_is_refused_with_the_current_one(wrong: int) -> None:
    scaler = VirtualScaler()
    await scaler.apply(decision(1), FLEET)
    with pytest.raises(UnknownDecisionError, match="the current decision is 1"):
        scaler.acknowledge(wrong)


async def test_whoever_waits_gets_the_next_decision_and_none_after_the_limit() -> None:
    scaler = VirtualScaler()
    assert await scaler.after(-1, 0.01) is None
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(scaler.after(-1, 30.0))
        await asyncio.sleep(0)
        await scaler.apply(decision(0), FLEET)
    assert waiting.result() == decision(0)
    assert await scaler.after(-1, 30.0) == decision(0), "it is there already"
    assert await scaler.after(0, 0.01) is None


async def test_a_restart_of_the_planner_keeps_what_was_acknowledged() -> None:
    first = VirtualScaler()
    await first.apply(decision(3), FLEET)
    first.acknowledge(3)
    second = VirtualScaler()
    second.recall(first.notes())
    assert (await second.apply(decision(3), FLEET)).is_done
