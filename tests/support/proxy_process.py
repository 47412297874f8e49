"""The proxy as a process of its own: the command as typed, which says where it listens."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.measuring.processes import Child
from tests.support.harness import until

_SAFE = ["-P"] if sys.flags.safe_path else []
"""Whoever was started without its folder on the path, as for what is compiled, starts it so too."""
_COMMAND = (sys.executable, *_SAFE, "-m", "proxy.cli", "--host", "127.0.0.1", "--port", "0")
START_S = 90.0
_LISTENS = r"listening on (https?://\S+)\s"


class ProxyProcess(Child):
    """A `cache-proxy` on a port of its own. `shell`: commands before it, such as ulimit."""

    def __init__(
        self, *options: str, shell: str = "", output: Path | None = None, **more: Any
    ) -> None:
        words = ("sh", "-c", f'{shell}\nexec "$@"', "sh", *_COMMAND, *options)
        super().__init__(words, output, **more)
        self.url = ""

    async def listens(self) -> None:
        """Wait until it does, at `url`."""
        self.url = (await until(lambda: self.found(_LISTENS), "listening", START_S))[1]


@asynccontextmanager
async def running(*options: str, shell: str = "") -> AsyncIterator[ProxyProcess]:
    """Start it and wait until it listens."""
    with ProxyProcess(*options, shell=shell) as process:
        await process.listens()
        yield process


def url_in(lines: Iterable[bytes]) -> str:
    """Where it listens, read from a pipe and no further."""
    for line in lines:
        if found := re.search(_LISTENS, line.decode()):
            return found[1]
    raise EOFError("it ended")
