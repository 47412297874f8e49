"""The demo's child processes, and `run.json`, the record of a run's options.

Every child is stopped by pid, whenever a signal comes. With `run.json` in its folder a run can be
repeated in virtual time. The proxy's options in it come from `--print-config`, so defaults and the
environment are included.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from replayer.arguments import write_json
from replayer.simulator.options import SimOptions

READY_S = 30.0
STOP_S = 15.0
LAST_CHARS = 500
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal ended the demo."""

    def __init__(self, number: int) -> None:
        """Keep the signal's number."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class ChildProcess:
    """A running command and the file that it prints to."""

    name: str
    child: subprocess.Popen[bytes]
    output: Path
    expected_to_live: bool = True

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a match in the output; RuntimeError if the command ends or is too slow."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            if found := re.search(pattern, self.output.read_text(errors="replace")):
                return found
            if self.child.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"{self.name} did not start; {self.said()}")

    def said(self) -> str:
        """Where its output is, and how that ends, for an error's text."""
        where = f"its output is in {self.output}"
        lines = self.output.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "").strip()
        return f"{where}, at its end: {last[:LAST_CHARS]}" if last else where

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if it still runs after STOP_S."""
        self.child.terminate()
        try:
            self.child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@dataclass
class Children:
    """The processes started by the demo, or by another command; only it passes signals on to them.

    Each has a process group of its own, so Ctrl-C on the terminal does not reach it. The first
    signal raises Stopped in the demo, but never between a child's start and its entry here, nor
    while children are being stopped; later signals are ignored.
    """

    _number: int | None = None
    _held: bool = True
    _stack: ExitStack = field(default_factory=ExitStack)
    _started: list[ChildProcess] = field(default_factory=list)

    def start(self, name: str, output: Path, *command: str) -> ChildProcess:
        """Run one of the project's commands with its output in a file."""
        return self.start_program(name, output, (sys.executable, "-m", *command))

    def start_program(
        self,
        name: str,
        output: Path,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Run any command with its output in a file; `environment` None: that of the demo."""
        with output.open("wb") as sink:
            return self._start(name, output, sink, command, environment)

    def start_in_view(self, name: str, *command: str) -> ChildProcess:
        """Run one of the project's commands on the demo's own output."""
        return self._start(name, Path(), None, (sys.executable, "-m", *command))

    def _start(
        self,
        name: str,
        output: Path,
        sink: IO[bytes] | None,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        self._held = True
        child = subprocess.Popen(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=None if sink is None else subprocess.STDOUT,
            process_group=0,
        )
        process = ChildProcess(name, child, output)
        self._stack.callback(process.stop)
        self._started.append(process)
        self._release()
        return process

    def terminate(self) -> None:
        """Send SIGTERM to all at once, which then end side by side; the block's end waits."""
        for process in self._started:
            process.child.terminate()

    @contextmanager
    def stopped_at_the_end(self) -> Iterator[None]:
        """Stop every child, the last one first, however the block ends; raises Stopped."""
        before = {number: signal.signal(number, self._on_signal) for number in _signals()}
        try:
            self._release()
            yield
        finally:
            self._held = True
            self._stack.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._release()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if not self._held:
                raise Stopped(number)

    def _release(self) -> None:
        """Let signals end the demo again; a signal that came meanwhile ends it now."""
        self._held = False
        if self._number is not None:
            raise Stopped(self._number)


def _signals() -> list[signal.Signals]:
    """Return the signals to handle; not SIGHUP if nohup has made it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if number is not signal.SIGHUP or not ignored]


RECORD = "run.json"


def write_record(
    folder: Path,
    proxy_flags: Sequence[str],
    engines: Sequence[Mapping[str, Any]],
    load: Sequence[str],
) -> None:
    """Write `run.json`: the engines' options, the proxy's, and the arguments of `replay`.

    `engines`: each engine's options, if they differ from the defaults of `engine-sim`.
    """
    command = [sys.executable, "-m", "proxy.cli", *proxy_flags, "--print-config"]
    config = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record = {
        "engines": [asdict(SimOptions(**given)) for given in engines],
        "proxy": tomllib.loads(config),
        "replay": list(load),
    }
    write_json(folder / RECORD, record)
