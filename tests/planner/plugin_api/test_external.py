"""Plugins in ticks: who wins, who fails, who is off, who comes, who goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from planner.config.plugins import MOST_PLUGINS, PluginSpec
from planner.core.budget import Limits
from planner.core.pipeline import MOST_FAILURES, OFF_S, How, Outcome, Pipeline
from planner.core.types import Kind, Proposal, Stage, Target
from planner.plugin_api import planner_plugin_pb2 as pb
from planner.plugin_api.channel import Channel
from planner.plugin_api.external import LEASE_S, Externals, RefusedError
from planner.telemetry.snapshot import heard_of
from tests.planner.core.test_pipeline import Says, context
from tests.planner.plugin_api.server import Plugin, served, spec, wish

LIMITS = Limits({"c": 1}, {"c": 1}, max_gpus=20)


class Rig:
    """A pipeline with a builtin plugin that wants 5, its external plugins, and a clock."""

    def __init__(self) -> None:
        own = Says(Proposal("own", (Target("c", Kind.SET, 5),)), Stage.PROPOSE, "own", 100)
        self.now_s = 100.0
        self.pipeline = Pipeline([own], LIMITS)
        self.externals = Externals(self.pipeline, lambda: self.now_s)
        self.externals.begin([], Channel)

    async def tick(self) -> Outcome:
        self.now_s += 5.0
        return await self.externals.decided(self.pipeline.steps(context(self.now_s)))

    async def target(self) -> int:
        return (await self.tick()).targets["c"]

    async def how(self, name: str = "theirs") -> How:
        return next(one.how for one in (await self.tick()).heard if one.name == name)


@asynccontextmanager
async def rigged(*specs: PluginSpec) -> AsyncIterator[Rig]:
    rig = Rig()
    rig.externals.begin(specs, Channel)
    try:
        yield rig
    finally:
        await rig.externals.aclose()


@pytest.mark.parametrize(
    ("stage", "answer", "priority", "target"),
    [
        ("propose", wish("SET", 7), 50, 7),
        ("propose", wish("SET", 7), 200, 5),
        ("propose", wish("AT_LEAST", 7), 200, 7),
        ("propose", wish("AT_MOST", 3), 200, 3),
        ("reconcile", wish("SET", 2), 200, 2),
        ("constrain", wish("AT_MOST", 4), 200, 4),
        ("constrain", wish("SET", 9), 0, 5),
        ("constrain", wish("AT_LEAST", 99), 0, 20),
        ("constrain", wish("REJECT"), 0, 2),
        ("propose", pb.EvaluateResponse(), 0, 5),
        ("propose", wish("SET", -3), 0, 5),
        ("propose", wish("SET", 2**62), 0, 5),
        ("propose", wish("SET", 9, "decode", is_final=True), 0, 5),
    ],
)
async def test_its_wish_is_merged_with_those_of_the_builtin_plugins(
    stage: str, answer: Any, priority: int, target: int
) -> None:
    plugin = Plugin(answer)
    async with served(plugin) as port, rigged(spec(port, stage=stage, priority=priority)) as rig:
        assert await rig.target() == target
    if stage == "constrain":
        assert plugin.asked[0].context.components[0].baseline == 5


async def test_what_has_no_meaning_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    targets = [
        pb.Target(component="c", kind=pb.AT_LEAST, replicas=6),
        pb.Target(component="c", kind=pb.SET, replicas=-1),
        pb.Target(component="no\n", kind=pb.SET, replicas=1),
    ]
    predicted = pb.Prediction(next_num_req=float("nan"), next_osl=float("inf"), next_isl=-1.0)
    wrong = Plugin(pb.EvaluateResponse(targets=targets))
    nan = Plugin(pb.EvaluateResponse(prediction=predicted))
    set_late = Plugin(wish("SET", 9))
    async with served(wrong) as one, served(nan) as two, served(set_late) as three:
        specs = [spec(one), spec(two, "nan", "predict"), spec(three, "late", "constrain")]
        async with rigged(*specs) as rig:
            found = await rig.tick()
            await rig.tick()
    assert found.targets == {"c": 6}
    assert {one.name: one.dropped for one in found.heard} == {
        "theirs": ("set -1 of 'c'", "set 1 of 'no\\n'"),
        "nan": ("next_num_req nan", "next_isl -1", "next_osl inf"),
        "late": ("set of c at the stage constrain",),
    }
    assert found.prediction.next_num_req is None
    assert len([text for text in caplog.messages if "without a meaning" in text]) == 3


async def test_its_prediction_is_what_proposers_see() -> None:
    predicting = Plugin(pb.EvaluateResponse(prediction=pb.Prediction(next_num_req=0.0)))
    proposing = Plugin()
    async with served(predicting) as one, served(proposing) as two:
        async with rigged(spec(one, "a", "predict"), spec(two, "b")) as rig:
            assert (await rig.tick()).prediction.next_num_req == 0.0
    seen = proposing.asked[0].context.prediction
    assert (seen.HasField("next_num_req"), seen.HasField("next_isl")) == (True, False)


@pytest.mark.parametrize(("isl", "other"), [(4.0, None), (-4.0, 8.0)])
async def test_a_final_prediction_counts_alone_unless_a_part_has_no_meaning(
    isl: float, other: float | None
) -> None:
    final = Plugin(
        pb.EvaluateResponse(prediction=pb.Prediction(next_num_req=2.0, next_isl=isl), is_final=True)
    )
    more = Plugin(pb.EvaluateResponse(prediction=pb.Prediction(next_num_req=9.0, next_osl=8.0)))
    async with served(final) as one, served(more) as two:
        specs = spec(one, "a", "predict"), spec(two, "b", "predict", priority=60)
        async with rigged(*specs) as rig:
            found = await rig.tick()
    assert (found.prediction.next_num_req, found.prediction.next_osl) == (2.0, other)
    told = [heard_of(heard) for heard in found.heard]
    assert [heard["final"] for heard in told] == [isl > 0, False]


@pytest.mark.parametrize("how", ["sleeps", "raises", "wrong token"])
async def test_one_that_fails_is_off_for_a_while_and_then_tried(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "planner")
    plugin, other = Plugin(wish("SET", 7)), Plugin(wish("AT_LEAST", 6))
    if how == "sleeps":
        plugin.sleeps = asyncio.Event()
    elif how == "raises":
        plugin.fails = ValueError("broken")
    else:
        plugin.token = "the right one"
    async with served(plugin) as one, served(other) as two:
        own = spec(one, deadline_seconds=0.1, token="a wrong one")
        async with rigged(own, spec(two, "other")) as rig:
            for _ in range(MOST_FAILURES):
                found = await rig.tick()
                assert found.targets == {"c": 6}, "the others count"
                assert [one.how for one in found.heard if one.name == "theirs"] == [How.FAILED]
            assert await rig.how() is How.OFF
            plugin.sleeps = plugin.fails = None
            plugin.token = ""
            rig.now_s += OFF_S - 20.0
            assert await rig.how() is How.OFF
            rig.now_s += 20.0
            while await rig.target() != 7:
                rig.now_s += OFF_S  # a connection may take its time
    told = [text for text in caplog.messages if text.startswith("plugin theirs: ")]
    assert told[1:2] == ["plugin theirs: failed 3 times, off for 60 s"]
    assert told[-1] == "plugin theirs: is well again"


async def test_an_older_answer_counts_while_its_plugin_lives() -> None:
    plugin = Plugin(wish("SET", 7))
    more: dict[str, Any] = {"interval_seconds": 600.0, "hold_policy": "hold_last"}
    async with rigged() as rig:
        async with served(plugin) as port:
            rig.externals.begin(
                [spec(port, **more), spec(port, "idle", interval_seconds=600.0)], Channel
            )
            assert await rig.target() == 7
            found = await rig.tick()
            assert [one.how for one in found.heard] == [How.IDLE, How.HELD]
            assert (found.targets, len(plugin.asked)) == ({"c": 7}, 2)
            assert plugin.described == 3, "of the one that holds once more"
        dead = await rig.tick()
        (held,) = [one for one in dead.heard if one.name == "theirs"]
        assert (dead.targets, held.how) == ({"c": 7}, How.HELD)
        assert "unavailable" in held.failure
        last = [(await rig.tick()).targets for _ in range(MOST_FAILURES - 1)]
        assert last[-1] == {"c": 5}, "it is forgotten with the third failure"
        async with served(plugin, port):
            rig.now_s += OFF_S
            while await rig.how() is not How.ANSWERED:
                await asyncio.sleep(0.05)
                rig.now_s += OFF_S
            assert await rig.target() == 7


async def test_it_registers_itself_and_is_gone_when_it_does_not_say_so_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin = Plugin(wish("SET", 7))
    async with served(plugin) as port, rigged() as rig:
        rig.externals.register(spec(port))
        for _ in range(4):
            assert await rig.target() == 7
            rig.externals.register(spec(port))
        assert plugin.described == 1, "the same connection"
        rig.externals.register(spec(port, stage="constrain"))
        assert await rig.target() == 5, "a plugin that has changed begins anew"
        rig.externals.register(spec(port))
        rig.now_s += LEASE_S
        assert await rig.target() == 5
        assert rig.externals.shown() == []
    assert "plugin theirs: gone, it has not registered again for 15 s" in caplog.messages


async def test_a_plugin_that_goes_while_it_is_asked_says_nothing() -> None:
    plugin = Plugin(wish("SET", 7))
    plugin.sleeps = asyncio.Event()
    async with served(plugin) as port, rigged() as rig, asyncio.TaskGroup() as tasks:
        rig.externals.register(spec(port))
        tick = tasks.create_task(rig.tick())
        while not plugin.asked:
            await asyncio.sleep(0.01)
        assert rig.externals.unregister("theirs")
        assert not rig.externals.unregister("theirs")
        plugin.sleeps.set()
        found = await tick
        assert (found.targets, found.heard[0].how) == ({"c": 5}, How.IDLE)
        assert (await rig.tick()).heard == ()


async def test_two_plugins_cannot_have_one_name() -> None:
    async with served(Plugin()) as port, rigged(spec(port, "named")) as rig:
        with pytest.raises(RefusedError, match="named: a plugin of the configuration"):
            rig.externals.register(spec(port, "named"))
        assert not rig.externals.unregister("named")
        rig.externals.register(spec(port, "own"))
        with pytest.raises(RefusedError, match="own: a plugin at another address"):
            rig.externals.register(spec(1, "own"))
        rig.now_s += LEASE_S + 1
        rig.externals.register(spec(1, "own"))
        for n in range(MOST_PLUGINS - 2):
            rig.externals.register(spec(port, f"p{n}"))
        with pytest.raises(RefusedError, match="there are 16 plugins already"):
            rig.externals.register(spec(port, "more"))


async def test_who_does_not_answer_is_a_line() -> None:
    async with served(Plugin()) as well, served(Plugin(protocol=9)) as other:
        async with rigged(spec(well, "well"), spec(other, "new"), spec(1, "dead")) as rig:
            new, dead = sorted(await rig.externals.silent(), key=lambda line: "dead" in line)
    assert new == "plugin new: it speaks protocol 9, not 1"
    assert dead.startswith("plugin dead: 127.0.0.1:1: unavailable: ")
