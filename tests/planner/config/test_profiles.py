"""Profiles in a folder: both of Dynamo's forms, and one line for whatever else is there."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.config.profiles import (
    JSON,
    MOST_BYTES,
    MOST_POINTS,
    NPZ,
    read_profile,
    write_profile,
)
from planner.core.perf.profile import DecodePoint, PrefillPoint, Profile
from replayer.arguments import InputError

PREFILL: dict[str, Any] = {
    "prefill_isl": [100, 600, 1100],
    "prefill_ttft": [5.0, 20.5, 80.0],
    "prefill_thpt_per_gpu": [20000.0, 29268.3, 13750.0],
}
DECODE: dict[str, Any] = {
    "x_kv_usage": [0.1, 0.5, 0.2, 1.0],
    "y_context_length": [350.0, 350.0, 850.0, 850.0],
    "z_itl": [8.0, 12.5, 9.0, 15.0],
    "z_thpt_per_gpu": [125.0, 900.0, 111.0, 800.0],
    "max_kv_tokens": 32768,
}
WHOLE = Profile(
    (
        PrefillPoint(100.0, 0.005, 20000.0),
        PrefillPoint(600.0, 0.0205, 29268.3),
        PrefillPoint(1100.0, 0.08, 13750.0),
    ),
    (
        DecodePoint(0.1, 350.0, 0.008, 125.0),
        DecodePoint(0.5, 350.0, 0.0125, 900.0),
        DecodePoint(0.2, 850.0, 0.009, 111.0),
        DecodePoint(1.0, 850.0, 0.015, 800.0),
    ),
    32768,
)


def as_json(folder: Path, kind: str, document: Any) -> Path:
    path = folder / JSON[kind]
    path.write_bytes(document if isinstance(document, bytes) else orjson.dumps(document))
    return path


def as_npz(folder: Path, kind: str, document: dict[str, Any]) -> Path:
    path = folder / NPZ[kind]
    path.parent.mkdir(exist_ok=True)
    # As Dynamo's profiler does: arrays, the size of the KV cache as an array of one.
    arrays: dict[str, Any] = {key: np.array(value, ndmin=1) for key, value in document.items()}
    np.savez(path, **arrays)
    return path


def test_json(tmp_path: Path) -> None:
    as_json(tmp_path, "prefill", PREFILL)
    as_json(tmp_path, "decode", DECODE)
    assert read_profile(tmp_path) == WHOLE


def test_npz_comes_first(tmp_path: Path) -> None:
    as_npz(tmp_path, "prefill", PREFILL)
    as_npz(tmp_path, "decode", DECODE)
    as_json(tmp_path, "decode", b"{}")
    assert read_profile(tmp_path) == WHOLE


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profile"
    written = write_profile(folder, WHOLE)
    assert [path.name for path in written] == ["prefill_raw_data.json", "decode_raw_data.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(JSON.values())
    assert orjson.loads(written[0].read_bytes())["prefill_ttft"] == pytest.approx([5, 20.5, 80])
    again = read_profile(folder)
    assert again.decode_rows() == [pytest.approx(row) for row in WHOLE.decode_rows()]
    assert again.max_kv_tokens == WHOLE.max_kv_tokens


def said(folder: Path) -> str:
    with pytest.raises(InputError) as raised:
        read_profile(folder)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(f"{folder}", "FOLDER")


def test_nothing_there(tmp_path: Path) -> None:
    neither = "selected_prefill_interpolation/raw_data.npz or prefill_raw_data.json"
    assert said(tmp_path) == f"FOLDER: needs {neither}, and has neither"
    as_json(tmp_path, "prefill", PREFILL)
    assert "decode_raw_data.json" in said(tmp_path)
    assert said(tmp_path / "none").startswith("FOLDER: needs")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prefill_isl": None}, "prefill_isl: must be a list of finite numbers"),
        ({"prefill_isl": [1, 2, "3"]}, "prefill_isl: must be a list of finite numbers"),
        ({"prefill_isl": [1, True, 3]}, "prefill_isl: must be a list of finite numbers"),
        ({"prefill_isl": [1, None, 3]}, "prefill_isl: must be a list of finite numbers"),
        ({"prefill_isl": [[1], [2], [3]]}, "prefill_isl: must be a list of finite numbers"),
        ({"prefill_isl": [2, 2, 2]}, "prefill_isl: must have at least 2 different values"),
        ({"prefill_isl": [1, 2]}, "must have as many values: prefill_isl 2, prefill_ttft 3"),
        ({"prefill_ttft": [1, 2, 0]}, "prefill_ttft: must be 0.01 to 3.6e+06, not 0"),
        (
            {"prefill_thpt_per_gpu": [1, -2, 3]},
            "prefill_thpt_per_gpu: must be 0.001 to 1e+09, not -2",
        ),
        ({key: [7.0] for key in PREFILL}, "prefill_isl: must have at least 2 different values"),
        ({key: [] for key in PREFILL}, "prefill_isl: must have at least 2 different values"),
        (
            {key: [*range(1, MOST_POINTS + 2)] for key in PREFILL},
            "prefill_isl: must have at most 1,000 values",
        ),
    ],
)
def test_a_bad_value(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    as_json(tmp_path, "decode", DECODE)
    as_json(tmp_path, "prefill", PREFILL | change)
    line = said(tmp_path)
    assert line.startswith("FOLDER/prefill_raw_data.json: ")
    assert told in line


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"x_kv_usage": [0.1, 0.5, 0.2, 1.5]},
            "x_kv_usage: must be 1e-06 to 1, not 1.5",
        ),
        ({"max_kv_tokens": [1, 2]}, "max_kv_tokens: must be one number of at least 1"),
        ({"max_kv_tokens": 0.5}, "max_kv_tokens: must be one number of at least 1"),
        ({"max_kv_tokens": "many"}, "max_kv_tokens: must be one number of at least 1"),
    ],
)
@pytest.mark.parametrize("write", [as_json, as_npz])
def test_a_bad_value_of_streams(
    tmp_path: Path, write: Any, change: dict[str, Any], told: str
) -> None:
    as_json(tmp_path, "prefill", PREFILL)
    path = write(tmp_path, "decode", DECODE | change)
    line = said(tmp_path)
    assert line.startswith(f"FOLDER/{path.relative_to(tmp_path)}: ")
    assert told in line or "is no type of numbers" in line


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "9" * 400])
def test_numbers_that_are_none(tmp_path: Path, value: str) -> None:
    as_json(tmp_path, "decode", DECODE)
    text = orjson.dumps(PREFILL).replace(b"1100", value.encode())
    as_json(tmp_path, "prefill", text)
    assert "finite numbers" in said(tmp_path)
    (tmp_path / JSON["prefill"]).unlink()
    as_npz(tmp_path, "prefill", PREFILL | {"prefill_isl": [1, 2, float("nan")]})
    assert said(tmp_path).endswith("prefill_isl: must be a list of finite numbers")


@pytest.mark.parametrize("document", [b"", b"[1]", b"7", b"{", b"\xff\xfe", b"null"])
def test_what_is_no_object(tmp_path: Path, document: bytes) -> None:
    as_json(tmp_path, "prefill", document)
    assert said(tmp_path).startswith("FOLDER/prefill_raw_data.json: must be ")


@pytest.mark.parametrize("write", [as_json, as_npz])
def test_other_keys(tmp_path: Path, write: Any) -> None:
    write(tmp_path, "prefill", {"i\nsl": [1, 2], "prefill_ttft": [1, 2]})
    line = said(tmp_path)
    told = r"lacks prefill_isl, prefill_thpt_per_gpu; it has 'i\nsl', 'prefill_ttft'"
    assert line.endswith(told)


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as packed:
        for key, content in members.items():
            packed.writestr(f"{key}.npy", content)


def array(value: Any, *, header: bytes = b"") -> bytes:
    """An array as numpy writes it, or one with another header in its place."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array(value), allow_pickle=True)
    if not header:
        return file.getvalue()
    padded = header + b" " * 8 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(24)


