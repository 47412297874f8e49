"""The terminal of `analyze` and `replay`: text of others is text only, and long work speaks.

Logs, traces and answers have names and messages that clients and servers chose. Control sequences
in them would set the terminal's title, hide lines or colour them.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Self, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

Item = TypeVar("Item")
FIRST_S, MOST_S = 5.0, 60.0
"""Seconds to the first line about long work, and the most between two lines."""


def printable(text: str) -> str:
    """Return the text with what is not printable escaped, all but line ends."""
    if text.isprintable():
        return text
    shown = (one if one == "\n" or one.isprintable() else _escaped(one) for one in text)
    return "".join(shown)


def _escaped(one: str) -> str:
    return one.encode("unicode_escape", "surrogatepass").decode()


class Terminal(Console):
    """A console that escapes what is not printable, wherever in a table or a line it stands.

    No text is markup, which could name a style, or one that does not exist.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as a console does; its own control sequences are not text."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class Working:
    """Says on stderr what a command does while it has nothing to print: after 5 s, then less often.

    A thread says it, so a call that takes long needs to know nothing of it. One that was never
    entered says nothing.
    """

    def __init__(
        self, name: str, stage: str = "", file: TextIO | None = None, first_s: float = FIRST_S
    ) -> None:
        """Name the command, and what it does first."""
        self._name, self._file, self._first_s = name, file, first_s
        self._stage, self._done, self._of = stage, 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Say no more."""
        self._ended.set()
        self._thread.join()

    def at(self, stage: str) -> None:
        """Name what is done from here on."""
        self._stage, self._done, self._of = stage, 0, 0

    def over(self, items: Iterable[Item], stage: str, of: int = 0) -> Iterator[Item]:
        """Yield the items, of which there are `of` (0: unknown), and count those that are done."""
        self._stage, self._done, self._of = stage, 0, of
        for item in items:
            yield item
            self._done += 1

    def line(self, passed_s: float) -> str:
        """What is said after so many seconds."""
        of = f" of {self._of:,}" if self._of else ""
        done = f", {self._done:,}{of}" if self._done else ""
        return f"{self._name}: {self._stage}{done}, {passed_s:.0f} s"

    def _speak(self) -> None:
        began_s = time.monotonic()
        pause_s = self._first_s
        while not self._ended.wait(pause_s):
            passed_s = time.monotonic() - began_s
            pause_s = min(max(self._first_s, passed_s / 2), MOST_S)
            file = self._file or sys.stderr
            try:
                file.write(printable(self.line(passed_s)) + "\n")
                file.flush()
            except OSError:  # nobody reads it
                return


IDLE = Working("")
"""Says nothing."""
