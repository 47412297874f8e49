"""Numbers on the command lines: what is read, and what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from replayer.arguments import (
    OneLineParser,
    count,
    not_negative,
    number,
    positive,
    positive_count,
)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (number, "-1.5", -1.5),
        (positive, "1e-3", 0.001),
        (not_negative, "0", 0.0),
        (count, "0", 0),
        (positive_count, "1", 1),
    ],
)
def test_values(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (number, "x"),
        (number, "nan"),
        (number, "inf"),
        (number, "-inf"),
        (positive, "0"),
        (positive, "-1"),
        (not_negative, "-0.1"),
        (count, "-1"),
        (count, "1.0"),
        (count, ""),
        (positive_count, "0"),
        (positive_count, "two"),
    ],
)
def test_no_values(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a"):
        read(text)


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="p")
    parser.add_argument("--n", type=positive)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--n", "-1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("p: argument --n: must be a number > 0, not '-1'")
