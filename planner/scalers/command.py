"""The command of the scaler `exec`: bounded in time and output, whatever it does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO

from planner.scalers.base import Failure, ScalerError
from proxy.config.values import InstanceSpec

COMMAND_S = 15.0
"""Time for one call of the command, within a tick."""
LOOK_S = 0.1
"""Time between two looks at how much it has printed."""
MOST_OUTPUT = 1 << 20
"""Bytes that it may print: the addresses of some 20,000 instances."""


class Command:
    """A command that is called with `list`, `start NAME` and `stop NAME`."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)

    async def instances(self) -> dict[str, InstanceSpec]:
        """The instances that run, by their names."""
        found: dict[str, InstanceSpec] = {}
        for line in (await self.call("list")).splitlines():
            if not line.strip():
                continue
            try:
                spec = InstanceSpec.parse(line.strip())
            except ValueError as error:
                text = f"{self._words[0]} list: {line[:80]!r}: {str(error)[:200]}"
                raise ScalerError(Failure.FAILED, text) from error
            found[spec.name] = spec
        return found

    async def call(self, *words: str) -> str:
        """What it prints. It is killed, with all that it has started, at its deadline."""
        shown = " ".join((self._words[0], *words))
        with _file(shown) as out, _file(shown) as err:
            status = await self._run(words, shown, out, err)
            if status:
                last = _text(err).strip().rpartition("\n")[2][:200]
                raise ScalerError(Failure.FAILED, f"{shown}: exit status {status}: {last}")
            if _is_long(out):
                raise ScalerError(Failure.FAILED, f"{shown}: more than {MOST_OUTPUT} bytes")
            return _text(out)

    async def _run(self, words: Sequence[str], shown: str, out: IO[bytes], err: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            raise ScalerError(Failure.FAILED, f"{shown}: {error.strerror}") from error
        try:
            async with asyncio.timeout(COMMAND_S):
                while (status := await _ended(process)) is None:
                    if _is_long(out) or _is_long(err):
                        text = f"{shown}: more than {MOST_OUTPUT} bytes"
                        raise ScalerError(Failure.FAILED, text)
                return status
        except TimeoutError:
            raise ScalerError(Failure.TIMEOUT, f"{shown}: not over in {COMMAND_S:g} s") from None
        finally:
            if process.returncode is None:
                # One that has become another user's cannot be killed, and ends by itself.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()


async def _ended(process: asyncio.subprocess.Process) -> int | None:
    """Its status; None where it has none so soon."""
    try:
        async with asyncio.timeout(LOOK_S):
            return await process.wait()
    except TimeoutError:
        return None


def _file(shown: str) -> IO[bytes]:
    """Takes output. No pipe: what the command starts may keep it open, and is not waited for."""
    try:
        return TemporaryFile()
    except OSError as error:
        text = f"{shown}: no temporary file: {error.strerror}"
        raise ScalerError(Failure.FAILED, text) from error


def _is_long(file: IO[bytes]) -> bool:
    return os.fstat(file.fileno()).st_size > MOST_OUTPUT


def _text(file: IO[bytes]) -> str:
    """The beginning of it, as far as it is printable."""
    file.seek(0)
    text = file.read(MOST_OUTPUT).decode(errors="replace")
    return "".join(c for c in text if c.isprintable() or c == "\n")
