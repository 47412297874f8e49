"""The intervals of a trace, the empty ones as well."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.core.types import Traffic
from planner.sources.trace import files, windows
from replayer.arguments import InputError


def written(path: Path, rows: list[tuple[float, int, int]]) -> Path:
    lines = (
        {"timestamp": round(1000 * at_s), "input_length": i, "output_length": o, "hash_ids": [n]}
        for n, (at_s, i, o) in enumerate(rows)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_every_interval_has_its_requests_and_their_means(tmp_path: Path) -> None:
    rows = [(0.0, 100, 10), (9.9, 300, 30), (10.0, 50, 5), (45.0, 70, 7)]
    found = list(windows([written(tmp_path / "a.jsonl", rows)], 10.0))
    assert found == [
        Traffic(10.0, 2, 200.0, 20.0),
        Traffic(10.0, 1, 50.0, 5.0),
        Traffic(10.0, 0),
        Traffic(10.0, 0),
        Traffic(10.0, 1, 70.0, 7.0),
    ]


def test_a_file_a_folder_and_a_glob_name_traces(tmp_path: Path) -> None:
    one, two = (written(tmp_path / name, [(0.0, 1, 1)]) for name in ("1.jsonl", "2.jsonl"))
    assert files(str(one)) == [one]
    assert files(str(tmp_path)) == [one, two]
    assert files(f"{tmp_path}/2*") == [two]
    assert len(list(windows([one, two], 5.0))) == 2
    with pytest.raises(InputError, match="there is no such file"):
        files(f"{tmp_path}/3*")


def test_two_copies_of_a_trace_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path / "1.jsonl", [(0.0, 1, 1)])
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(one.read_bytes()))
    assert len(files(str(one))) == 1
    with pytest.raises(InputError, match=r"it is there as 1\.jsonl\.gz, too"):
        files(str(tmp_path))


def test_a_prompt_that_is_a_text_has_no_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp":0,"prompt":"a","output_length":4,"request_id":"b"}\n')
    assert list(windows([path], 10.0)) == [Traffic(10.0, 1, None, 4.0)]


def test_a_trace_of_very_many_intervals_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [(0.0, 1, 1), (2000.0, 1, 1)])
    with pytest.raises(InputError, match="over 100000 intervals"):
        list(windows([path], 0.01))
