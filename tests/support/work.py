"""How much Python does, in lines or calls: the same on every machine, where its time is not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class Lines:
    """`count`: the lines that were run so far."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def lines_of(*modules: ModuleType) -> Iterator[Lines]:
    """Count the lines run of these modules. Compiled ones show none."""
    lines, files, before = Lines(), {module.__file__ for module in modules}, sys.gettrace()

    def line(_frame: FrameType, event: str, _arg: object) -> Any:
        lines.count += event == "line"
        return line

    def call(frame: FrameType, _event: str, _arg: object) -> Any:
        return line if frame.f_code.co_filename in files else None

    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def calls_of(work: Callable[[], object]) -> int:
    """Calls that it makes, of functions in Python and in C; what is compiled is not seen within."""
    count = 0

    def seen(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
