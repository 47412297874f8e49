"""Documents of engines and sensors: bounded before they are parsed, in one place.

A parser in C has the interpreter until it is done, in a thread too. So a document that would take
more than some 5 ms is refused: its numbers, texts, names, arrays and objects are counted first, as
each takes its time. Lines of metrics are parsed in turns below these 5 ms, with pauses for the
event loop. A thread would not do: the loop waits for the interpreter at each event of a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import orjson

from proxy.protocol.streams.parse_cost import is_cheap

T = TypeVar("T")
LINE_BYTES = 4096
"""A longer line is ignored; vLLM's are below 1 KiB."""
MOST_LINES, MOST_WANTED, WANTED_BYTES = 1 << 15, 2048, 1 << 18
"""An exposition of more lines is ignored, as are wanted lines after so many lines or bytes. 64
data-parallel ranks have 200 KB in 1,000 lines."""
TURN_BYTES, SKIP_BYTES, PAUSE_S = 4096, 8, 0.002
"""A pause comes after so many bytes of wanted lines; any other line counts as `SKIP_BYTES`."""


class TooMuchError(ValueError):
    """A document of which the parse would take too long."""


def read_json(raw: bytes) -> Any:
    """The value of a document; raises ValueError where it is not JSON, or too much of it."""
    if not is_cheap(raw):
        raise TooMuchError("it has too many values")
    return orjson.loads(raw)


def wanted_lines(exposition: bytes, names: tuple[bytes, ...]) -> Iterator[bytes | None]:
    """The lines of metrics that begin with one of these names; the last line may be cut.

    None between them is the place for a pause.
    """
    if exposition.count(b"\n") > MOST_LINES:
        return
    start = count = size = spent = 0
    while (end := exposition.find(b"\n", start)) >= 0:
        if exposition.startswith(names, start) and end - start <= LINE_BYTES:
            size, count = size + end - start, count + 1
            if size > WANTED_BYTES or count > MOST_WANTED:
                return
            yield exposition[start:end]
            spent += end - start
        start, spent = end + 1, spent + SKIP_BYTES
        if spent >= TURN_BYTES:
            spent = 0
            yield None


async def in_turns(parse: Generator[None, None, T]) -> T:
    """The value of a parser that yields where the event loop may go on."""
    while True:
        try:
            next(parse)
        except StopIteration as done:
            value: T = done.value
            return value
        await asyncio.sleep(PAUSE_S)
