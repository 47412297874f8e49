"""The demo's child processes, and the record of what a run was made of.

Every child is stopped by pid, at any moment that a signal comes. `run.json` in the run's folder
says what was run, so that it can be repeated in virtual time. The proxy's options in it are read
from `--print-config`, so defaults and the environment are included.
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
    """A signal told the demo to end."""

    def __init__(self, number: int) -> None:
        """Keep the signal's number."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class ChildProcess:
    """One command: its pid, and everything it prints, in a file."""

    name: str
    child: subprocess.Popen[bytes]
    output: Path
    expected_to_live: bool = True

    def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line of its output; RuntimeError when it ends or says nothing of the kind."""
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            if found := re.search(pattern, self.output.read_text(errors="replace")):
                return found
            if self.child.poll() is not None:
                break
            time.sleep(0.05)
        told = f"{self.name} did not start; its output is in {self.output}"
        lines = self.output.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise RuntimeError(f"{told}, at its end: {last.strip()[:LAST_CHARS]}" if last else told)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for one that does not listen."""
        self.child.terminate()
        try:
            self.child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@dataclass
class Children:
    """Every process that was started; a signal reaches them through this one only.

    They are in process groups of their own, so Ctrl-C on the terminal does not end them behind the
    demo's back. The first signal raises Stopped, but never between a child's start and its entry
    here, nor while children are being stopped; later signals change nothing.
    """

    _number: int | None = None
    _held: bool = True
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self, name: str, output: Path, *command: str) -> ChildProcess:
        """Run one of the project's commands, its output in a file."""
        with output.open("wb") as sink:
            return self._start(name, output, sink, command)

    def start_in_view(self, name: str, *command: str) -> ChildProcess:
        """Run one of the project's commands, its output where the demo's goes."""
        return self._start(name, Path(), None, command)

    def _start(
        self, name: str, output: Path, sink: IO[bytes] | None, command: tuple[str, ...]
    ) -> ChildProcess:
        self._held = True
        child = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=sink,
            stderr=None if sink is None else subprocess.STDOUT,
            process_group=0,
        )
        process = ChildProcess(name, child, output)
        self._stack.callback(process.stop)
        self._release()
        return process

    @contextmanager
    def stopped_at_the_end(self) -> Iterator[None]:
        """Stop every child, the last one first, however the block ends; raises Stopped."""
        before = {number: signal.signal(number, self._note) for number in _heeded()}
        try:
            self._release()
            yield
        finally:
            self._held = True
            self._stack.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._release()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            self._number = number
            if not self._held:
                raise Stopped(number)

    def _release(self) -> None:
        """From here on a signal ends the demo; so does one that came before."""
        self._held = False
        if self._number is not None:
            raise Stopped(self._number)


def _heeded() -> list[signal.Signals]:
    """SIGHUP stays ignored where a shell's nohup has it so."""
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

    `engines`: what each engine was given beside the defaults of `engine-sim`.
    """
    command = [sys.executable, "-m", "proxy.cli", *proxy_flags, "--print-config"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    record = {
        "engines": [asdict(SimOptions(**given)) for given in engines],
        "proxy": tomllib.loads(said),
        "replay": list(load),
    }
    write_json(folder / RECORD, record)
