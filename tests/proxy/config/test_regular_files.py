"""Files of options are read whole or not at all, and none of them is waited for."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.config.load import load
from proxy.config.options import Settings
from proxy.config.regular_files import FILE_BYTES, read_regular
from proxy.config.sources import ConfigError
from proxy.config.thermal import read_plan
from proxy.net import tls


def listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def grows(path: Path) -> None:
    path.touch()
    os.truncate(path, FILE_BYTES + 1)


MAKES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": listens,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "a hole": grows,
    "much": lambda path: path.write_bytes(b"#" * (FILE_BYTES + 1)),
}


@pytest.mark.parametrize("what", MAKES)
def test_what_is_no_regular_file_of_sane_size_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    MAKES[what](path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"no regular file|larger than|No such device") as found:
        read_regular(path)
    assert found.value.strerror
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_is_read_whole_also_behind_a_link(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * FILE_BYTES)
    (tmp_path / "y").symlink_to(path)
    assert read_regular(tmp_path / "y") == b"a" * FILE_BYTES
    with pytest.raises(OSError, match="larger than 9 bytes") as found:
        read_regular(path, 9)
    assert found.value.errno == errno.EFBIG


def loads_secret(flag: str, path: str) -> object:
    return load(["--instances", "h:1", flag, f"@{path}"], {})


OPENS: dict[str, Callable[[str], object]] = {
    "config": lambda path: load(["--instances", "h:1", "--config", path], {}),
    **{
        name: functools.partial(loads_secret, f"--{name}")
        for name in ("api-key", "admin-token", "cache-salt-secret", "instance-api-key")
    },
    "thermal": lambda path: read_plan(Path(path)),
    "instance-ca": lambda path: tls.for_instances(settings(instance_ca=path)),
    "tls-cert": lambda path: tls.for_clients(settings(tls_cert=path, tls_key=path)),
}


def settings(**options: str) -> Settings:
    return Settings(instances=["h:1"], **options)


@pytest.mark.parametrize("option", OPENS)
@pytest.mark.parametrize("what", ["a FIFO", "a hole"])
def test_every_option_that_names_a_file(tmp_path: Path, option: str, what: str) -> None:
    path = tmp_path / "x"
    MAKES[what](path)
    with pytest.raises(ConfigError, match=r"no regular file|larger than"):
        OPENS[option](str(path))
