"""The demo's own claims, on a small part of its trace: the commands as processes, real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.waiting import until_true

SMALL = ("--speed", "12", "--", "--no-progress", "--no-html", "--limit", "60")

pytestmark = [pytest.mark.demo, pytest.mark.timeout(120)]


def demo(out: Path, *options: str) -> subprocess.Popen[str]:
    """Start it."""
    command = [sys.executable, "-m", "replayer.demo", "--out", str(out), *options, *SMALL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(run: subprocess.Popen[str]) -> list[str]:
    """The lines of its checks. Every one must have held."""
    said, _ = run.communicate()
    lines = said.splitlines()
    assert run.returncode == 0, said
    assert not [line for line in lines if line.startswith("FAILED")]
    return [line for line in lines if line.startswith("ok ")]


RUNS = {
    "with": (),
    "without": ("--offload-policy", "never"),
    "kill": ("--kill-engine-after", "30"),
}


class Demos(NamedTuple):
    out: Path
    """Each writes to a folder of its name."""
    runs: dict[str, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demos]:
    """All three at once, since they mostly wait."""
    out = tmp_path_factory.mktemp("out")
    with ExitStack() as stack:
        runs = {name: stack.enter_context(demo(out / name, *RUNS[name])) for name in RUNS}
        yield Demos(out, runs)
        for run in runs.values():
            run.terminate()


def test_offloads_move_kv_and_change_no_output(demos: Demos) -> None:
    assert len(ended(demos.runs["with"])) == 4
    ended(demos.runs["without"])
    outs = [str(demos.out / name) for name in ("with", "without")]
    compare = [sys.executable, "-m", "analysis.cli", "compare", *outs, "--require-identical"]
    done = subprocess.run(compare, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert b"identical output: 60 of 60 requests" in done.stdout


def test_a_killed_engine_loses_nothing_that_had_not_begun(demos: Demos) -> None:
    claims = ended(demos.runs["kill"])
    assert any("no request lost that had not begun to stream" in claim for claim in claims)


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_every_child(tmp_path: Path, sign: signal.Signals, status: int) -> None:
    """Engines, proxy and client go with it, by pid; one line says so."""
    command = [
        sys.executable,
        "-m",
        "replayer.demo",
        "--out",
        str(tmp_path),
        "--engines",
        "2",
    ]
    with subprocess.Popen(
        [*command, *SMALL], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout
        demo.stdout.readline()
        children = until_true(lambda: len(found := _children(demo.pid)) >= 4 and found)
        until_true((tmp_path / "proxy.jsonl").read_text)
        demo.send_signal(sign)
        said = demo.stdout.read()
    assert demo.returncode == status
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(f"demo: stopped by {sign.name}")


def test_a_signal_before_anything_runs_leaves_nothing(tmp_path: Path) -> None:
    """While the engines are being started, and twice."""
    command = [sys.executable, "-m", "replayer.demo", "--out", str(tmp_path), *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        children = until_true(lambda: _children(demo.pid))
        demo.send_signal(signal.SIGTERM)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate()
    assert demo.returncode in (143, 130)
    assert said.count("\n") == 1
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(status[1]) == pid:
                found.append(int(entry))
    return found
