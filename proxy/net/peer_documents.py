"""Documents of engines and sensors: bounded before they are parsed, in one place.

A parser in C has the interpreter until it is done, in a thread too. So a document that would take
more than some 5 ms is refused: its brackets, names and values are counted first, as each becomes an
object. Lines of metrics are parsed one by one; many of them in a thread, which takes turns with the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from proxy.protocol.streams.parse_cost import is_cheap

T = TypeVar("T")
LOOP_BYTES = 16 << 10
"""A longer exposition is parsed in a thread."""
LINE_BYTES = 4096
"""A longer line is ignored; vLLM's are below 1 KiB."""
MOST_LINES, MOST_WANTED, WANTED_BYTES = 1 << 15, 4096, 1 << 18
"""An exposition of more lines is ignored, as are wanted lines after so many lines or bytes. 64
data-parallel ranks have 200 KB, which take some 20 ms in a thread."""


class TooMuchError(ValueError):
    """A document of which the parse would take too long."""


def read_json(raw: bytes) -> Any:
    """The value of a document; raises ValueError where it is not JSON, or too much of it."""
    if not is_cheap(raw):
        raise TooMuchError("it has too many values")
    return orjson.loads(raw)


def wanted_lines(exposition: bytes, names: tuple[bytes, ...]) -> list[bytes]:
    """The lines of metrics that begin with one of these names; the last line may be cut."""
    if exposition.count(b"\n") > MOST_LINES:
        return []
    found: list[bytes] = []
    left = WANTED_BYTES
    for line in exposition.split(b"\n")[:-1]:
        if line.startswith(names) and len(line) <= LINE_BYTES:
            left -= len(line)
            if left < 0 or len(found) == MOST_WANTED:
                break
            found.append(line)
    return found


async def parsed(parse: Callable[[bytes], T], exposition: bytes) -> T:
    """Parse lines of metrics, in a thread if they are many."""
    if len(exposition) <= LOOP_BYTES:
        return parse(exposition)
    return await asyncio.to_thread(parse, exposition)
