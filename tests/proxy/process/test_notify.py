"""The pid file, and what a supervisor is told."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from proxy.process.notify import FAILED, Notifier


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


def test_a_service_manager_hears_what_became_of_a_hot_restart() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")
        manager.settimeout(5.0)
        tells = Notifier({"NOTIFY_SOCKET": "@" + manager.getsockname()[1:].decode()}, None)
        tells.started(replaces=True)
        tells.carries_on()
        assert manager.recv(100) == f"STATUS={FAILED}".encode()
        tells.replaced_by(7)
        assert manager.recv(100) == b"MAINPID=7\nSTATUS="
