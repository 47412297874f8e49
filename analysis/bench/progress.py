"""Progress of long commands: a line on stderr per finished run, with the time left.

A pipe gets the same lines as a terminal: whoever waits for minutes sees that something happens.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

EQUAL_RATIO = 0.005
"""Figures this near to each other are called equal."""


@dataclass(slots=True)
class Steps:
    """Counts the runs of one command; the time of those that are done tells that of the others.

    `of` is before their number: more than "of" where that is not certain.
    """

    name: str
    file: TextIO = field(default_factory=lambda: sys.stderr)
    clock_s: Callable[[], float] = time.monotonic
    of: str = "of"
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin now."""
        self._began_s = self.clock_s()

    def say(self, what: str) -> None:
        """Say what is done before the first run, or between two; runs count from here."""
        self._line(what)
        self._began_s = self.clock_s()

    def __call__(self, done: int, of: int) -> None:
        """Say that one more run is finished."""
        passed_s = self.clock_s() - self._began_s
        left = duration(passed_s / done * (of - done))
        self._line(f"{done} {self.of} {of} runs, {duration(passed_s)}, {left} left")

    def _line(self, text: str) -> None:
        self.file.write(f"{self.name}: {text}\n")
        self.file.flush()


def duration(seconds: float) -> str:
    """Format a time span for somebody who waits."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def changed(ratio: float) -> str:
    """Format a relative change of a figure: "-30 %", or that it is equal."""
    if not math.isfinite(ratio):
        return "far higher" if ratio > 0 else "far lower"
    return f"{ratio:+.0%}".replace("%", " %") if abs(ratio) >= EQUAL_RATIO else "equal"
