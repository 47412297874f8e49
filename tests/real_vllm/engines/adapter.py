"""A small random LoRA adapter for the model of `tiny_model.py`, written without torch."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import orjson

RANK, LAYERS, HIDDEN = 8, 2, 64
OUTPUTS = {"q_proj": 64, "v_proj": 32}
"""Rows of the projections that it changes."""


def made_adapter(folder: Path, seed: int) -> Path:
    """Write one of many into a new folder.

    safetensors are a JSON header and the numbers behind it.
    """
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(OUTPUTS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
    pick, header, data = random.Random(seed), {}, bytearray()
    for layer in range(LAYERS):
        for name, rows in OUTPUTS.items():
            for part, shape in (("A", (RANK, HIDDEN)), ("B", (rows, RANK))):
                numbers = array("f", [pick.gauss(0.0, 0.2) for _ in range(shape[0] * shape[1])])
                at = len(data)
                data += numbers.tobytes()
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (at, len(data))}
    head = orjson.dumps(header)
    size = len(head).to_bytes(8, "little")
    (folder / "adapter_model.safetensors").write_bytes(size + head + data)
    return folder
