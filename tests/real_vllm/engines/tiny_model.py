"""Write a tiny Qwen2 with random weights and a tokenizer of its own: `tiny_model.py FOLDER`.

Run by the engines' environment. What it says is gibberish, but which token follows which text is
fixed, and tokenizer, chat template, KV and context length are real. 256 bytes of KV per token (2
layers, one KV head of 32, bf16). The weights' spread keeps the two best logits apart, so that
greedy answers do not hang on rounding.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096
CONTEXT_TOKENS = 32_768
TRAINING_CHARS = 2_000_000
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ '" + START + "' + m['role'] + '\n' + (m['content'] or '') + '" + END + "\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '" + START + "assistant\n' }}{%- endif -%}"
)


def texts() -> Iterator[str]:
    """Something to train on that every Python brings: its own library, in a fixed order."""
    left = TRAINING_CHARS
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left < 0:
            return


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has tokens, and any tokens have text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS
    )
    made.chat_template = TEMPLATE
    return made


def model(words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Random weights, the same ones every time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    made = Qwen2ForCausalLM(config).to(torch.bfloat16)
    made.generation_config.do_sample = False
    return made


def main() -> None:
    """Write both into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    words.save_pretrained(folder)
    model(words).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    main()
