"""Options of a simulated engine: ranges, and what of them the pure model gets."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from replayer.engine.types import EngineOptions
from replayer.simulator.options import SimOptions, flag


def test_defaults_are_the_models_own() -> None:
    assert SimOptions().engine() == EngineOptions()


@pytest.mark.parametrize("spec", [f for f in fields(SimOptions) if f.metadata["least"]])
def test_what_is_below_its_range_is_named(spec: Any) -> None:
    least = spec.metadata["least"]
    with pytest.raises(ValueError, match=rf"^{flag(spec.name)} .*: must be at least {least:g}"):
        SimOptions(**{spec.name: least / 2})


@pytest.mark.parametrize("name", ["kv_load_failure_policy", "kv_connector", "plant"])
def test_words_are_of_a_list(name: str) -> None:
    wrong: dict[str, Any] = {name: "sometimes"}
    with pytest.raises(ValueError, match=f"{flag(name)} sometimes: must be one of "):
        SimOptions(**wrong)


def test_a_request_must_fit_into_the_cache() -> None:
    """One block is never used."""
    fits: dict[str, Any] = {"block_size": 16, "num_gpu_blocks": 11}
    assert SimOptions(**fits, max_model_len=160).engine().num_blocks == 10
    with pytest.raises(ValueError, match="--max-model-len 161: must be at most 160"):
        SimOptions(**fits, max_model_len=161)


def test_where_d_reads_nobody_waits_for_a_sender_and_pins_end_with_their_lease() -> None:
    sends = SimOptions(sender_slots=3, abort_timeout=7.0, kv_lease=5.0).engine()
    assert (sends.sender_slots, sends.abort_timeout_s, sends.reads_anything) == (3, 7.0, False)
    reads = SimOptions(
        kv_connector="nixl", sender_slots=3, abort_timeout=7.0, kv_lease=5.0
    ).engine()
    assert reads.sender_slots > 1000
    assert (reads.abort_timeout_s, reads.reads_anything) == (5.0, True)


def test_a_hot_gpu_is_one_of_the_gpus() -> None:
    assert SimOptions(gpus=4, hot_gpu=3).heat().hot_gpu == 3
    with pytest.raises(ValueError, match="--hot-gpu 4: must be 0 to 3"):
        SimOptions(gpus=4, hot_gpu=4)
