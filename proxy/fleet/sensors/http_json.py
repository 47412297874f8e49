"""The sensors `http-json` and `file`: a JSON document with pointers to its figures.

A pointer's `*` stands for every member of a list or object, in its order: the n-th match is the
n-th GPU. A document may say anything, so what is not a number within its bounds is left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from proxy.config.sensors import MOST_INDEX, JsonFields, SensorAt
from proxy.core.thermal.readings import GpuReading
from proxy.fleet.sensors.base import ANSWER_S, SensorError, Source, answer, reading, within
from proxy.net.peer_documents import TooMuchError, read_json
from proxy.net.timeouts import MayHang
from proxy.net.upstream.pool import ConnectOptions

FILE_BYTES = 1 << 20
"""Most bytes that are read of a file."""


def found(document: Any, pointer: Sequence[str]) -> Iterator[Any]:
    """The target of a pointer: one value, or one for each member that `*` matches.

    None stands for what is not there, so that the n-th value is always the n-th GPU's.
    """
    if not pointer:
        yield document
        return
    token, *rest = pointer
    if token == "*":
        members = document.values() if isinstance(document, dict) else document
        for member in islice(members, MOST_INDEX + 1) if isinstance(document, dict | list) else ():
            yield from found(member, rest)
    elif isinstance(document, dict) and token in document:
        yield from found(document[token], rest)
    elif isinstance(document, list) and token.isdecimal() and int(token[:9]) < len(document):
        yield from found(document[int(token[:9])], rest)
    else:
        yield None


def parse(body: bytes, fields: JsonFields, host: str, at_s: float) -> list[GpuReading]:
    """The readings of a document; raises SensorError where there are none."""
    try:
        document = read_json(body)
    except TooMuchError as error:
        raise SensorError("it has too many values") from error
    except ValueError as error:
        raise SensorError("it is not JSON") from error
    most = MOST_INDEX + 1 - fields.first
    columns = {n: list(islice(found(document, p), most)) for n, p in fields.pointers}
    if all(value is None for values in columns.values() for value in values):
        raise SensorError("none of its pointers leads to a value")
    rows = max(map(len, columns.values()))
    return [
        _reading(
            f"{host}:{fields.first + row}",
            at_s,
            {name: values[row] for name, values in columns.items() if row < len(values)},
        )
        for row in range(rows)
    ]


def _reading(gpu: str, at_s: float, values: dict[str, Any]) -> GpuReading:
    is_slowed = values.pop("is_slowed", False) is True
    percent = within(values.pop("utilization_percent", None), 0.0, 100.0)
    if percent is not None:
        values["utilization_ratio"] = percent / 100
    return reading(gpu, at_s, is_slowed=is_slowed, **values)


class HttpJson:
    """A JSON document of a BMC or a script, over HTTP."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        self._at = at
        self._source = Source(at, options, connect_timeout_s)

    async def read(self, at_s: float) -> list[GpuReading]:
        """The GPUs of the document; raises SensorError."""
        return parse(await self._source.get(self._at.path), self._at.fields, self._at.host, at_s)

    async def close(self) -> None:
        """Close its connections."""
        await self._source.close()


class File:
    """A JSON document in a file. Its readings are as old as the file."""

    def __init__(self, at: SensorAt, options: ConnectOptions, connect_timeout_s: float) -> None:
        del options, connect_timeout_s
        self._at = at
        self._calls = MayHang[tuple[bytes, float]]("file")

    async def read(self, at_s: float) -> list[GpuReading]:
        """The GPUs of the document; raises SensorError."""
        body, age_s = await answer(self._calls, lambda: _load(Path(self._at.path)), ANSWER_S)
        return parse(body, self._at.fields, self._at.host, at_s - age_s)

    async def close(self) -> None:
        """Nothing is held."""


def _load(path: Path) -> tuple[bytes, float]:
    """A file's content, and how long ago it was written."""
    try:
        with path.open("rb") as file:
            body = file.read(FILE_BYTES)
        written_s = path.stat().st_mtime_ns / 1e9
    except OSError as error:
        raise SensorError(error.strerror or "it cannot be read") from error
    return body, max(0.0, time.time_ns() / 1e9 - written_s)
