"""Flags from a dataclass."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from analysis.bench.options import UNSET, declare, flag, named, numbers, read
from replayer.arguments import InputError, OneLineParser, positive, positive_count


@dataclass(frozen=True, slots=True)
class Asked:
    trace: Path = flag(Path, "a file", name="")
    loads: tuple[float, ...] = flag(numbers, "loads", (0.5, 1.0), name="load")
    think_cap_s: float = flag(positive, "seconds", 60.0, shown=UNSET)
    jobs: int = flag(positive_count, "processes", 1, shown=7)
    json: Path | None = flag(Path, "rows as JSON", None)
    only: tuple[str, ...] = flag(numbers, "some of them", ())
    unasked: int = 3


def _read(*words: str, **usual: object) -> Asked:
    parser: argparse.ArgumentParser = OneLineParser(prog="x")
    declare(parser, Asked)
    return read(Asked, parser.parse_args(words), **usual)


def test_flags_are_fields_without_their_unit() -> None:
    asked = _read("t", "--load", "2,3", "--think-cap", "5", "--jobs", "2")
    assert asked == Asked(Path("t"), (2.0, 3.0), 5.0, 2)


def test_defaults_are_the_fields_or_what_is_shown_or_what_is_usual() -> None:
    assert _read("t") == Asked(Path("t"), (0.5, 1.0), 60.0, 7)
    assert (_read("t").json, _read("t").only) == (None, ())
    assert _read("t", think_cap_s=10.0).think_cap_s == 10.0
    assert _read("t", "--think-cap", "5", think_cap_s=10.0).think_cap_s == 5.0


def test_help_names_the_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _read("--help")
    told = capsys.readouterr().out
    assert "--load LOAD" in told
    assert "loads (default: 0.5,1.0)" in told
    assert "--think-cap THINK_CAP" in told
    assert "unasked" not in told
    assert "--json JSON" in told
    assert "default: None" not in told
    assert "default: ()" not in told


@pytest.mark.parametrize("wrong", ["--load ,", "--load 0", "--jobs 0", "--think-cap x"])
def test_what_is_wrong_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _read("t", *wrong.split())
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert wrong.split()[0] in told


def test_an_unknown_name_is_told_with_those_that_are_known() -> None:
    named("law", ("b", "a"), ("a", "b"), InputError)
    with pytest.raises(InputError, match="--law: must be of a, b, not c"):
        named("law", ("a", "c"), ("a", "b"), InputError)
