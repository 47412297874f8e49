"""Real agents at work in front of the proxy: two sessions at once, one of them sent on later."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replayer.simulator.host import SimFleet
from tests.clients.agents import ALL, MODEL, Agent, Session, kill
from tests.support.harness import ServedProxy, proxied, until

TASK = "Look at what is in this folder, then say that you are done."
MORE = "Look at it once more."
ERROR_RATIO = 0.01
"""Most by which a prediction is off in the middle, of the prompt's tokens."""
TITLE_RATIO = 0.5
"""Of the longest prompt of a session; what is shorter is a title or the like."""
TENANTS = {"a": "key-of-a", "b": "key-of-b"}
"""Each session has a key of its own: the log's `tenant` says whose request it was."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that an engine computed, by the proxy's log and by the engine's."""

    tenant: str
    step: str
    session: str | None
    instance: str
    status: int
    outcome: str
    predicted: int
    cached: int
    prompt: int

    @property
    def error_ratio(self) -> float:
        """By how much the prediction was off, of the prompt."""
        return abs(self.predicted - self.cached) / self.prompt


@dataclass(frozen=True, slots=True)
class Work:
    """What an agent's sessions left: the turns, and the log's lines of all requests."""

    turns: list[Turn]
    lines: list[dict[str, Any]]

    def of(self, tenant: str, step: str | None = None) -> list[Turn]:
        """The turns of a session's conversation, without titles and the like."""
        own = [turn for turn in self.turns if turn.tenant == tenant]
        least = TITLE_RATIO * max(turn.prompt for turn in own)
        return [turn for turn in own if turn.prompt >= least and step in (None, turn.step)]


@asynccontextmanager
async def served(folder: Path, **sim: Any) -> AsyncIterator[tuple[ServedProxy, SimFleet]]:
    """A proxy in front of three engines with the agents' model."""
    keys = ",".join(f"{tenant}:{key}" for tenant, key in TENANTS.items())
    fleet = {"model": MODEL, "max_model_len": 200_000, "num_gpu_blocks": 60_000} | sim
    async with proxied(folder, 3, sim=fleet, api_key=keys) as both:
        yield both


async def _worked(agent: Agent, folder: Path) -> Work:
    async with served(folder, tool_calls=4) as (proxy, fleet):
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(Session(agent, folder / tenant, proxy.server.url, key))
                for tenant, key in TENANTS.items()
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(first.work(TASK))
                tasks.create_task(second.work(TASK))
            before = {record["request_id"] for record in fleet.records}
            await first.work(MORE, goes_on=True)
        await proxy.at_rest()
        lines = await proxy.records(len(fleet.records))
    by_id = {line["request_id"]: line for line in lines}
    turns = []
    for record in fleet.records:
        name = record["request_id"]
        line = by_id[name.rpartition("-")[0]]  # the proxy adds digits for the engine
        turns.append(
            Turn(
                line["tenant"],
                "task" if name in before else "resume",
                line["session_id"],
                line["decode_instance"],
                line["status"],
                line["outcome"],
                line["hit_tokens"],
                record["local_hit_tokens"],
                record["prompt_tokens"],
            )
        )
    return Work(turns, lines)


_done: dict[str, Work] = {}


@pytest.fixture(params=ALL, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    """Each agent."""
    found: Agent = request.param
    return found


@pytest.fixture
async def work(agent: Agent, tmp_path: Path, table: list[str]) -> Work:
    """What the agent left; it works when the first test asks for that."""
    if agent.name not in _done:
        done = _done[agent.name] = await _worked(agent, tmp_path)
        predicted, cached = (
            sum(getattr(turn, name) for turn in done.turns) for name in ("predicted", "cached")
        )
        median = statistics.median(turn.error_ratio for turn in done.turns)
        cells = (agent.name, agent.version, agent.api, agent.names or "nothing")
        counts = (f"{len(done.turns)}", f"{predicted:,}", f"{cached:,}", f"{median:.1%}")
        table.append(f"| {' | '.join((*cells, *counts))} |")
    return _done[agent.name]


def test_every_request_is_answered(work: Work) -> None:
    ends = {(line["endpoint"], line["status"], line["outcome"]) for line in work.lines}
    assert {(status, outcome) for _, status, outcome in ends} == {(200, "ok")}, ends
    for tenant, step, least in (("a", "task", 5), ("a", "resume", 5), ("b", "task", 5)):
        assert len(work.of(tenant, step)) >= least, (tenant, step)


def test_a_session_stays_on_one_instance(work: Work) -> None:
    for tenant in TENANTS:
        assert len({turn.instance for turn in work.of(tenant)}) == 1, work.of(tenant)


def test_a_session_has_one_name(agent: Agent, work: Work) -> None:
    names = {tenant: {turn.session for turn in work.of(tenant)} for tenant in TENANTS}
    if agent.names is None:
        assert names == {tenant: {None} for tenant in TENANTS}
    else:
        assert all(len(found) == 1 and None not in found for found in names.values()), names
        assert names["a"] != names["b"]


def test_predictions_are_what_the_engines_find(work: Work) -> None:
    errors = [turn.error_ratio for turn in work.turns]
    told = [(turn.tenant, turn.step, turn.predicted, turn.cached) for turn in work.turns]
    assert statistics.median(errors) <= ERROR_RATIO, told


async def test_an_agent_that_is_killed_leaves_nothing(agent: Agent, tmp_path: Path) -> None:
    # Words without end: the agent waits for the rest of them.
    async with served(tmp_path, natural_length=50_000, speed=1.0) as (proxy, fleet):
        with Session(agent, tmp_path / "a", proxy.server.url, TENANTS["a"]) as session:
            process = await session.start(TASK)
            await until(lambda: _tokens(fleet) > 0, "an answer has begun", 60.0)
            kill(process.pid)
            await process.wait()
            await until(lambda: not _running(fleet), "the engines have heard of it")
        assert "abort" in {record["finish_reason"] for record in fleet.records}
        await proxy.at_rest()
        assert proxy.metric("accounting_drift") == 0
        outcomes = {line["outcome"] for line in await proxy.records(1)}
        assert "client_gone" in outcomes
        assert outcomes <= {"ok", "client_gone"}


def _tokens(fleet: SimFleet) -> float:
    return sum(engine.stats()["generated_tokens"] for engine in fleet.engines)


def _running(fleet: SimFleet) -> float:
    return sum(engine.stats()["running"] + engine.stats()["waiting"] for engine in fleet.engines)
