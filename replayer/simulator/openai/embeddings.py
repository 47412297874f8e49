"""`/v1/embeddings` as vLLM serves it for embedding models: prompts computed, no token generated.

A vector is a function of its prompt's tokens: equal prompts have equal vectors of length 1, other
prompts nearly orthogonal ones.
"""

from __future__ import annotations

import base64
import math
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from replayer.engine.tokens import Prompt, make_prompt
from replayer.engine.types import Job
from replayer.simulator.openai.errors import ApiError, invalid
from replayer.simulator.openai.requests import RequestLimits, check_model, embedded_ids, too_long

DIMENSIONS = 1_024
_MOST_DIMENSIONS = 16_384
_FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class Embedding:
    """A valid request for vectors, one per prompt."""

    model: str
    prompts: tuple[Prompt, ...]
    dimensions: int
    is_base64: bool

    def jobs(self, request_id: str) -> list[Job]:
        """The engine's work: each prompt, and no output."""
        return [
            Job(f"{request_id}-{index}", prompt.tokens, prompt.block_hashes, 0, "stop")
            for index, prompt in enumerate(self.prompts)
        ]

    def answer(self, request_id: str, created_s: int) -> bytes:
        """The body with all vectors and the token counts."""
        data = [
            {"index": index, "object": "embedding", "embedding": self._vector(prompt)}
            for index, prompt in enumerate(self.prompts)
        ]
        tokens = sum(prompt.tokens for prompt in self.prompts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return orjson.dumps(
            {
                "id": f"embd-{request_id}",
                "object": "list",
                "created": created_s,
                "model": self.model,
                "data": data,
                "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            }
        )

    def _vector(self, prompt: Prompt) -> list[float] | str:
        draw = random.Random(prompt.digest.intdigest())
        raw = [draw.uniform(-1.0, 1.0) for _ in range(self.dimensions)]
        length = math.hypot(*raw)
        values = array("f", [value / length for value in raw])
        return base64.b64encode(values.tobytes()).decode() if self.is_base64 else values.tolist()


def parse_embedding(body: Mapping[str, Any], limits: RequestLimits) -> Embedding:
    """Check a body and tokenise its prompts: `input` or, as a chat, `messages`."""
    check_model(body, limits.model)
    form = body.get("encoding_format", "float")
    if form not in _FORMATS:
        names = " or ".join(f"'{name}'" for name in _FORMATS)
        text = f"Input should be {names} (engine-sim has no other)"
        raise invalid("literal_error", "body.encoding_format", text, form)
    dimensions = body.get("dimensions")
    if dimensions is not None and not (
        type(dimensions) is int and 1 <= dimensions <= _MOST_DIMENSIONS
    ):
        text = f"dimensions must be an integer from 1 to {_MOST_DIMENSIONS}"
        raise ApiError(400, text, "dimensions")
    salt = str(body.get("cache_salt") or "")
    prompts = [make_prompt(ids, limits.block_size, salt) for ids in embedded_ids(body)]
    for prompt in prompts:
        if prompt.tokens > limits.max_model_len:
            raise too_long(prompt, limits)
    return Embedding(limits.model, tuple(prompts), dimensions or DIMENSIONS, form == "base64")
