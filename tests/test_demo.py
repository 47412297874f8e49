"""The demo's own claims, on a small part of its trace: the commands as processes, real sockets."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import orjson
import psutil
import pytest

from bench.measuring.processes import Child
from tests.support.waiting import until_true

SMALL = ("--speed", "18", "--", "--no-progress", "--no-html", "--limit")

pytestmark = [pytest.mark.demo, pytest.mark.timeout(180)]


def demo(out: Path, requests: int, *options: str) -> Child:
    """Start it."""
    command = [sys.executable, "-m", "replayer.demo", "--out", str(out), *options, *SMALL]
    return Child([*command, str(requests)])


RUNS: dict[str, tuple[str, ...]] = {
    "tour": ("--engines", "2"),
    "kill": ("--engines", "3", "--kill-engine-after", "20"),
}
REQUESTS = {"tour": 16, "kill": 48}
Said = dict[str, tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Folder and lines of each run, both at once, since they mostly wait; every check held."""
    ends = {}
    with ExitStack() as stack:
        outs = {name: tmp_path_factory.mktemp(name) for name in RUNS}
        runs = {
            name: stack.enter_context(demo(outs[name], REQUESTS[name], *options))
            for name, options in RUNS.items()
        }
        for name, run in runs.items():
            assert run.wait() == 0, run.log
            assert "FAILED" not in run.log
            ends[name] = outs[name], run.log.splitlines()
    return ends


def test_a_killed_engine_loses_nothing(said: Said) -> None:
    _, lines = said["kill"]
    claims = [line for line in lines if line.startswith("ok ")]
    assert len(claims) == 5
    assert any("no request lost that had not begun to stream" in claim for claim in claims)
    assert any("the kill was noticed" in claim for claim in claims)
    assert any("all route classes" in claim for claim in claims)


def test_the_tour_compares_with_round_robin_and_ends_with_the_page(said: Said) -> None:
    out, lines = said["tour"]
    text = "\n".join(lines)
    assert "round robin   cost, the default" in text
    assert "of round robin's" in text
    assert "ITL p99 is" in text
    assert text.count(" 6 ok") == 2, text
    assert f"{out}/report.html" in text
    assert (out / "run.json").exists()
    hits = []
    for folder in ("round-robin", "", "no-offload", "offload"):
        summary = orjson.loads((out / folder / "summary.json").read_bytes())
        hits.append(summary["cache"]["engine_hit_ratio"])
        assert (out / folder / "proxy.jsonl").exists()
    assert hits[0] < hits[1]


def test_offloads_change_no_output(said: Said) -> None:
    out, lines = said["tour"]
    assert any("the same, token by token: 10 of 10." in line for line in lines)
    outs = [str(out / name) for name in ("offload", "no-offload")]
    compare = [sys.executable, "-m", "analysis.cli", "compare", *outs, "--require-identical"]
    done = subprocess.run(compare, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert b"identical output: 10 of 10 requests" in done.stdout


def test_a_signal_stops_every_child(tmp_path: Path) -> None:
    """Engines, proxy and client go with it, by pid; one line says so."""
    with demo(tmp_path, 60, "--engines", "1", "--offload-policy", "never") as run:
        until_true(lambda: run.found("\n"))
        pids = until_true(lambda: len(found := run.pids) >= 4 and found)
        until_true((tmp_path / "proxy.jsonl").read_text)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert not any(map(psutil.pid_exists, pids))
    assert "Traceback" not in run.log
    assert run.log.splitlines()[-1].startswith("demo: stopped by SIGINT")


def test_a_signal_before_anything_runs_leaves_nothing(tmp_path: Path) -> None:
    """While the engine is being started, and twice."""
    with demo(tmp_path, 60, "--engines", "1", "--offload-policy", "never") as run:
        pids = until_true(lambda: len(found := run.pids) >= 2 and found)
        run.send_signal(signal.SIGTERM)
        run.send_signal(signal.SIGINT)
        assert run.wait() in (143, 130)
    assert run.log.count("\n") == 1
    assert not any(map(psutil.pid_exists, pids))
