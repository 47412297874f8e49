"""Decisions in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from planner.scalers.base import Decision, Failure, ScalerError
from planner.scalers.file import FileScaler
from tests.planner.scalers.test_virtual import FLEET


async def test_the_file_has_the_last_decision_whole(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    scaler = FileScaler(path)
    await scaler.validate([])
    assert await scaler.observe() == {}
    for number in range(2):
        decision = Decision(number, {"combined": number}, 1.5, "load")
        assert (await scaler.apply(decision, FLEET)).is_done
    assert json.loads(path.read_text())["targets"] == {"combined": 1}
    assert await FileScaler(path).observe() == {"combined": 1}
    assert os.listdir(tmp_path) == ["decision.json"]


async def test_a_folder_that_is_not_there_is_a_line(tmp_path: Path) -> None:
    scaler = FileScaler(tmp_path / "none" / "decision.json")
    for call in (scaler.validate([]), scaler.apply(Decision(0, {}, 0.0), FLEET)):
        with pytest.raises(ScalerError, match="No such file") as caught:
            await call
        assert caught.value.failure is Failure.FAILED


async def test_what_is_no_decision_is_not_observed(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    for text in ("{}", '{"targets": {"combined": -1}}', '{"targets": {"combined": 1e12}}', "["):
        path.write_text(text)
        assert await FileScaler(path).observe() == {}
