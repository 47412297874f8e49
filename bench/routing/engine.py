"""The simulated engine of a run, as a Dynamo mocker is told of it: model, timing, sizes.

Its constants are those of one 80 GB GPU with an 8B model, rounded: prefill 4 ms + 1 ms per 20 new
tokens, a decode step 10 ms + 3 ms per 100,000 tokens of KV in the batch. All are in engine time,
which runs `speedup` times faster than real time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson

from replayer.arguments import write_json
from replayer.replay.prompts import word_vocabulary

MODEL = "bench"
BLOCK_TOKENS = 64
BATCHED_TOKENS = 8_192
SEQUENCES = 256
CONTEXT_TOKENS = 1 << 20
"""Longest prompt that the model takes: longer than any engine's KV."""
PREFILL_BASE_S = 0.004
PREFILL_TPS = 20_000.0
STEP_BASE_S = 0.010
STEP_S_PER_KV_TOKEN = 3e-8
VOCABULARY = 4_096
SPECIAL = ("<pad>", "<unk>", "<eos>")
END = "<eos>"
"""Ends each message, as chat templates do. The frontends remember tokenised prompts up to such a
token; it is the only one that the template adds."""


def write_engine(folder: Path, kv_tokens: int, speedup: float) -> Path:
    """Write model, timing and sizes of an engine into a folder; returns the mocker's arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(model_folder(folder))
    timing = folder / "timing.npz"
    np.savez(timing, **timing_profile(kv_tokens))  # type: ignore[arg-type]  # its stub wants a flag
    profile = {"provider": "dynamo_profile", "config": {"path": str(timing.resolve())}}
    arguments = folder / "engine.json"
    engine = {
        "backend": "vllm",
        "worker_type": "aggregated",
        "num_gpu_blocks": kv_tokens // BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "speedup_ratio": speedup,
        "timing_model": {"type": "external", **profile},
    }
    write_json(arguments, {"engine": engine, "dynamo": {"enable_local_indexer": True}})
    return arguments


def model_folder(folder: Path) -> Path:
    """The model's place in an engine's folder."""
    return folder / "model"


def timing_profile(kv_tokens: int) -> dict[str, np.ndarray]:
    """The mocker's tables, in milliseconds: linear, so that its interpolation is exact."""
    new_tokens = np.concatenate([[0.0], np.exp2(np.arange(21))])
    in_use = np.linspace(0.0, 2.0 * kv_tokens, 33)
    context = np.linspace(1.0, CONTEXT_TOKENS, 65)
    step_s = STEP_BASE_S + STEP_S_PER_KV_TOKEN * in_use
    return {
        "prefill_isl": new_tokens,
        "prefill_ttft_ms": 1e3 * (PREFILL_BASE_S + new_tokens / PREFILL_TPS),
        "decode_active_kv_tokens": in_use,
        "decode_context_length": context,
        "decode_itl": np.repeat(1e3 * step_s[:, None], len(context), axis=1),
    }


def write_model(folder: Path) -> None:
    """Write a model without weights in which each word of the replayed prompts is one token."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in model_files().items():
        (folder / name).write_bytes(orjson.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


TEMPLATE = "{% for m in messages %}{{ m.content }}" + END + "{% endfor %}"


def model_files() -> dict[str, object]:
    """The model's JSON files, in the form of Hugging Face's libraries."""
    words = [word.decode() for word in word_vocabulary().words]
    # The mocker answers with ids beyond the prompts' words, so the rest of the ids need words too.
    fillers = [f"out{number}" for number in range(VOCABULARY - len(SPECIAL) - len(words))]
    ids = {word: number for number, word in enumerate([*SPECIAL, *words, *fillers])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = {"pad_token": SPECIAL[0], "unk_token": SPECIAL[1], "eos_token": END}
    end = {"eos_token_id": ids[END], "pad_token_id": ids[SPECIAL[0]]}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": ids[token], "content": token, "special": True, **flags} for token in SPECIAL
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": ids, "unk_token": SPECIAL[1]},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_TOKENS,
            "chat_template": TEMPLATE,
            **special,
        },
        "generation_config.json": end,
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "dtype": "bfloat16",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            **end,
        },
    }
