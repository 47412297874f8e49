"""Documents of engines and sensors: bounded before they are parsed, in one place.

A parser in C has the interpreter until it is done, in a thread too. So a document that would take
more than some 5 ms is refused: its numbers, texts, names, arrays and objects are counted first, as
each takes its time. Lines of metrics are parsed in turns below these 5 ms, with pauses for the
event loop. A thread would not do: the loop waits for the interpreter at each event of a socket.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import orjson

from proxy.protocol.streams.parse_cost import MAX_DEPTH, is_cheap, is_deep

T = TypeVar("T")
LINE_BYTES = 4096
"""A longer line is ignored; vLLM's are below 1 KiB."""
MOST_LINES, MOST_WANTED, WANTED_BYTES = 1 << 15, 2048, 1 << 18
"""An exposition of more lines is ignored, as are wanted lines after so many lines or bytes. 64
data-parallel ranks have 200 KB in 1,000 lines."""
TURN_BYTES, SKIP_BYTES, PAUSE_S = 4096, 8, 0.002
"""A pause comes after so many bytes of wanted lines; any other line counts as `SKIP_BYTES`."""
LOOP_SHARE = 0.02
"""The part of the event loop's time that the parse of one document takes, by longer pauses."""

_LABEL = re.compile(r'(?<!\w)([a-zA-Z_]\w*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"')
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_BRACES = re.compile(r'\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\}')
_ESCAPED = re.compile(r"\\(.)")
_NO_LABELS: Mapping[str, str] = {}


class TooMuchError(ValueError):
    """A document of which the parse would take too long."""


class Sample(NamedTuple):
    """One value of a series."""

    name: str
    labels: Mapping[str, str]
    value: float


def read_json(raw: bytes) -> Any:
    """The value of a document; raises ValueError where it is not JSON, or too much of it.

    orjson takes what is nested 1,024 deep: to compare or to write that is a RecursionError.
    """
    if not is_cheap(raw):
        raise TooMuchError("it has too many values")
    value = orjson.loads(raw)
    if is_deep({"": value}, raw):
        raise TooMuchError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def wanted_lines(
    exposition: bytes, names: tuple[bytes, ...], times: int = 1
) -> Iterator[bytes | None]:
    """The lines of metrics that begin with one of these names; the last line may be cut.

    None between them is the place for a pause. `times`: so often the limits, for who is trusted.
    """
    if exposition.count(b"\n") > MOST_LINES * times:
        return
    start = count = size = spent = 0
    while (end := exposition.find(b"\n", start)) >= 0:
        if exposition.startswith(names, start) and end - start <= LINE_BYTES:
            size, count = size + end - start, count + 1
            if size > WANTED_BYTES * times or count > MOST_WANTED * times:
                return
            yield exposition[start:end]
            spent += end - start
        start, spent = end + 1, spent + SKIP_BYTES
        if spent >= TURN_BYTES:
            spent = 0
            yield None


def sample_of(raw: bytes) -> Sample | None:
    """A line of metrics: a name, labels in braces, a value, and a time that nobody reads."""
    line = raw.decode("utf-8", "replace")
    name = _NAME.match(line)
    if name is None:
        return None
    rest, labels = line[name.end() :].lstrip(" \t"), _NO_LABELS
    if rest.startswith("{"):
        braces = _BRACES.match(rest)
        if braces is None:
            return None
        rest, labels = rest[braces.end() :], _labels(braces[1])
    told = rest.split()
    try:
        return Sample(name[0], labels, float(told[0])) if 1 <= len(told) <= 2 else None
    except ValueError:
        return None


def _labels(text: str) -> dict[str, str]:
    labels = dict(_LABEL.findall(text))
    if "\\" in text:
        return {name: _ESCAPED.sub(_unescaped, value) for name, value in labels.items()}
    return labels


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


async def in_turns(parse: Generator[None, None, T]) -> T:
    """The value of a parser that yields where the event loop may go on.

    A document that is read every half second could be made to cost 40 ms each time: whoever sends
    it waits then, and nobody else. Its CPU time is what counts, as a busy machine is not its fault.
    """
    while True:
        begun_s = time.thread_time()
        try:
            next(parse)
        except StopIteration as done:
            value: T = done.value
            return value
        took_s = time.thread_time() - begun_s
        await asyncio.sleep(max(PAUSE_S, took_s * (1.0 / LOOP_SHARE - 1.0)))
