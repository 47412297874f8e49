"""The mocker's description: linear timing, a word a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from bench.routing.engine import MODEL, model_files, model_folder, timing_profile, write_engine
from replayer.replay.prompts import word_vocabulary


def test_the_tables_say_what_the_constants_say() -> None:
    tables = timing_profile(262_144)
    prefill_ms = np.interp(20_000, tables["prefill_isl"], tables["prefill_ttft_ms"])
    assert prefill_ms == pytest.approx(4 + 1_000)
    for column in (0, -1):  # whatever the context is
        step_ms = np.interp(
            100_000, tables["decode_active_kv_tokens"], tables["decode_itl"][:, column]
        )
        assert step_ms == pytest.approx(10 + 3)


def test_every_word_of_a_prompt_is_one_token() -> None:
    tokenizer: Any = model_files()["tokenizer.json"]
    ids = tokenizer["model"]["vocab"]
    assert all(word.decode() in ids for word in word_vocabulary().words)
    assert sorted(ids.values()) == list(range(4_096))
    specials = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert specials == {word: ids[word] for word in specials}


def test_an_engine_is_written_for_a_mocker(tmp_path: Path) -> None:
    arguments = write_engine(tmp_path / "engine", 166_000, 2.0)
    engine = orjson.loads(arguments.read_bytes())["engine"]
    assert (engine["num_gpu_blocks"], engine["block_size"]) == (2_593, 64)
    assert engine["speedup_ratio"] == 2.0
    profile = np.load(engine["timing_model"]["config"]["path"])
    assert set(profile) == set(timing_profile(1))
    config = orjson.loads((model_folder(tmp_path / "engine") / "config.json").read_bytes())
    assert config["vocab_size"] == 4_096
    assert MODEL
