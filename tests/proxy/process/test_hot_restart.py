"""Sockets that are handed down: which are taken, which are refused, and who is told what."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import pytest

from proxy.app import Proxy
from proxy.config.options import Settings
from proxy.config.sources import ConfigError
from proxy.fleet import probes
from proxy.process import hot_restart
from proxy.process.hot_restart import HotRestart, InheritedSockets
from proxy.process.notify import Notifier
from replayer.simulator.host import SimFleet
from tests.support.harness import addresses, until


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def listening(stack: ExitStack, host: str = "127.0.0.1") -> socket.socket:
    return stack.enter_context(socket.create_server((host, 0)))


def handed(monkeypatch: pytest.MonkeyPatch, *fds: int) -> None:
    """As if these were the descriptors from the third on: copies, which are closed by who reads."""
    copies = [os.dup(fd) for fd in fds]
    # Each of `_add` is asked for the n-th from FIRST_FD on.
    add = InheritedSockets._add
    monkeypatch.setattr(
        InheritedSockets,
        "_add",
        lambda self, name, fd: add(self, name, copies[fd - hot_restart.FIRST_FD]),
    )


def test_the_environment_is_for_one_process(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    handed(monkeypatch, listening(stack).fileno())
    environ = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "web", "LISTEN_PID": "1", "HOME": "/"}
    assert not InheritedSockets.read(environ).sockets, "another process is meant"
    assert environ == {"HOME": "/"}
    environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    found = InheritedSockets.read(environ)
    assert [name for name, _ in found.sockets] == [""]
    assert not found.sockets[0][1].get_inheritable()
    found.drop()


@pytest.mark.parametrize("count", ["", "-1", "many", "65", "1.5", "9" * 5000])
def test_a_count_that_is_none(count: str) -> None:
    with pytest.raises(ConfigError, match="LISTEN_FDS: a whole number, 0 to 64"):
        InheritedSockets.read({"LISTEN_FDS": count})


@pytest.mark.parametrize("kind", ["file", "unix", "udp", "connected"])
def test_what_is_no_listening_tcp_socket(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    if kind == "file":
        fd = stack.enter_context((tmp_path / "f").open("wb")).fileno()
    else:
        family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        type_ = socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM
        sock = stack.enter_context(socket.socket(family, type_))
        if kind == "unix":
            monkeypatch.chdir(tmp_path)  # a whole path may be too long for one
            sock.bind("s")
            sock.listen()
        fd = sock.fileno()
    handed(monkeypatch, fd)
    with pytest.raises(ConfigError, match=r"LISTEN_FDS: descriptor \d+ \(web\)"):
        InheritedSockets.read({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "web"})


async def test_which_sockets_are_taken(stack: ExitStack) -> None:
    web, own, own_admin = (listening(stack) for _ in range(3))
    given = InheritedSockets([("web", web), ("own-admin", own_admin)])
    assert await given.take("public", "10.0.0.1", 1) == ("public", [web]), (
        "where it is from decides"
    )
    port = own_admin.getsockname()[1]
    assert await given.take("admin", "127.0.0.1", port) == ("own-admin", [own_admin])
    assert await given.take("admin", "127.0.0.1", port) == ("own-admin", []), "once"
    there = InheritedSockets([("own-public", own)])
    assert await there.take("public", "127.0.0.1", 0) == ("own-public", [own]), "any port will do"
    for host, port in (("127.0.0.1", 1), ("0.0.0.0", 0)):
        other = socket.socket(fileno=os.dup(own.fileno()))
        moved = InheritedSockets([("own-public", other)])
        assert await moved.take("public", host, port) == ("own-public", [])
        assert other.fileno() == -1, "closed: the options say another address"


async def test_a_server_on_all_that_it_is_given(tmp_path: Path, stack: ExitStack) -> None:
    """Two public sockets, an admin one, and one whose listener the options do not want."""
    sockets = [listening(stack) for _ in range(4)]
    ports = [sock.getsockname()[1] for sock in sockets]
    names = ("", "web", "admin", "own-admin")
    given = InheritedSockets(
        [(n, socket.socket(fileno=os.dup(s.fileno()))) for n, s in zip(names, sockets, strict=True)]
    )
    async with SimFleet(1) as fleet:
        settings = Settings(instances=addresses(fleet), port=1, admin_port=1)
        server = Proxy(settings, inherited=given)
        await server.start()
        try:
            assert [name for name, _ in server._listeners()] == ["public", "public", "admin"]
            async with aiohttp.ClientSession() as http:
                for port, status in zip(ports[:3], (404, 404, 200), strict=True):
                    async with http.get(f"http://127.0.0.1:{port}/instances") as response:
                        assert response.status == status
            assert server.own_ports == set(ports[:3])
        finally:
            await server.close()


async def test_who_sees_no_instance_replaces_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "FIRST_LOOK_S", 0.05)
    hears, tells = os.pipe()
    given = InheritedSockets(_pipe=tells)
    try:
        server = Proxy(Settings(instances=["127.0.0.1:1"], port=0), inherited=given)
        with pytest.raises(ConfigError, match=r"no instance has answered in 0\.05 s") as caught:
            await server.start()
        assert await asyncio.to_thread(given.tell_failure, str(caught.value))
        assert os.read(hears, 100) == b"no instance has answered in 0.05 s\n"
        assert not given.has_predecessor
    finally:
        os.close(hears)


KEYS = "acme:sk-acme-0123456789abcdef,zeta:sk-zeta-fedcba9876543210"


HERE: dict[str, Any] = {"instances": ["127.0.0.1:1"], "host": "127.0.0.1", "port": 0}


def unreadable() -> Settings:
    """Options that are being written."""
    raise ConfigError("unknown key 'api' in file PATH")


async def comes_up(process: Proxy) -> None:
    await process.start()
    await process.close()


async def left_by(process: Proxy) -> BinaryIO:
    """The snapshot for the next process; closes this one."""
    try:
        await process._refuse_opening()
        return await process._leave_snapshot()
    finally:
        await process.close()


@pytest.mark.parametrize("at_the_check", ["whole", "unreadable"])
@pytest.mark.parametrize(("later", "why"), [(KEYS, None), (KEYS[:-4], "start of"), (None, "none")])
async def test_options_that_are_cut_after_they_were_let_through(
    at_the_check: str, later: str | None, why: str | None
) -> None:
    """A successor holds what it has read itself against what its predecessor had closed."""
    whole = Settings(**HERE, api_key=KEYS)
    process = Proxy(whole, unreadable if at_the_check == "unreadable" else lambda: whole)
    await process.start()
    left = await left_by(process)
    successor = Proxy(Settings(**HERE, api_key=later), inherited=InheritedSockets(snapshot=left))
    if why is None:
        await comes_up(successor)
        return
    with pytest.raises(ConfigError, match=f"api_key.*{why}"):
        await comes_up(successor)


async def test_the_rest_of_a_key_that_was_removed_stays_no_key() -> None:
    """Not in the next process, nor in a reload of that one, nor in the one behind it."""
    whole, acme, cut = (
        Settings(**HERE, api_key=keys) for keys in (KEYS, KEYS.partition(",")[0], KEYS[:-4])
    )
    process = Proxy(whole, lambda: acme)
    await process.start()
    results = [await process.reloader.reload("test")]
    for _ in range(2):
        found = [acme, cut]
        process = Proxy(acme, found.pop, InheritedSockets(snapshot=await left_by(process)))
        await process.start()
        results.append(await process.reloader.reload("test"))
    process = Proxy(cut, inherited=InheritedSockets(snapshot=await left_by(process)))
    assert results == ["applied", "refused", "refused"]
    with pytest.raises(ConfigError, match="key 2 is the start of an earlier one"):
        await comes_up(process)


async def test_a_broken_snapshot_keeps_what_was_closed() -> None:
    """The rows behind the first line are of no use; the first one is."""
    process = Proxy(Settings(**HERE, api_key=KEYS))
    await process.start()
    with await left_by(process) as left:
        head = left.readline()
    broken = InheritedSockets(snapshot=io.BytesIO(head + b'{"sessions": 1}\n'))
    with pytest.raises(ConfigError, match="api_key would become none"):
        await comes_up(Proxy(Settings(**HERE), inherited=broken))


async def nothing() -> BinaryIO:
    return tempfile.TemporaryFile()


async def test_a_successor_that_is_silent_is_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that cannot be executed: both are one line."""
    monkeypatch.setattr(hot_restart, "START_S", 0.1)
    asked = HotRestart(list, nothing)
    watching = asyncio.create_task(asked.watch(lambda pid: None, lambda: None))
    monkeypatch.setattr(hot_restart, "STOP_S", 0.1)
    monkeypatch.setattr("sys.orig_argv", ["sh", "-c", "trap '' TERM; exec sleep 60"])
    with caplog.at_level(logging.ERROR):
        for program in ("/bin/sh", "/nowhere/python"):
            monkeypatch.setattr("sys.executable", program)
            caplog.clear()
            asked.ask()
            await until(lambda: "carries on" in caplog.text, "given up")
            assert ("not ready in" if program == "/bin/sh" else "No such file") in caplog.text
    assert not watching.done()
    watching.cancel()
    await asyncio.wait({watching})
    with caplog.at_level(logging.WARNING):
        asked.ask()
    assert "this process is stopping" in caplog.text


