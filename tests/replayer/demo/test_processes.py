"""The demo's children: one that does not start says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from replayer.demo.processes import Children


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
