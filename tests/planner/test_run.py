"""Ticks: what is kept before it is carried out, what is only advised, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from planner.config.components import Component
from planner.config.options import PlannerOptions
from planner.core.budget import Share, SharedBudget
from planner.core.types import COMPONENT, Capabilities, Context, Engine, Replicas, Traffic
from planner.run import Clocks, Learned, Planner, components_of
from planner.scalers.base import Applied, Decision, Failure, Fleet, Scaler, ScalerError
from planner.scalers.state_file import StateFile
from planner.sources.live import Live
from planner.sources.proxy import Proxies
from planner.sources.workers.forecasts import COMMANDS
from planner.telemetry.snapshot import TickOutcome


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now_s, lambda: 1.7e9 + self.now_s)


class Looks:
    """A source that shows a loaded fleet of some size; a test changes what it shows."""

    def __init__(self) -> None:
        self.ready, self.queued_tokens, self.is_dead = 1, 90_000.0, False
        self.absent: dict[str, int] = {}
        self.unread: dict[str, str] = {}
        self.start_ups_s: list[float] = []
        self.waits: asyncio.Event | None = None
        self.requests = 10.0

    async def look(self, tick: int, now_s: float, expected: Mapping[str, int]) -> Context | None:
        if self.waits is not None:
            await self.waits.wait()
        if self.is_dead:
            return None
        wanted = expected.get(COMPONENT, self.ready)
        engines = tuple(
            Engine(f"e{n}", 0.01 + 0.001 * tick, 100.0 * tick, 4, 900.0, self.queued_tokens)
            for n in range(self.ready)
        )
        return Context(
            tick,
            now_s,
            {COMPONENT: Replicas(self.ready, wanted, max(0, wanted - self.ready))},
            {COMPONENT: Capabilities()},
            Traffic(5.0, self.requests, 2000.0, 100.0, 0.0),
            {COMPONENT: engines},
            baseline={COMPONENT: wanted},
        )


class Orders(Scaler):
    """A scaler that notes what it is called with; a test says how it answers."""

    name = "orders"

    def __init__(self, kept: Path) -> None:
        self.kept, self.applied, self.answer = kept, list[Decision](), Applied()
        self.fails: ScalerError | None = None
        self.kept_before: list[int] = []
        self.wanted: dict[str, int] | ScalerError = {}
        self.looks = 0
        self.is_closed = False

    async def validate(self, components: Sequence[Component]) -> None: ...

    async def observe(self) -> Mapping[str, int]:
        self.looks += 1
        if isinstance(self.wanted, ScalerError):
            raise self.wanted
        return self.wanted

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        self.applied.append(decision)
        told = json.loads(self.kept.read_text())
        self.kept_before.append(told["kept"]["decision"]["decision_id"])
        if self.fails is not None:
            raise self.fails
        return self.answer

    async def aclose(self) -> None:
        self.is_closed = True


class FakeProxies:
    """Proxies that are never asked."""

    def failures(self) -> list[str]:
        return ["the proxy is away"]

    def ages_s(self, now_s: float) -> dict[str, float | None]:
        return {"p": 1.0}


class Stage:
    """A planner on a stage: its clock, its source, its scaler."""

    def __init__(self, folder: Path, **options: object) -> None:
        usual: dict[str, object] = {
            "proxies": "p:1",
            "state_file": folder / "state.json",
            "audit_log": folder / "audit.jsonl",
            "enable_throughput_scaling": False,
            "load_min_observations": 2,
            "advisory": False,
            "strategy": "founding",
        }
        self.options = PlannerOptions(**(usual | options))
        self.clock, self.looks = Clock(), Looks()
        self.scaler = Orders(folder / "state.json")
        self.audit = folder / "audit.jsonl"
        self.planner = self.begun()

    def made(self, known: Learned | None = None) -> Planner:
        return Planner(
            self.options,
            cast(Live, self.looks),
            cast(Proxies, FakeProxies()),
            self.scaler,
            self.clock.clocks,
            known,
        )

    def begun(self, known: Learned | None = None) -> Planner:
        planner = self.made(known)
        planner.begin()
        return planner

    async def ticks(self, count: int) -> list[TickOutcome]:
        found = []
        for _ in range(count):
            found.append((await self.planner.tick()).outcome)
            self.clock.now_s += 5.0
        return found


async def test_a_decision_is_kept_before_it_is_carried_out(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    outcomes = await stage.ticks(4)
    assert TickOutcome.APPLY in outcomes
    assert stage.scaler.applied[0].targets == {COMPONENT: 2}
    ids = [one.decision_id for one in stage.scaler.applied]
    assert stage.scaler.kept_before == ids
    lines = [json.loads(line) for line in stage.audit.read_text().splitlines()]
    assert [line["decision"]["decision_id"] for line in lines] == [0]
    assert lines[0]["decided"]["load"] == {COMPONENT: "scale_up"}


async def test_advisory_decides_and_calls_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path, advisory=True)
    with caplog.at_level(logging.INFO, "planner"):
        outcomes = await stage.ticks(6)
    assert (stage.scaler.applied, stage.scaler.looks) == ([], 0)
    assert outcomes.count(TickOutcome.ADVISORY) == 1
    assert any("decision 0 (advisory): combined 1 -> 2" in text for text in caplog.messages)


async def test_what_the_scaler_was_told_before_is_the_first_baseline(tmp_path: Path) -> None:
    """The proxies know one instance, and would have two be more."""
    stage = Stage(tmp_path)
    stage.scaler.wanted = {COMPONENT: 3}
    await stage.ticks(1)
    stage.scaler.wanted = {COMPONENT: 4}  # by somebody else, before anything was decided
    stage.looks.ready = 4
    await stage.ticks(4)
    assert stage.scaler.applied[0].targets == {COMPONENT: 5}
    looks = stage.scaler.looks
    await stage.ticks(2)
    assert stage.scaler.looks == looks, "its own targets count from then on"


async def test_nothing_is_decided_while_the_scaler_cannot_say(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.scaler.wanted = ScalerError(Failure.UNREACHABLE, "GET scale: not reached")
    assert await stage.ticks(6) == [TickOutcome.FAILED] * 6
    assert stage.planner.decision is None
    text = stage.planner.metrics.text().decode()
    assert 'scaler_errors_total{error="unreachable",scaler="orders"} 6.0' in text
    stage.scaler.wanted = {}
    assert TickOutcome.APPLY in await stage.ticks(4)


async def test_a_successor_goes_on_with_the_same_decision(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.scaler.answer = Applied("it starts")
    assert TickOutcome.IN_PROGRESS in await stage.ticks(4)
    first = stage.planner.decision
    assert first is not None
    stage.planner._state.close()  # type: ignore[union-attr] # as the kernel does it at a kill
    stage.planner = stage.begun()
    assert stage.planner.decision == first
    await stage.ticks(1)
    assert stage.scaler.applied[-1] == first, "the same absolute target again"


async def test_a_decision_that_cannot_be_kept_is_not_carried_out(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "state.json.new").mkdir()
    outcomes = await stage.ticks(5)
    assert TickOutcome.FAILED in outcomes
    assert stage.scaler.applied == []
    assert stage.planner.decision is None
    (tmp_path / "state.json.new").rmdir()
    assert TickOutcome.APPLY in await stage.ticks(1)


async def test_a_failing_scaler_is_named_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path)
    stage.scaler.fails = ScalerError(Failure.FORBIDDEN, "PATCH scale: forbidden")
    outcomes = await stage.ticks(5)
    assert outcomes[-1] is TickOutcome.FAILED
    assert caplog.messages.count("PATCH scale: forbidden") == 1, "said once"
    text = stage.planner.metrics.text().decode()
    assert 'scaler_errors_total{error="forbidden",scaler="orders"}' in text
    stage.scaler.fails = None
    assert TickOutcome.APPLY in await stage.ticks(1)
    assert stage.scaler.applied[-1].decision_id == 0


async def test_a_dead_source_takes_nothing_away(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.ticks(4)
    decided, calls = stage.planner.decision, len(stage.scaler.applied)
    stage.looks.is_dead = True
    assert await stage.ticks(3) == [TickOutcome.NO_DATA] * 3
    assert (stage.planner.decision, len(stage.scaler.applied)) == (decided, calls)


async def test_a_tick_that_takes_too_long_changes_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, tick_max_duration_seconds=0.01)
    stage.looks.waits = asyncio.Event()
    assert await stage.ticks(2) == [TickOutcome.TIMEOUT] * 2
    assert stage.planner.decision is None


async def test_what_is_never_done_is_said_after_the_longest_wait(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scaling_max_wait_seconds=20.0)
    stage.scaler.answer = Applied("combined-1 starts")
    await stage.ticks(4)
    snapshots = list(stage.planner.recorder.every())
    assert snapshots[-1]["waits_for"] == "combined-1 starts"
    assert snapshots[-1]["failure"] == ""
    await stage.ticks(6)
    last = list(stage.planner.recorder.every())[-1]
    assert last["failure"].startswith("not done after ")


def stages(folder: Path, **options: object) -> tuple[Stage, Stage, SharedBudget]:
    """Two deployments of one budget of 8; each wants as many as are needed for its queue."""
    found, budget = [], SharedBudget(8)
    for name in "ab":
        (folder / name).mkdir()
        stage = Stage(folder / name, **options)
        stage.planner.join(Share(budget, name))
        found.append(stage)
    return found[0], found[1], budget


async def test_deployments_share_a_budget(tmp_path: Path) -> None:
    a, b, _ = stages(tmp_path)
    a.looks.ready = 5
    assert await a.ticks(2) == [TickOutcome.UNCHANGED] * 2, "b is not known yet"
    for _ in range(6):
        await a.ticks(1)
        await b.ticks(1)
    assert [one.scaler.applied[-1].targets[COMPONENT] for one in (a, b)] == [6, 2]
    assert b.planner.decision is not None
    b.planner.floors[COMPONENT] = 4
    await b.ticks(1)
    assert b.planner.decision.targets == {COMPONENT: 4}, "a floor, whatever others have"
    await a.ticks(1)
    assert a.scaler.applied[-1].targets == {COMPONENT: 4}
    assert a.scaler.applied[-1].reason.endswith("gpu_budget_shared")
    assert (a.planner.most_replicas(COMPONENT), b.planner.most_replicas(COMPONENT)) == (4, 7)


@pytest.mark.parametrize("comes_to_an_end", [True, False])
async def test_who_goes_holds_its_gpus_until_the_scaler_is_done(
    tmp_path: Path, comes_to_an_end: bool
) -> None:
    a, b, budget = stages(tmp_path, scaling_max_wait_seconds=60.0)
    a.looks.ready = 6
    for _ in range(6):
        await a.ticks(1)
        await b.ticks(1)
    before = budget._claims["a"].used
    b.planner.floors[COMPONENT] = 4
    a.scaler.answer = Applied("gpu-5 stops")
    await b.ticks(1)
    await a.ticks(1)
    assert a.scaler.applied[-1].targets == {COMPONENT: 4}
    a.looks.ready = 4  # the proxies know no more
    for _ in range(5):
        await a.ticks(1)
        assert budget._claims["a"].used == before > 4
    a.scaler.answer = Applied() if comes_to_an_end else a.scaler.answer
    await a.ticks(2 if comes_to_an_end else 9)
    assert budget._claims["a"].used == 4


async def test_what_a_deployment_had_is_its_own_until_it_is_seen(tmp_path: Path) -> None:
    a, b, _ = stages(tmp_path)
    for _ in range(6):
        await a.ticks(1)
        await b.ticks(1)
    for stage in (a, b):
        stage.planner._state.close()  # type: ignore[union-attr]
    budget = SharedBudget(8)
    again = []
    for name, stage in (("a", a), ("b", b)):
        planner = stage.made()
        planner.join(Share(budget, name))
        again.append(planner)
    for planner in again:
        planner.begin()
    a.looks.ready, b.looks.is_dead = 2, True
    a.planner = again[0]
    before = a.planner.decision
    assert before is not None
    await a.ticks(4)
    assert a.planner.decision is not None
    assert a.planner.decision.targets[COMPONENT] > before.targets[COMPONENT], "b need not be seen"
    kept = again[1].decision
    assert kept is not None
    assert a.planner.decision.targets[COMPONENT] + kept.targets[COMPONENT] <= 8


async def test_advice_shares_a_budget_by_what_is_advised(tmp_path: Path) -> None:
    a, b, _ = stages(tmp_path, advisory=True)
    for _ in range(6):
        await a.ticks(1)
        await b.ticks(1)
    for stage in (a, b):
        assert stage.planner.decision is not None
        assert stage.planner.decision.targets == {COMPONENT: 2}, "one more than there are"


async def test_floors_of_an_operator_outlive_a_restart(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.planner.floors[COMPONENT] = 4
    stage.planner.save()
    stage.planner._state.close()  # type: ignore[union-attr]
    again = stage.begun()
    assert again.floors == {COMPONENT: 4}
    await again.tick()
    assert again.decision is not None
    assert again.decision.targets == {COMPONENT: 4}


async def test_a_torn_state_file_is_begun_anew_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state.json").write_text('{"form": 1, "kept": {"learned": {"floors": 3}}}')
    stage = Stage(tmp_path)
    assert any("begun anew" in text for text in caplog.messages)
    assert TickOutcome.APPLY in await stage.ticks(4)


async def test_a_warm_start_is_for_a_planner_that_has_kept_nothing(tmp_path: Path) -> None:
    windows = [Traffic(5.0, 40.0, 1000.0, 100.0)] * 3
    stage = Stage(tmp_path)
    stage.planner._state.close()  # type: ignore[union-attr]
    warm = stage.begun(Learned(windows=windows))
    assert len(warm.builtin.predict.windows) == 3
    await warm.end()
    again = stage.begun(Learned(windows=windows))
    assert len(again.builtin.predict.windows) == 3, "they were kept, and are not learned twice"


async def test_the_run_ends_at_once_and_lets_another_begin(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    stage = Stage(tmp_path, report_file=report)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(stage.planner.run(stop))
        await asyncio.sleep(0)
        stop.set()
        await running
    await stage.planner.end()
    assert stage.scaler.is_closed
    assert report.read_text().startswith("<!doctype html>")
    StateFile(tmp_path / "state.json").close()


def test_components_are_those_of_the_options() -> None:
    options = PlannerOptions(proxies="p:1", gpus_per_replica=4, max_gpu_budget=30, min_endpoint=2)
    assert components_of(options) == [Component(COMPONENT, "*", 4, 2, 7)]
    assert components_of(PlannerOptions(proxies="p:1", max_gpu_budget=-1))[0].max_endpoint == 10**6


async def test_figures_that_a_rule_cannot_take_cost_one_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(stage.planner.builtin, "steps", lambda context: 1 / (context.tick - 1))
        assert await stage.ticks(1) == [TickOutcome.FAILED]
    assert TickOutcome.FAILED not in await stage.ticks(3)


async def test_engines_that_are_not_read_are_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "planner")
    stage = Stage(tmp_path)
    stage.looks.unread = {"a": "GET http://a/metrics: status 401"}
    await stage.ticks(2)
    assert b"cache_planner_unread_engines 1.0" in stage.planner.metrics.text()
    stage.looks.unread = {}
    await stage.ticks(2)
    assert b"cache_planner_unread_engines 0.0" in stage.planner.metrics.text()
    said = [text for text in caplog.messages if "read" in text]
    assert said == [
        "1 engines are not read; a: GET http://a/metrics: status 401",
        "all engines are read again",
    ]


async def test_what_a_child_forecasts_is_the_prediction_and_the_child_ends_with_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one notes its number, and says 777 whatever it is asked."""
    note = tmp_path / "note"
    says = f"""if True:
        import os, sys
        open({str(note)!r}, "w").write(str(os.getpid()))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(777, flush=True)
    """
    monkeypatch.setitem(COMMANDS, "arima", (sys.executable, "-c", says))
    stage = Stage(tmp_path, load_predictor="arima")
    found = set[float | None]()
    for n in range(60):  # it may take a while to start
        stage.looks.requests = 10.0 + n
        said = (await stage.planner.tick()).decided
        assert said is not None
        found.add(said["prediction"]["next_num_req"])
        assert said["prediction"]["hit_ratio"] == 0.0
        stage.clock.now_s += 180.0
        if 777.0 in found:
            break
    assert {10.0, 11.0, 12.0, 13.0, 777.0} <= found
    process = Path("/proc") / note.read_text()
    assert process.exists()
    await stage.planner.end()
    assert not process.exists()


async def test_what_a_decision_waits_for_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "planner")
    stage = Stage(tmp_path, advisory=True)
    await stage.ticks(12)
    said = [text for text in caplog.messages if "yet" in text or "known" in text]
    assert said == [
        "nothing is decided yet: combined: insufficient_data",
        "load and model are known",
    ]
