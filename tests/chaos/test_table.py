"""The table and the tests are about the same faults."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.conftest import ROWS

HERE = Path(__file__).parent
FILES = {path.stem.split("_")[1]: path for path in HERE.glob("test_?_*.py")}


def test_every_row_has_its_test_in_the_file_of_its_group() -> None:
    ids = [row["id"] for row in ROWS]
    assert ids == list(range(1, len(ROWS) + 1))
    for letter, path in FILES.items():
        named = re.findall(r"^(?:async )?def test_f(\d+)_", path.read_text(), re.MULTILINE)
        rows = {row["id"] for row in ROWS if row["group"] == letter.upper()}
        assert set(map(int, named)) == rows, path.name
    assert {row["group"] for row in ROWS} == {letter.upper() for letter in FILES}


def test_every_row_says_what_is_expected() -> None:
    assert all(row["title"] and row["expected"] for row in ROWS)
