"""The demo's own claims, on a small part of its trace: the commands as processes, real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

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


def test_offloads_change_no_output_and_a_killed_engine_loses_nothing(tmp_path: Path) -> None:
    """Three demos at once, since they mostly wait."""
    with ExitStack() as stack:
        runs = {name: stack.enter_context(demo(tmp_path / name, *RUNS[name])) for name in RUNS}
        for run in runs.values():
            stack.callback(run.terminate)
        assert len(ended(runs["with"])) == 4
        ended(runs["without"])
        claims = ended(runs["kill"])
        assert any("no request lost that had not begun to stream" in claim for claim in claims)
    outs = [str(tmp_path / name) for name in ("with", "without")]
    compare = [sys.executable, "-m", "analysis.cli", "compare", *outs, "--require-identical"]
    done = subprocess.run(compare, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert b"identical output: 60 of 60 requests" in done.stdout


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
