"""What each worker is given: flags of its own, sockets that share a port; and what is refused."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.process import slots
from proxy.process.hot_restart import InheritedSockets

GIVEN = ("--instances", "x:1", "--host", "127.0.0.1", "--port", "0")
SHARE = ("--share", "redis://127.0.0.1:1")


def settings(**more: Any) -> Settings:
    plain = {"instances": ["x:1"], "host": "127.0.0.1", "port": 0, "workers": 2}
    return Settings(**(plain | {"share": "redis://127.0.0.1:1"} | more))


def test_the_flags_of_a_worker() -> None:
    given = settings(
        admin_port=9000,
        request_log="/logs/{worker}.jsonl",
        access_log="text",
        max_connections=101,
        max_memory_bytes="1GiB",
        max_queue=1,
        pid_file="/run/pid",
    )
    assert slots.flags(given, 1) == [
        "--workers=1",
        "--pid-file=none",
        "--admin-port=9001",
        "--request-log=/logs/1.jsonl",
        "--max-connections=51",
        f"--max-memory-bytes={1 << 29}",
        "--max-queue=1",
        f"--max-queue-bytes={32 << 20}",
    ]


def test_what_is_not_limited_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "cgroup_limit", lambda: None)
    names = {flag.partition("=")[0] for flag in slots.flags(settings(max_queue=0), 0)}
    assert names == {"--workers", "--pid-file", "--max-queue", "--max-queue-bytes"}


def test_the_limit_of_the_control_group_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "cgroup_limit", lambda: 1 << 30)
    assert f"--max-memory-bytes={1 << 29}" in slots.flags(settings(), 0)


def test_each_has_a_socket_of_the_same_port() -> None:
    with slots.opened(settings(admin_port=0)) as workers:
        names = [[name for name, _ in worker.handed] for worker in workers]
        assert names == [["public", "admin"]] * 2
        copies = [socket.socket(fileno=os.dup(w.handed[0][1])) for w in workers]
        ports = {sock.getsockname()[1] for sock in copies}
        for sock in copies:
            sock.close()
        assert len(ports) == 1
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"):
            slots.opened(settings(port=ports.pop())).__enter__()


def test_who_is_not_the_main_process_is_not_heard() -> None:
    with slots.opened(settings()) as (worker, _):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as says:
            says.connect(worker.hears.getsockname())
            says.send(b"READY=1")
            assert not list(worker.told())
            worker.pid = os.getpid()
            says.send(b"MAINPID=7\nSTATUS=")
            assert list(worker.told()) == [("MAINPID", "7"), ("STATUS", "")]


def test_no_other_user_can_send_to_a_worker_s_launcher() -> None:
    with slots.opened(settings()) as workers:
        names = [Path(worker.hears.getsockname()) for worker in workers]
        (folder,) = {name.parent for name in names}
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.parametrize("is_there", [True, False], ids=["long", "none"])
def test_without_a_folder_the_kernel_names_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder = tmp_path / ("x" * 100)
    if is_there:
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
    else:
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with slots.opened(settings()) as (worker, _):
        assert worker.hears.getsockname().startswith(b"\0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "2"), ["workers = '2'", "share = none"]),
        (("--workers", "65", *SHARE), ["workers = '65'", "<= 64"]),
        (("--workers", "0", *SHARE), ["workers = '0'", ">= 1"]),
        (("--workers", "2", *SHARE, "--request-log", "/x"), ["request_log = '/x'", "{worker}"]),
        (("--workers", "2", *SHARE, "--request-log", "-"), ["request_log = '-'", "{worker}"]),
        (
            ("--workers", "3", *SHARE, "--port", "8002", "--admin-port", "8000"),
            ["admin_port = '8000'", "port = '8002'"],
        ),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[str, ...], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*GIVEN, *options)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_memory_bytes": "64MiB"}, "max_memory_bytes = '33554432'.*>= 64MiB"),
        ({"admin_port": 65535}, "admin_port = '65536'.*<= 65535"),
    ],
)
def test_a_share_that_is_out_of_range(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"^the last of 2 workers: {words}"):
        slots.check(settings(**more), GIVEN, InheritedSockets())


def test_sockets_of_a_service_manager_are_for_one_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = InheritedSockets([("web", listening)])
        with pytest.raises(ConfigError, match="LISTEN_FDS"):
            slots.check(settings(), GIVEN, given)
