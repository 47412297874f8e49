"""Loads by name, and ids of blocks."""

from __future__ import annotations

from pathlib import Path

from replayer.loads import LOADS, SYNTHETIC, make, missing
from replayer.loads.load import Blocks


def test_prompts_share_nothing() -> None:
    blocks = Blocks()
    assert list(blocks.take(1)) == [0]
    assert list(blocks.take(513)) == [1, 2]
    assert list(blocks.take(512)) == [3]


def test_only_recorded_loads_need_a_file(tmp_path: Path) -> None:
    lacking = [name for name in LOADS if missing(name, tmp_path)]
    assert lacking == [name for name in LOADS if name not in SYNTHETIC]
    assert missing("agentic", None)
    assert make("spike", 2, None).seed == 2
