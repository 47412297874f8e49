"""The command of `exec`: whatever it does, its call ends, in one line and with nobody left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bench.measuring.processes import is_running
from planner.scalers import command
from planner.scalers.base import Failure, ScalerError
from planner.scalers.command import Command
from tests.support.harness import until


def made(folder: Path, body: str) -> Command:
    script = folder / "fleet"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return Command([str(script)])


async def failure(one: Command, *words: str) -> ScalerError:
    with pytest.raises(ScalerError) as caught:
        await (one.call(*words) if words else one.instances())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return caught.value


async def test_a_list_is_read(tmp_path: Path) -> None:
    text = "a=127.0.0.1:1\n\n  b-1.x=[::1]:2;bootstrap=8998 \nc=https://h:3\r"
    (tmp_path / "text").write_text(f"{text}\n")
    found = await made(tmp_path, f"cat {tmp_path}/text").instances()
    assert {name: spec.url for name, spec in found.items()} == {
        "a": "http://127.0.0.1:1",
        "b-1.x": "http://[::1]:2",
        "c": "https://h:3",
    }
    assert found["b-1.x"].bootstrap_url == "http://[::1]:8998"
    assert await made(tmp_path, "true").instances() == {}


@pytest.mark.parametrize(
    "line", ["a b c", "a=", "=1", "a=h:99999", "a=http://h", "ö=h:1", "a/b=h:1", "a=h:1;x=2"]
)
async def test_garbage_in_a_list_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "text").write_text(f"ok=127.0.0.1:1\n{line}\n")
    error = await failure(made(tmp_path, f"cat {tmp_path}/text"))
    assert error.failure is Failure.FAILED
    assert f"fleet list: {line!r}" in str(error)


async def test_bytes_of_any_kind_are_one_line(tmp_path: Path) -> None:
    error = await failure(made(tmp_path, "head -c 3000 /dev/urandom | tr -d '\\n'; echo"))
    assert str(error).isprintable()
    error = await failure(
        made(tmp_path, "printf 'a\\n\\033[31m \\377 why\\n' >&2; exit 7"), "start"
    )
    assert str(error).endswith("start: exit status 7: [31m \ufffd why")


async def test_one_that_hangs_is_killed_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "COMMAND_S", 0.5)
    body = f"sleep 600 & echo $! > {tmp_path}/pid; echo $$ >> {tmp_path}/pid; wait"
    error = await failure(made(tmp_path, body), "start", "a")
    assert error.failure is Failure.TIMEOUT
    assert "start a: not over in 0.5 s" in str(error)
    pids = [int(text) for text in (tmp_path / "pid").read_text().split()]
    await until(lambda: not any(map(is_running, pids)), "all are gone")


async def test_what_it_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    one = made(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; echo started")
    assert await one.call("start", "a") == "started\n"
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid), "an instance outlives the call"
    made(tmp_path, f"kill {pid}")
    await one.call("stop", "a")


@pytest.mark.parametrize("where", ["1", "2"])
async def test_output_without_end_is_cut(tmp_path: Path, where: str) -> None:
    error = await failure(made(tmp_path, f"exec yes >&{where}"), "list")
    assert str(error).endswith(f"more than {command.MOST_OUTPUT} bytes")


async def test_a_list_that_is_too_long_is_not_read_in_part(tmp_path: Path) -> None:
    error = await failure(made(tmp_path, f"head -c {command.MOST_OUTPUT + 1} /dev/zero"))
    assert str(error).endswith(f"more than {command.MOST_OUTPUT} bytes")


async def test_one_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    missing = await failure(Command([f"{tmp_path}/none"]))
    assert str(missing) == f"{tmp_path}/none list: No such file or directory"
    (tmp_path / "plain").touch()
    assert str(await failure(Command([f"{tmp_path}/plain"]))).endswith("Permission denied")
    (tmp_path / "plain").chmod(0o755)
    (tmp_path / "plain").write_bytes(b"\0nothing")
    assert str(await failure(Command([f"{tmp_path}/plain"]))).endswith("Exec format error")


async def test_one_that_is_killed_is_a_failure(tmp_path: Path) -> None:
    error = await failure(made(tmp_path, "kill -9 $$"), "list")
    assert "exit status -9" in str(error)


async def test_without_a_temporary_file_the_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path, "exit 0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    said = await failure(one, "list")
    assert said.failure is Failure.FAILED
    assert "no temporary file: No such file" in str(said)
