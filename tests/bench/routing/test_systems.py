"""Starting a system: what is installed for it, and a process that does not come up."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from bench.routing import environments
from bench.routing.environments import Environment, RoutingError
from bench.routing.systems import RIVALS, SYSTEMS, environments_of, reserved_ports, wait_for
from replayer.demo.processes import Children


def test_each_system_has_the_environments_that_it_needs() -> None:
    assert [one.name for one in environments_of(SYSTEMS)] == [
        "dynamo",
        "sglang-router",
        "vllm-router",
    ]
    assert [one.name for one in environments_of(["cache-proxy"])] == ["dynamo"]
    assert len(RIVALS) == 4


def test_the_engines_environment_has_exact_versions() -> None:
    comment, *lines = environments.REQUIREMENTS.read_text().splitlines()
    assert comment.startswith("#")
    assert "ai-dynamo==1.6.1" in lines
    assert all(line.count("==") == 1 for line in lines)


def test_what_is_installed_stays(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ".installed").write_text("one==1")
    environments.make([Environment("one", ("one==1",), "one==1")], tmp_path, said.append)
    assert not said


def test_what_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    wanted = [Environment("one", ("one==1",), "one==1")]
    with pytest.raises(RoutingError, match=r"cannot install; this failed: .*no-python -m venv"):
        environments.make(wanted, tmp_path, print)


def test_a_program_that_ends_is_named_with_its_output(tmp_path: Path) -> None:
    children = Children()
    with children.stopped_at_the_end():
        child = children.start_program("mocker0", tmp_path / "log", [sys.executable, "-c", "1/0"])
        with pytest.raises(RoutingError, match=r"mocker0 ended; .*log, at its end: Zero"):
            wait_for(lambda: False, [child])


def test_a_reserved_port_is_for_the_server_alone() -> None:
    with reserved_ports(2, 3) as ports:
        for port in (*ports, *(port + 3 for port in ports)):
            with socket.socket() as client, pytest.raises(OSError, match="in use"):
                client.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as server:
                assert server.getsockname()[1] == port
    with socket.socket() as client:
        client.bind(("127.0.0.1", ports[0]))


def test_what_fails_while_ports_are_reserved_is_not_hidden() -> None:
    with pytest.raises(OSError, match="mine"), reserved_ports(1):
        raise OSError("mine")


def test_all_end_side_by_side(tmp_path: Path) -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = Children()
    with children.stopped_at_the_end():
        one, other = (children.start_program(n, tmp_path / n, wait) for n in ("a", "b"))
        children.terminate()
        assert one.child.wait(10) == other.child.wait(10) == -15