GOOD = {key: array(value) for key, value in PREFILL.items()}


class Ran:
    """What a pickle would run, if one were read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "isl",
    [
        array([Ran(), 2, 3]),
        pickle.dumps([1, 2, 3]),
        b"",
        array(["a", "b", "c"]),
        array([1j, 2, 3]),
        array(np.zeros(MOST_POINTS + 1)),
        b"\x93NUMPY\x09\x00" + array([1, 2, 3])[8:],
        array([1, 2, 3])[:-1],
        array(0, header=b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"),
        array(0, header=b"{'descr': '<f8', 'fortran_order': False, 'shape': (-3,), }"),
        array(0, header=b"{'descr': '|V9999', 'fortran_order': False, 'shape': (3,), }"),
        array(0, header=b"-" * 9000 + b"1"),
        array(0, header=b"(" * 9000),
        array(0, header=b"{"),
    ],
    ids=range(14),
)
def test_an_array_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isl: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / NPZ["prefill"]
    archive(path, GOOD | {"prefill_isl": isl})
    assert said(tmp_path).startswith(
        f"FOLDER/{NPZ['prefill']}: prefill_isl: must be an array of numbers: "
    )
    assert not (tmp_path / "ran").exists()


def test_an_archive_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / NPZ["prefill"]
    archive(path, GOOD)
    whole = path.read_bytes()
    middle = len(whole) // 2
    for content in (b"", b"PK", whole[:middle], whole[:60] + b"\xff" * 20 + whole[80:]):
        path.write_bytes(content)
        assert said(tmp_path).startswith(
            f"FOLDER/{NPZ['prefill']}: must be a zip archive of arrays"
        )
    archive(path, GOOD, zipfile.ZIP_LZMA)
    assert said(tmp_path).endswith("prefill_isl.npy must be stored or deflated")


def test_what_is_large(tmp_path: Path) -> None:
    """Before it is parsed, and when it is large only once it is unpacked."""
    path = tmp_path / NPZ["prefill"]
    archive(path, GOOD | {"prefill_isl": array(np.zeros(MOST_BYTES))})
    assert path.stat().st_size < MOST_BYTES / 10
    assert said(tmp_path).endswith("prefill_isl: must have at most 1,048,576 bytes unpacked")
    path.write_bytes(bytes(MOST_BYTES + 1))
    assert said(tmp_path).endswith("raw_data.npz: must have at most 1,048,576 bytes")
    path.unlink()
    as_json(tmp_path, "prefill", b" " * (MOST_BYTES + 1))
    assert said(tmp_path).endswith("prefill_raw_data.json: must have at most 1,048,576 bytes")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    as_json(tmp_path, "prefill", PREFILL).chmod(0)
    assert said(tmp_path).endswith("cannot be read: Permission denied")


@given(st.data())
def test_any_bytes_are_a_profile_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    path = as_npz(folder, "prefill", PREFILL)
    as_json(folder, "decode", DECODE)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    line = ""
    try:
        read_profile(folder)
    except InputError as error:
        line = str(error)
    assert "\n" not in line
