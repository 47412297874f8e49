"""The demo's own claims, on a small part of its trace: the commands as processes, real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--speed", "12", "--", "--no-progress", "--no-html", "--limit", "90")
pytestmark = [pytest.mark.demo, pytest.mark.timeout(120)]


def demo(out: Path, *options: str) -> list[str]:
    """Run it; its lines. Every check must have held."""
    command = [sys.executable, "-m", "replayer.demo", "--out", str(out), *options, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in lines if line.startswith("FAILED")]
    return [line for line in lines if line.startswith("ok ")]


def test_offloads_move_kv_and_change_no_output(tmp_path: Path) -> None:
    with_offloads, without = tmp_path / "with", tmp_path / "without"
    claims = demo(with_offloads)
    assert len(claims) == 4
    demo(without, "--offload-policy", "never")
    compare = [sys.executable, "-m", "analysis.cli", "compare", str(with_offloads), str(without)]
    done = subprocess.run([*compare, "--require-identical"], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    assert b"identical output: 90 of 90 requests" in done.stdout


def test_a_killed_engine_loses_nothing_that_had_not_begun(tmp_path: Path) -> None:
    claims = demo(tmp_path / "kill", "--kill-engine-after", "30")
    assert any("no request lost that had not begun to stream" in claim for claim in claims)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Also when the demo itself is told to end: its children go with it, by pid."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "replayer.demo", "--out", str(out), "--engines", "2", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        child.stdout.readline()
        children = _children(child.pid)
        assert len(children) >= 3
        child.send_signal(2)
        child.wait(60)
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
