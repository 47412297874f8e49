"""A trace file as rows: lines, plain or gzipped, and what the file says about itself.

Rows come one at a time: a file is never held in memory as a whole.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from replayer.replay_row import Row, TraceError

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Meta:
    """What a file says about itself: in its first line, or in `<file>.meta.json` beside it."""

    block_tokens: int | None = None
    hash_scope: str = "global"
    cumulative: bool | None = None


def rows(path: Path) -> Iterator[Row]:
    """Read a file of one JSON object per line; raises TraceError."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}:{number}: line: must be one JSON object ({error})") from None
        if not isinstance(fields, dict):
            raise TraceError(f"{path}:{number}: line: must be one JSON object")
        yield Row(str(path), number, fields)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == GZIP_MAGIC
            yield from gzip.GzipFile(fileobj=raw) if zipped else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: cannot be read: {reason}") from None


def read_sidecar(path: Path) -> Meta:
    """Read `<file>.meta.json`; an absent one says nothing."""
    beside = path.with_name(path.name + ".meta.json")
    if not beside.exists():
        return Meta()
    try:
        fields = orjson.loads(beside.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{beside}: must be one JSON object ({error})") from None
    inner = fields.get("trace", fields) if isinstance(fields, dict) else fields
    return read_meta(Row(str(beside), 1, {}), inner)


def read_meta(row: Row, fields: Any) -> Meta:
    """Read the object under `trace`; refuses what the loaders would misread."""
    if not isinstance(fields, dict):
        raise TraceError(f"{row.file}:{row.line}: trace: must be an object")
    row = Row(row.file, row.line, fields)
    if fields.get("time_unit", "ms") != "ms":
        raise row.fail("time_unit", '"ms"')
    if fields.get("hash_scope", "global") not in ("global", "session"):
        raise row.fail("hash_scope", '"global" or "session"')
    if fields.get("cumulative", True) is not True:
        raise row.fail("cumulative", "true (rows hold whole prompts; deltas are not read)")
    return Meta(
        block_tokens=row.integer("block_size", at_least=1),
        hash_scope=fields.get("hash_scope", "global"),
        cumulative=fields.get("cumulative"),
    )
