"""Rows of a trace file, plain or gzipped, with typed access to their fields.

A row is a JSON object per line or, after a first line of names of columns, a line of a CSV table.

Rows are read one at a time, so a file is never in memory as a whole. Errors name file, line and
field. This module checks JSON types and ranges; `loaders` knows what the fields mean.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import orjson

MAX_BLOCK_ID = 2**64 - 1  # 64 bits: with fewer, different prefixes have collided
SHOWN_CHARS = 40
MAX_DIGITS = 18
MOST_LINE_BYTES = 1 << 24
"""A prompt of a million words fits, the endless line of a compressed file does not."""
MOST_EMPTY_LINES = 1_000_000
MOST_SIDECAR_BYTES = 1 << 20
MOST_DEEP = 100
"""Objects and lists within each other; what is read is written again, in something deeper."""
MOST_NAME_CHARS = 4096
MOST_TOKENS = 1 << 24
"""Most tokens of a prompt, of an output, and of a block: more than any model's context."""
MOST_MS = 1e14
"""Three thousand years, and any date's Unix milliseconds."""
MOST_COUNT = 1 << 53
Runs = tuple[tuple[int, int], ...]  # (first id, count): consecutive block ids, stored compactly


class TraceError(ValueError):
    """A trace that cannot be replayed as written; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one line; all readers return None for an absent or null field."""

    file: str
    line: int
    fields: Mapping[str, Any]

    def fail(self, field: str, allowed: str) -> TraceError:
        """Make the error for a field whose value is not as `allowed` says."""
        value = self.fields.get(field)
        try:
            shown = short(orjson.dumps(value).decode()) if value is not None else "missing"
        except TypeError:  # nested deeper than orjson writes
            shown = f"a deep {type(value).__name__}"
        return TraceError(f"{self.file}:{self.line}: {field}: must be {allowed}, not {shown}")

    def name_of(self, *names: str) -> str | None:
        """Return which of a field's alternative names this row uses (None: none)."""
        return next((name for name in names if self.fields.get(name) is not None), None)

    def integer(self, *names: str, at_least: int, at_most: int = MOST_TOKENS) -> int | None:
        """Read an integer field under the first of its names that is present."""
        name = self.name_of(*names)
        if name is None:
            return None
        value = self.fields[name]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < at_least:
            raise self.fail(name, f"an integer >= {at_least}")
        if value > at_most:
            raise self.fail(name, f"an integer <= {at_most}")
        return value

    def number(self, *names: str, at_most: float = MOST_MS) -> float | None:
        """Read a number >= 0."""
        name = self.name_of(*names)
        if name is None:
            return None
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.fail(name, "a number >= 0")
        if not value <= at_most:
            raise self.fail(name, f"a number <= {at_most:g}")
        return float(value)

    def moment_s(self, name: str) -> float:
        """Read a date with time of day as Unix seconds; UTC where it has no zone."""
        try:
            moment = datetime.fromisoformat(str(self.fields.get(name)))
        except ValueError:
            raise self.fail(name, "a date and time as in 2023-11-16 18:17:03.97") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()

    def text(self, name: str) -> str | None:
        """Read a non-empty string."""
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.fail(name, "a non-empty string")
        return value

    def name(self, field: str) -> str | None:
        """Read what names something: a non-empty string, or a whole number, as its digits."""
        value = self.fields.get(field)
        if value is not None and not (named := _name(value)):
            raise self.fail(field, "a non-empty string or a whole number")
        if value is not None and len(named) > MOST_NAME_CHARS:
            raise self.fail(field, f"at most {MOST_NAME_CHARS} characters")
        return None if value is None else named

    def names(self, field: str) -> tuple[str, ...] | None:
        """Read a list of names."""
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(map(_name, value)):
            raise self.fail(field, "a list of strings or whole numbers")
        return tuple(map(_name, value))

    def objects(self, name: str) -> tuple[Mapping[str, Any], ...] | None:
        """Read a non-empty list of objects."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(isinstance(o, dict) for o in value):
            raise self.fail(name, "a non-empty list of objects")
        return tuple(value)

    def runs(self) -> Runs | None:
        """Read the block ids from `hash_ids` or `hash_runs` (None: the row has neither)."""
        name = self.name_of("hash_ids", "hash_runs")
        if name is None:
            return None
        if name == "hash_ids" and self.name_of("hash_runs"):
            raise self.fail("hash_runs", "absent where hash_ids is given")
        value = self.fields[name]
        if not isinstance(value, list):
            raise self.fail(name, "a list")
        return self._compact(value) if name == "hash_ids" else self._checked_runs(value)

    def _compact(self, ids: list[Any]) -> Runs:
        runs: list[tuple[int, int]] = []
        start = following = -1
        for block in ids:
            if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:
                raise self.fail("hash_ids", "a list of integers 0..2^64-1")
            if block != following:
                if start >= 0:
                    runs.append((start, following - start))
                start = block
            following = block + 1
        if start >= 0:
            runs.append((start, following - start))
        return tuple(runs)

    def _checked_runs(self, value: list[Any]) -> Runs:
        runs: list[tuple[int, int]] = []
        for run in value:
            pair = isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)
            if not pair or run[0] < 0 or run[1] < 1 or run[0] + run[1] - 1 > MAX_BLOCK_ID:
                raise self.fail("hash_runs", "a list of [first id >= 0, count >= 1]")
            start, count = run
            if (
                runs and sum(runs[-1]) == start
            ):  # equal ids get equal runs, so that runs can be compared
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((start, count))
        return tuple(runs)


def short(text: str) -> str:
    """Cut a text for an error of one line."""
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _name(value: Any) -> str:
    """A name as text, as tables of numbers have them (7, and 7.0 of pandas); empty for no name."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_COUNT:
        value = int(value)
    return str(value) if type(value) in (str, int) else ""


UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
DELIMITERS = ",;\t"
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Meta:
    """Metadata of a trace, in its first line or in `<file>.meta.json` beside it."""

    block_tokens: int | None = None
    hash_scope: str = "global"
    cumulative: bool | None = None


def ends_reading(error: TraceError) -> None:
    """Raise what is wrong with a line, so that no other line is read."""
    raise error


def rows(path: Path, refused: Callable[[TraceError], None] = ends_reading) -> Iterator[Row]:
    """Read a file of one JSON object per line, or of a CSV table; raises TraceError.

    `refused` is told of a line that cannot be read, and may let the reading go on.
    """
    table: _Table | None = None
    is_first, empty = True, 0
    for number, raw in enumerate(_lines(path), start=1):
        line = _without_mark(raw, path) if number == 1 else raw
        if not line.strip():
            empty += 1
            if empty > MOST_EMPTY_LINES:
                raise TraceError(f"{path}:{number}: more than {MOST_EMPTY_LINES} lines are empty")
            continue
        if is_first:
            table, is_first = _Table.of(line), False
            if table is not None:
                continue
        try:
            fields = _fields(line, f"{path}:{number}", table)
        except TraceError as error:
            refused(error)
            continue
        yield Row(str(path), number, fields)


def head_of(path: Path, most: int) -> bytes:
    """Read the beginning of a file, from which can be told what it is."""
    head = b""
    for line in _lines(path):
        head += line[:most]
        if len(head) >= most:
            break
    return head[:most]


def _fields(line: bytes, where: str, table: "_Table | None") -> dict[str, Any]:
    if len(line) > MOST_LINE_BYTES:
        raise TraceError(f"{where}: line: must be at most {MOST_LINE_BYTES} bytes")
    fields = _object(line, where) if table is None else table.cells(line, where)
    if line.count(b"[") + line.count(b"{") > MOST_DEEP and _depth(fields) > MOST_DEEP:
        raise TraceError(f"{where}: line: must be at most {MOST_DEEP} lists and objects deep")
    return fields


def _without_mark(line: bytes, path: Path) -> bytes:
    """A file's first line without the byte order mark that editors and spreadsheets put there."""
    if line.startswith(UTF16_MARKS):
        raise TraceError(f"{path}: must be UTF-8, not UTF-16")
    return line.removeprefix(UTF8_MARK)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{where}: line: must be one JSON object ({error})") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: line: must be one JSON object")
    return fields


def _depth(value: Any) -> int:
    """Count the lists and objects that are within each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


@dataclass(frozen=True, slots=True)
class _Table:
    """A CSV table: the names of its columns, and what stands between its cells."""

    columns: list[str]
    delimiter: str

    @classmethod
    def of(cls, line: bytes) -> Self | None:
        """The table whose columns a first line names; None if it is anything else."""
        for delimiter in DELIMITERS if not line.lstrip().startswith(b"{") else "":
            names = _split(line, delimiter)
            if len(names) > 1 and all(name.replace(" ", "_").isidentifier() for name in names):
                return cls(names, delimiter)
        return None

    def cells(self, line: bytes, where: str) -> dict[str, Any]:
        """A line's cells by column; an empty one is null."""
        cells, columns = _split(line, self.delimiter), self.columns
        if len(cells) != len(columns):
            raise TraceError(f"{where}: line: must have {len(columns)} columns, not {len(cells)}")
        return {name: _value(cell) for name, cell in zip(columns, cells, strict=True)}


def _split(line: bytes, delimiter: str) -> list[str]:
    text = line.decode("utf-8", "replace").strip("\r\n")
    try:
        cells = next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:  # a cell of 128 KiB
        return []
    return [cell.strip() for cell in cells]


def _value(cell: str) -> Any:
    if not cell:
        return None
    if cell.isdecimal() and len(cell) <= MAX_DIGITS:
        return int(cell)
    if cell.startswith("["):
        return _list(cell)
    try:
        value = float(cell)
    except ValueError:
        return cell
    return value if math.isfinite(value) else cell


def _list(cell: str) -> Any:
    """Read a cell that has a list, as of block ids; text if it is none."""
    try:
        return orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            zipped = raw.peek(2)[:2] == GZIP_MAGIC
            opened = gzip.GzipFile(fileobj=raw) if zipped else raw
            while line := opened.readline(MOST_LINE_BYTES + 1):
                yield line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{path}: cannot be read: {reason}") from None


def read_sidecar(path: Path) -> Meta:
    """Read `<file>.meta.json`; the defaults if there is none."""
    sidecar = path.with_name(path.name + ".meta.json")
    if not sidecar.exists():
        return Meta()
    try:
        with sidecar.open("rb") as file:
            content = file.read(MOST_SIDECAR_BYTES + 1)
        if len(content) > MOST_SIDECAR_BYTES:
            raise TraceError(f"{sidecar}: must be at most {MOST_SIDECAR_BYTES} bytes")
        fields = orjson.loads(_without_mark(content, sidecar))
    except OSError as error:
        raise TraceError(f"{sidecar}: cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{sidecar}: must be one JSON object ({error})") from None
    inner = fields.get("trace", fields) if isinstance(fields, dict) else fields
    return read_meta(Row(str(sidecar), 1, {}), inner)


def read_meta(row: Row, fields: Any) -> Meta:
    """Read the object under `trace`; refuses settings that the loaders do not support."""
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
