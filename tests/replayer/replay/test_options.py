"""The command line of `replay`: what is read, and what is refused in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayer.replay.options import (
    SessionSample,
    parse_options,
    readable_log,
    retries,
    sample,
    slo,
    url,
    window,
)
from replayer.replay.retries import Retries


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (window, "5:60", (5.0, 60.0)),
        (window, ":60", (0.0, 60.0)),
        (window, "5:", (5.0, float("inf"))),
        (sample, "10", SessionSample(count=10)),
        (sample, "0.1", SessionSample(ratio=0.1)),
        (sample, "1.0", SessionSample(ratio=1.0)),
        (slo, "ttft:2,tpot:0.05", {"ttft": 2.0, "tpot": 0.05}),
        (retries, "3", Retries(3)),
        (retries, "backoff", Retries.backoff()),
        (url, "host:8000", "http://host:8000"),
        (url, "https://host/", "https://host"),
        (url, "http://host:8000/v1", "http://host:8000"),
    ],
)
def test_values(read: Callable[[str], Any], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (window, "5"),
        (window, "60:5"),
        (window, "5:5"),
        (window, "a:b"),
        (sample, "0"),
        (sample, "1.5"),
        (sample, "-1"),
        (slo, "ttft"),
        (slo, "speed:3"),
        (slo, "ttft:0"),
        (url, "ftp://host"),
        (url, "http://"),
    ],
)
def test_no_values(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


def test_a_log_may_be_still_to_come_but_not_its_folder(tmp_path: Path) -> None:
    assert readable_log(str(tmp_path / "log")) == tmp_path / "log"
    for wrong, reason in ((tmp_path, "is a folder"), (tmp_path / "a" / "log", "no folder")):
        with pytest.raises(argparse.ArgumentTypeError, match=reason):
            readable_log(str(wrong))


def test_ids_are_for_completions_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "t"), "--target", "h:1", "--prompt-form", "ids"]
    assert parse_options([*words, "--endpoint", "completions"]).prompt == "ids"
    with pytest.raises(SystemExit) as ended:
        parse_options([*words, "--endpoint", "chat"])
    assert ended.value.code == 2
    assert "ids needs --endpoint completions" in capsys.readouterr().err


def test_a_ramp_is_for_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "t"), "--target", "h:1", "--ramp", "10"]
    assert parse_options([*words, "--mode", "sessions"]).ramp_s == 10.0
    with pytest.raises(SystemExit) as ended:
        parse_options(words)
    assert ended.value.code == 2
    assert "--ramp: needs --mode sessions" in capsys.readouterr().err
