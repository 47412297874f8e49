"""Tells supervisors which process serves: systemd by a datagram, others by the pid file."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from proxy.config.regular_files import read_regular

SEND_S = 0.1
"""Time for a supervisor that has not read what came before."""
FAILED = "a hot restart failed; the log says why"
_log = logging.getLogger(__name__)


class Notifier:
    """`NOTIFY_SOCKET` (systemd's `Type=notify`) and `--pid-file`; without them nothing happens."""

    def __init__(self, environ: Mapping[str, str], pid_file: Path | None) -> None:
        self._address = environ.get("NOTIFY_SOCKET")
        self._pid_file = pid_file

    def started(self, *, replaces: bool) -> None:
        """Report that this process serves. Raises OSError if the file cannot be written.

        `replaces`: a predecessor reports this process to systemd, see `replaced_by`.
        """
        if self._pid_file is not None:
            try:
                self._write(self._pid_file)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._pid_file)) from error
        if not replaces:
            self._notify("READY=1")

    def carries_on(self) -> None:
        """Report that no other process has taken over, and write the pid file again.

        A successor that did not come up may have changed it. A file that cannot be written is
        logged.
        """
        self._notify(f"STATUS={FAILED}")
        if self._pid_file is not None:
            try:
                self._write(self._pid_file)
            except OSError as error:
                _log.error("the pid file cannot be written: %s", error.strerror)

    def replaced_by(self, pid: int) -> None:
        """Report to systemd that another process is the main one from now on."""
        self._notify(f"MAINPID={pid}\nSTATUS=")

    def ended(self) -> None:
        """Remove the pid file, unless it names a successor."""
        if self._pid_file is not None:
            with suppress(OSError):
                if read_regular(self._pid_file) == b"%d\n" % os.getpid():
                    self._pid_file.unlink()

    def _write(self, path: Path) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(f"{os.getpid()}\n")
        temporary.replace(path)

    def _notify(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_S)
            sock.sendto(state.encode(), address)
