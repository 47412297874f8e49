"""Listening sockets that another process hands down: systemd, or the one that this one replaces.

By systemd's protocol: descriptors 3, 4, ... (`LISTEN_FDS` says how many), their names in
`LISTEN_FDNAMES`, for process `LISTEN_PID` where that is set. The names here:

    admin                    a socket for the admin listener
    own-public, own-admin    what a predecessor bound by its options; used where ours say the same
    ready                    a pipe to a predecessor that waits to be told
    estate                   a file of what the predecessor knows
    any other                a socket for clients

A socket that is handed down is the same in the kernel: its queue of connections goes on.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from proxy.config.sources import ConfigError

FIRST_FD = 3
FDS, NAMES, PID = "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"
READY, ESTATE = "ready", "estate"
OWN = "own-"
TAKEN_OVER = b"ready\n"
"""What a predecessor is told; anything else is why not."""
_MOST = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass
class Heritage:
    """What was handed down; each socket is taken once."""

    sockets: list[tuple[str, socket.socket]] = field(default_factory=list)
    _pipe: int | None = None
    estate: BinaryIO | None = None

    @classmethod
    def read(cls, environ: MutableMapping[str, str]) -> Heritage:
        """Take what the environment names, and the names from it: they are for one process only.

        ConfigError for what is no listening TCP socket.
        """
        count, names, pid = (environ.pop(key, None) for key in (FDS, NAMES, PID))
        if count is None or (pid is not None and pid != str(os.getpid())):
            return cls()
        if not count.isdecimal() or int(count) > _MOST:
            raise ConfigError(f"{FDS}: a whole number, 0 to {_MOST}, not {count!r}")
        told = (names or "").split(":")
        heritage = cls()
        for i in range(int(count)):
            heritage._add(told[i] if i < len(told) else "", FIRST_FD + i)
        return heritage

    def _add(self, name: str, fd: int) -> None:
        if name == READY:
            os.set_inheritable(fd, False)  # noqa: FBT003 - has no keyword
            self._pipe = fd
            return
        if name == ESTATE:
            os.set_inheritable(fd, False)  # noqa: FBT003 - has no keyword
            self.estate = open(fd, "rb")  # noqa: SIM115 - closed by who reads it
            return
        try:
            sock = socket.socket(fileno=fd)
        except OSError as error:
            raise ConfigError(f"{FDS}: descriptor {fd} ({name}): {error.strerror}") from None
        is_tcp = sock.type == socket.SOCK_STREAM and sock.family in _FAMILIES
        if not is_tcp or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.close()
            raise ConfigError(f"{FDS}: descriptor {fd} ({name}) is no listening TCP socket")
        sock.set_inheritable(False)
        self.sockets.append((name, sock))

    @property
    def has_predecessor(self) -> bool:
        """Whether a process serves until this one says that it can."""
        return self._pipe is not None

    async def take(self, listener: str, host: str, port: int) -> tuple[str, list[socket.socket]]:
        """The sockets for `public` or `admin`, and under which name they are handed on.

        None: the caller binds. What a predecessor bound elsewhere than `host` and `port` is closed.
        """
        given = self._of(listener)
        if given:
            return listener, given
        own = self._of(OWN + listener)
        if own and not await _is_at(own, host, port):
            for sock in own:
                sock.close()
            own = []
        return OWN + listener, own

    def _of(self, listener: str) -> list[socket.socket]:
        taken = [(n, s) for n, s in self.sockets if _listener_of(n) == listener]
        self.sockets = [pair for pair in self.sockets if pair not in taken]
        return [sock for _, sock in taken]

    def drop(self) -> None:
        """Close what nobody took: its listener is not among the options any more."""
        for _, sock in self.sockets:
            sock.close()
        self.sockets.clear()

    def tell_ready(self) -> None:
        """The predecessor, if there is one, may stop to accept."""
        self._tell(TAKEN_OVER)

    def tell_failure(self, why: str) -> bool:
        """The predecessor carries on, and logs why; false where there is none to be told."""
        is_told = self.has_predecessor
        self._tell(why.encode(errors="backslashreplace") + b"\n")
        return is_told

    def _tell(self, words: bytes) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # it has ended meanwhile: this one serves all the same
                os.write(self._pipe, words)
            os.close(self._pipe)
            self._pipe = None


def _listener_of(name: str) -> str:
    return name if name in ("admin", OWN + "admin", OWN + "public") else "public"


async def _is_at(sockets: list[socket.socket], host: str, port: int) -> bool:
    """Whether these are the very sockets that binding would make; port 0 is any."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    wanted = {at[:2] for *_, at in found}
    have = {sock.getsockname()[:2] for sock in sockets}
    return {(at[0], at[1] if port else 0) for at in have} == wanted
