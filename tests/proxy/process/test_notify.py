"""The pid file, and what a supervisor is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.process.notify import Notifier


def test_the_pid_file(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    one = Notifier({}, path)
    one.started(replaces=False)
    assert path.read_text() == f"{os.getpid()}\n"
    path.write_text("1\n")
    one.ended()
    assert path.exists(), "another's"
    one.started(replaces=True)
    one.ended()
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="nowhere"):
        Notifier({}, tmp_path / "nowhere" / "pid").started(replaces=False)
