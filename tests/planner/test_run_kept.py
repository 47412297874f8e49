"""What a successor finds in the state file, whatever has become of the options or the disk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from planner.config.components import Component
from planner.config.options import PlannerOptions
from planner.core.types import COMPONENT, Capabilities, Context, Replicas
from planner.run import Clocks, Planner
from planner.scalers.base import Applied, Decision, Failure, Fleet, Scaler, ScalerError
from planner.scalers.state_file import Kept, StateError, StateFile
from planner.sources.live import Live
from planner.sources.proxy import Proxies
from planner.telemetry.snapshot import TickOutcome


class Quiet:
    """A source that shows a fleet of some size, and proxies that never fail."""

    def __init__(self, ready: int) -> None:
        self.ready = ready
        self.absent: dict[str, int] = {}
        self.unread: dict[str, str] = {}
        self.start_ups_s: list[float] = []

    async def look(self, tick: int, now_s: float, expected: Mapping[str, int]) -> Context:
        wanted = expected.get(COMPONENT, self.ready)
        replicas = {COMPONENT: Replicas(self.ready, wanted)}
        capabilities = {COMPONENT: Capabilities()}
        return Context(tick, now_s, replicas, capabilities, baseline={COMPONENT: wanted})

    def ages_s(self, now_s: float) -> dict[str, float | None]:
        return {}


class Noting(Scaler):
    """A scaler that notes each call before it does anything, and fails where it is told to."""

    name = "noting"

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.begun: list[Any] = []
        """What was in the state file when a call began."""
        self.path: Path | None = None
        self.fails = False

    async def validate(self, components: Sequence[Component]) -> None: ...

    async def apply(self, decision: Decision, fleet: Fleet) -> Applied:
        assert self.path is not None
        self.begun.append(orjson.loads(self.path.read_bytes())["kept"]["notes"])
        self.noted.append(len(self.noted))
        if self.fails:
            raise ScalerError(Failure.FAILED, "not today")
        return Applied()

    async def aclose(self) -> None: ...

    def notes(self) -> Mapping[str, Any]:
        return {"noted": list(self.noted)}

    def recall(self, notes: Mapping[str, Any]) -> None:
        self.noted = list(notes.get("noted", ()))


def planner_of(folder: Path, scaler: Scaler, ready: int = 1, **options: Any) -> Planner:
    given = {"proxies": "p:1", "advisory": False, "state_file": str(folder / "state")} | options
    source = Quiet(ready)
    now_s = itertools.count(100)
    clocks = Clocks(lambda: float(next(now_s)), lambda: 1.7e9)
    made = PlannerOptions(**{name: str(value) for name, value in given.items()})
    if isinstance(scaler, Noting):
        scaler.path = folder / "state"
    return Planner(made, cast(Live, source), cast(Proxies, source), scaler, clocks)


def keep(folder: Path, kept: Kept) -> None:
    file = StateFile(folder / "state")
    file.save(kept)
    file.close()


async def test_a_scaler_goes_by_its_notes_only_once_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, Kept(Decision(3, {COMPONENT: 1}, 1.0)))
    scaler = Noting()
    planner = planner_of(tmp_path, scaler)
    planner.begin()
    scaler.fails = True
    assert (await planner.tick()).outcome is TickOutcome.FAILED
    assert (await planner.tick()).outcome is TickOutcome.FAILED
    assert scaler.begun == [{"noted": []}, {"noted": [0]}], (
        "what a failed call has left is kept as well"
    )
    scaler.fails = False

    def full(self: StateFile, kept: Kept) -> None:
        raise StateError("state_file: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(StateFile, "save", full)
        for _ in range(3):
            snapshot = await planner.tick()
            assert snapshot.outcome is TickOutcome.FAILED
            assert snapshot.failure == "state_file: No space left on device"
    assert len(scaler.begun) == 2, "on a full disk it is not called"
    assert (await planner.tick()).outcome is TickOutcome.APPLY
    assert scaler.begun[2:] == [{"noted": [0, 1]}]
    await planner.end()


async def test_what_was_only_advised_is_no_target_later(tmp_path: Path) -> None:
    keep(tmp_path, Kept(Decision(7, {COMPONENT: 1}, 1.0), advisory=True))
    scaler = Noting()
    planner = planner_of(tmp_path, scaler, ready=5)
    planner.begin()
    snapshot = await planner.tick()
    assert (snapshot.outcome, snapshot.targets) == (TickOutcome.UNCHANGED, {COMPONENT: 5})
    assert not scaler.begun
    planner.floors[COMPONENT] = 6
    await planner.tick()
    assert planner.decision is not None
    assert (planner.decision.decision_id, planner.decision.targets) == (8, {COMPONENT: 6})
    await planner.end()
    advisory = planner_of(tmp_path, scaler, ready=5, advisory=True)
    advisory.begin()
    assert advisory.decision == planner.decision
    await advisory.end()


@pytest.mark.parametrize(("kept", "used"), [(7, 4), (0, 1), (-3, 1), (3, 3)])
async def test_floors_of_other_limits_are_brought_within(
    tmp_path: Path, kept: int, used: int
) -> None:
    keep(tmp_path, Kept(floors={COMPONENT: kept, "another": 2}))
    planner = planner_of(tmp_path, Noting(), ready=6, max_gpu_budget=4)
    planner.begin()
    assert planner.floors == {COMPONENT: used}
    await planner.tick()
    assert planner.decision is not None
    assert planner.decision.targets == {COMPONENT: 4}, "a fleet over its budget is cut, not ended"
    await planner.end()


async def test_a_failure_that_stays_is_in_the_audit_log_once(tmp_path: Path) -> None:
    keep(tmp_path, Kept(Decision(3, {COMPONENT: 1}, 1.0)))
    scaler = Noting()
    scaler.fails = True
    planner = planner_of(tmp_path, scaler, audit_log=tmp_path / "audit")
    planner.begin()
    for _ in range(5):
        await planner.tick()
    lines = (tmp_path / "audit").read_bytes().splitlines()
    assert [orjson.loads(line)["failure"] for line in lines] == ["not today"]
    assert b'scaler_errors_total{error="failed",scaler="noting"} 5.0' in planner.metrics.text()
    await planner.end()


def test_a_state_file_without_end_of_its_depth_is_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text('{"form": 1, "kept": {"learned": {"a": ' + "[" * 100_000)
    file = StateFile(path)
    kept, why = file.load()
    assert kept == Kept()
    assert "torn or of another form" in why
    file.close()
