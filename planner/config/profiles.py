"""Profiles in a folder, as Dynamo's profiler writes them: NPZ or JSON, with times in milliseconds.

A file is read as numbers and nothing else. Its size is checked before it is parsed, and the size of
an array before there is one.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import orjson

from planner.core.perf.profile import DecodePoint, PrefillPoint, Profile
from planner.core.perf.regression import LEAST_S, MOST_S, MOST_TOKENS
from replayer.arguments import InputError, replace_file

PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
MAX_KV = "max_kv_tokens"
NPZ = {kind: f"selected_{kind}_interpolation/raw_data.npz" for kind in ("prefill", "decode")}
JSON = {kind: f"{kind}_raw_data.json" for kind in NPZ}
MOST_BYTES = 1 << 20
"""Of a file, and of all that a compressed one has in it."""
MOST_POINTS = 1_000
"""Of a table: the finest grid that anyone would measure has a few hundred."""
MOST_SAID = 200
"""Characters of what a file has, in an error."""
MS = 1e3
RANGES = {
    "x_kv_usage": (1e-6, 1.0),
    "prefill_ttft": (LEAST_S * MS, MOST_S * MS),
    "z_itl": (LEAST_S * MS, MOST_S * MS),
}
MEASURED = (1e-3, MOST_TOKENS)
"""Of lengths in tokens, and of tokens per second."""

Arrays = Mapping[str, Any]
"""What a file has under each key."""


def read_profile(folder: Path) -> Profile:
    """Read both tables of a folder, from NPZ where it has that; raises InputError."""
    prefill = _checked(*_found(folder, "prefill", PREFILL_KEYS), PREFILL_KEYS)
    path, arrays = _found(folder, "decode", (*DECODE_KEYS, MAX_KV))
    decode = _checked(path, arrays, DECODE_KEYS)
    return Profile(
        tuple(PrefillPoint(isl, ttft / MS, rate) for isl, ttft, rate in prefill),
        tuple(DecodePoint(kv, context, itl / MS, rate) for kv, context, itl, rate in decode),
        _max_kv_tokens(path, arrays[MAX_KV]),
    )


def write_profile(folder: Path, profile: Profile) -> list[Path]:
    """Write both tables as JSON, each file whole or not at all; raises OSError."""
    prefill = [(p.isl_tokens, p.ttft_s * MS, p.throughput) for p in profile.prefill]
    decode = [(p.kv_ratio, p.context_tokens, p.itl_s * MS, p.throughput) for p in profile.decode]
    documents = {
        "prefill": _columns(PREFILL_KEYS, prefill),
        "decode": _columns(DECODE_KEYS, decode) | {MAX_KV: profile.max_kv_tokens},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for kind, document in documents.items():
        replace_file(folder / JSON[kind], orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return [folder / name for name in JSON.values()]


def _columns(keys: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {key: list(column) for key, column in zip(keys, zip(*rows, strict=True), strict=True)}


def _found(folder: Path, kind: str, keys: Sequence[str]) -> tuple[Path, Arrays]:
    """The file of one table, and what it has under these keys."""
    for name, read in ((NPZ[kind], _npz), (JSON[kind], _json)):
        path = folder / name
        if path.is_file():
            return path, read(path, keys)
    raise InputError(f"{folder}: needs {NPZ[kind]} or {JSON[kind]}, and has neither")


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: must have at most {MOST_BYTES:,} bytes")
    return content


def _json(path: Path, keys: Sequence[str]) -> Arrays:
    try:
        document = orjson.loads(_bytes(path))
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: must be JSON with finite numbers: {error}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: must be a JSON object with the keys {', '.join(keys)}")
    return _having(path, document, keys, lambda key: document[key])


def _npz(path: Path, keys: Sequence[str]) -> Arrays:
    content = _bytes(path)
    try:
        with ZipFile(io.BytesIO(content)) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            return _having(path, names, keys, lambda key: _array(path, archive, key))
    except InputError:
        raise
    except (BadZipFile, ValueError, RuntimeError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: must be a zip archive of arrays: {error}") from None


def _having(path: Path, has: Any, keys: Sequence[str], value_of: Callable[[str], Any]) -> Arrays:
    if missing := [key for key in keys if key not in has]:
        others = ", ".join(sorted(map(repr, has)))[:MOST_SAID] or "nothing"
        raise InputError(f"{path}: lacks {', '.join(missing)}; it has {others}")
    return {key: value_of(key) for key in keys}


def _array(path: Path, archive: ZipFile, key: str) -> Any:
    """Read one member as a list of numbers; what its header says is checked before its data."""
    member = archive.getinfo(f"{key}.npy")
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise BadZipFile(f"{member.filename} must be stored or deflated")
    # Neither what the archive says of its size, nor a read without a limit, bounds the memory.
    with archive.open(member) as packed:
        content = packed.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: {key}: must have at most {MOST_BYTES:,} bytes unpacked")
    file = io.BytesIO(content)
    try:
        shape, dtype = _header(file)
        if dtype.kind not in "fiu":
            raise ValueError(f"{dtype} is no type of numbers")
        if not 0 <= math.prod(shape) <= MOST_POINTS:
            raise ValueError(f"more than {MOST_POINTS:,} values")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False).tolist()
    except (ValueError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        reason = str(error).partition("\n")[0][:MOST_SAID]
        raise InputError(f"{path}: {key}: must be an array of numbers: {reason}") from None


def _header(file: io.BytesIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the type of an array."""
    of = np.lib.format
    is_first = of.read_magic(file) == (1, 0)
    read = of.read_array_header_1_0 if is_first else of.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype


def _checked(path: Path, arrays: Arrays, keys: Sequence[str]) -> list[tuple[float, ...]]:
    """The points of a table, one by one."""
    columns = [_numbers(path, key, arrays[key]) for key in keys]
    counts = {key: len(column) for key, column in zip(keys, columns, strict=True)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key} {count}" for key, count in counts.items())
        raise InputError(f"{path}: all keys must have as many values: {listed}")
    if len(set(columns[0])) < 2:
        raise InputError(f"{path}: {keys[0]}: must have at least 2 different values")
    return list(zip(*columns, strict=True))


def _numbers(path: Path, key: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise InputError(f"{path}: {key}: must be a list of finite numbers")
    if len(values) > MOST_POINTS:
        raise InputError(f"{path}: {key}: must have at most {MOST_POINTS:,} values")
    least, most = RANGES.get(key, MEASURED)
    if wrong := [value for value in values if not least <= value <= most]:
        raise InputError(f"{path}: {key}: must be {least:g} to {most:g}, not {wrong[0]:g}")
    return [float(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _max_kv_tokens(path: Path, value: Any) -> int:
    """Read the size of the KV cache: a number, or the only one of a list."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not _is_number(one) or one < 1:
        raise InputError(f"{path}: {MAX_KV}: must be one number of at least 1")
    return int(one)