async def test_a_stopped_successor_does_not_take_the_pid_file_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It had its own id in it, and removed it, or was killed and could not."""
    path = tmp_path / "pid"
    supervisor = Notifier({}, path)
    await asyncio.to_thread(supervisor.started, replaces=False)
    asked = HotRestart(list, nothing)
    watching = asyncio.create_task(asked.watch(lambda pid: None, supervisor.carries_on))
    monkeypatch.setattr("sys.executable", "/bin/sh")
    for last_act in (f"rm {path}", "true"):
        monkeypatch.setattr("sys.orig_argv", ["sh", "-c", f"echo $$ > {path}; {last_act}; exit 3"])
        caplog.clear()
        asked.ask()
        await until(lambda: "carries on" in caplog.text, "given up")
        await until(lambda: not asked._is_under_way, "the next one may be asked for")
        assert path.read_text() == f"{os.getpid()}\n"
    monkeypatch.setattr(supervisor, "_pid_file", tmp_path / "gone" / "pid")
    caplog.clear()
    asked.ask()
    await until(lambda: "the pid file" in caplog.text, "one line says why it is not there")
    assert "Traceback" not in caplog.text
    assert not watching.done()
    watching.cancel()
    await asyncio.wait({watching})


def test_process_1_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    HotRestart(list, nothing).ask()
    assert "a container ends with its process 1" in caplog.text
