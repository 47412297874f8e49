"""What would have been predicted on a trace, and the replicas that follow from a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import cli
from planner.config.options import PlannerOptions
from planner.config.profiles import write_profile
from planner.core.perf.profile import DecodePoint, PrefillPoint, Profile
from planner.core.pipeline import How
from planner.core.types import COMPONENT, Traffic
from planner.dry_run import planned, with_plugins
from planner.run import Learned
from planner.service import learned
from tests.planner.plugin_api.server import Plugin, served, wish
from tests.planner.sources.test_trace import written
from tests.planner.test_run import Stage

# A step takes 10 ms, 50 us more per token of a prompt and 100 ns more per KV token.
PREFILL = tuple(PrefillPoint(x, 0.01 + 50e-6 * x, 1.0) for x in (500.0, 1000.0, 4000.0))
DECODE = tuple(DecodePoint(k, 1000.0, 0.01 + 1e-7 * k * 100_000, 1.0) for k in (0.1, 0.5, 0.9))
PROFILE = Profile(PREFILL, DECODE, 100_000)
LOAD = [Traffic(10.0, n, 1000.0, 100.0) for n in (10.0, 10.0, 200.0, 200.0, 0.0)]


def options(**more: object) -> PlannerOptions:
    usual: dict[str, object] = {
        "proxies": "none",
        "load_predictor": "constant",
        "throughput_adjustment_interval_seconds": 10.0,
    }
    return PlannerOptions(**(usual | more))


def test_each_interval_is_predicted_from_those_before_it() -> None:
    found = list(planned(LOAD, options(), Learned(PROFILE.priors(8192))))
    assert [one.predicted.next_num_req for one in found] == [None, 10, 10, 200, 200]
    assert found[0].replicas is None
    needed = [one.needed for one in found]
    assert needed[0] == needed[1] == 1
    assert needed[2] == needed[3]
    assert needed[2] is not None
    assert needed[2] > 1
    assert found[3].replicas == needed[2], "it is that of the interval before"
    assert needed[4] == 1


def test_without_a_profile_there_are_no_replicas() -> None:
    assert {one.needed for one in planned(LOAD, options(), Learned())} == {None}


def test_a_trace_before_it_begins_warms_the_predictor() -> None:
    known = Learned(windows=[Traffic(10.0, 50.0, 1000.0, 100.0)] * 6)
    (first, *_) = planned(LOAD, options(), known)
    assert first.predicted.next_num_req is None, "the fleet itself has shown nothing"


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(tmp_path / "a.jsonl", [(n / 20, 1000, 100) for n in range(800)])
    words = ["dry-run", str(trace), "--throughput-adjustment-interval-seconds", "10"]
    assert cli.main(words) == 0
    assert "they need --profile-results-dir" in capsys.readouterr().out
    write_profile(tmp_path, PROFILE)
    assert cli.main([*words, "--profile-results-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mean error of requests" in out
    assert "--profile-results-dir" not in out


async def test_a_planner_with_a_profile_knows_its_engines_from_the_start(tmp_path: Path) -> None:
    write_profile(tmp_path, PROFILE)
    stage = Stage(tmp_path, profile_results_dir=tmp_path)
    assert stage.planner.builtin.state.model(COMPONENT) is None
    known = learned(stage.options)
    stage.planner._state.close()  # type: ignore[union-attr]
    stage.planner = stage.begun(known)
    await stage.ticks(1)
    model = stage.planner.builtin.state.model(COMPONENT)
    assert model is not None
    assert model(2000.0, 0.0) == pytest.approx(0.11, rel=0.2)


async def test_plugins_have_their_say_of_each_interval() -> None:
    plugin = Plugin(wish("AT_MOST", 1, COMPONENT))
    async with served(plugin) as port:
        table = {"name": "least", "stage": "propose", "address": f"127.0.0.1:{port}"}
        slow = {"tick_max_duration_seconds": 300.0}
        own = options(plugin=[table | {"deadline_seconds": 25.0}], max_gpu_budget=-1, **slow)
        found = list(planned(LOAD, own, Learned(PROFILE.priors(8192))))
        told = await with_plugins(found, own)
    targets = [one.targets[COMPONENT] for one in told]
    assert targets == [1] * len(LOAD)
    assert (found[3].replicas or 0) > 1
    assert [one.heard[0].how for one in told] == [How.ANSWERED] * len(LOAD)
    first, second = plugin.asked[:2]
    assert not first.context.HasField("traffic")
    assert second.context.traffic.requests == LOAD[0].requests


def test_a_plugin_that_is_not_there_is_in_the_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(tmp_path / "a.jsonl", [(n / 20, 1000, 100) for n in range(800)])
    table = '{"name": "away", "stage": "propose", "address": "127.0.0.1:1"}'
    audit = tmp_path / "audit.jsonl"
    words = ["dry-run", str(trace), "--plugin", table, "--audit-log", str(audit)]
    assert cli.main([*words, "--throughput-adjustment-interval-seconds", "10"]) == 0
    assert "plugins" in capsys.readouterr().out
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    states = [line["plugins"][0]["state"] for line in lines]
    assert states[:4] == ["failed", "failed", "failed", "off"]
    assert "unavailable" in lines[0]["plugins"][0]["failure"]
    assert lines[0]["targets"] == {COMPONENT: 1}
