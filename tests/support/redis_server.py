"""A real redis-server (or valkey-server) on a private socket, which keeps nothing on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import pytest

from tests.support.harness import until

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
NEEDED = pytest.mark.skipif(SERVER is None, reason="neither redis-server nor valkey-server is here")


class RedisServer:
    """The process; `start` and `kill` may be called in turn."""

    def __init__(self) -> None:
        # The path of a socket is short: pytest's folders have longer names.
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = Path(self._folder.name, "s")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    async def start(self) -> None:
        self._begin()
        await until(self._answers, "the server")

    def _answers(self) -> bool:
        """Whether it takes connections: its socket is there a moment before."""
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0

    def _begin(self) -> None:
        assert SERVER is not None
        self.socket.unlink(missing_ok=True)
        options = ("--port", "0", "--unixsocket", str(self.socket), "--save", "")
        self.process = subprocess.Popen(
            [SERVER, *options, "--appendonly", "no", "--dir", self._folder.name],
            stdout=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
