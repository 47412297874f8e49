"""The demo's children: one that does not start says why, and a signal stops them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from replayer.demo.processes import Children, Stopped


def test_a_child_that_does_not_start(tmp_path: Path) -> None:
    children = Children()
    with children.stopped_at_the_end():
        child = children.start("proxy", tmp_path / "out", "proxy.cli", "--instances", "a b")
        with pytest.raises(RuntimeError) as raised:
            child.wait_for("listening on")
    where, _, last = str(raised.value).partition(", at its end: ")
    assert where == f"proxy did not start; its output is in {tmp_path / 'out'}"
    assert "instances" in last
    assert "a b" in last


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_signal_that_ends_a_demo_stops_its_children(
    tmp_path: Path, sign: signal.Signals
) -> None:
    children = Children()
    program = (sys.executable, "-c", "import time; time.sleep(60)")
    started = []

    def run() -> None:
        with children.stopped_at_the_end():
            started.append(children.start_program("sleeper", tmp_path / "out", program))
            os.kill(os.getpid(), sign)

    with pytest.raises(Stopped, match=sign.name) as raised:
        run()
    assert raised.value.number == sign
    assert started[0].child.poll() == -signal.SIGTERM
