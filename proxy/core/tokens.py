"""From a parsed request body to the facts a decision needs: session, prompt blocks, token estimate.

The prompt is looked at as the bytes of its texts, in the order a chat template renders them
(tools before messages). Blocks of `BLOCK_BYTES` are hashed in a chain, so one hash stands for the
whole prefix up to its block. No tokenizer: bytes per token are learned per model from the
engine's own `usage.prompt_tokens`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from proxy.core.types import RequestFacts

BLOCK_BYTES = 1024
BYTES_PER_TOKEN_PRIOR = 4.0
"""English and code in the usual 100k-entry vocabularies; replaced by what each model reports."""
SESSION_HEADERS = (
    "X-Session-ID",
    "X-Session-Affinity",
    "X-Correlation-ID",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "X-Dynamo-Session-ID",
)
PROMPT_KEYS = (
    "tools",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "query",
    "documents",
)
OFFLOAD_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions"})
_SESSION_ID_MAX = 128
_MODELS_MAX = 64
_ID_BYTES = array("Q").itemsize


def session_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session's name: the first header or body field present; None when the client gives none.

    Long names are hashed, so that the session table's memory is bounded by its count.
    """
    metadata = body.get("metadata")
    in_metadata = metadata.get("session_id") if isinstance(metadata, dict) else None
    named = (
        *(headers.get(name) for name in SESSION_HEADERS),
        body.get("session_id"),
        in_metadata,
        body.get("prompt_cache_key"),
        body.get("previous_response_id"),
    )
    found = next((str(value) for value in named if value not in (None, "")), None)
    if found is not None and len(found) > _SESSION_ID_MAX:
        return xxh3_64_hexdigest(found.encode("utf-8", "surrogatepass"))
    return found


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """All prompt texts as UTF-8, in rendering order; token ids as 8 bytes each."""
    return b"\x1f".join(text for key in PROMPT_KEYS if key in body for text in _texts(body[key]))


def _texts(value: Any) -> Iterator[bytes]:
    """The texts of a nested value, without recursion: depth is the client's to choose."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield _text(item)
        elif isinstance(item, dict):
            for key, inner in reversed(item.items()):
                stack += (inner, key)
        elif isinstance(item, list):
            if item and all(type(entry) is int and 0 <= entry < 2**63 for entry in item):
                yield array("Q", item).tobytes()
            else:
                stack.extend(reversed(item))
        elif item is not None:
            yield str(item).encode()


def _text(item: str) -> bytes:
    """UTF-8; an inlined image or sound stands for itself by its digest, not by its megabytes."""
    raw = item.encode("utf-8", "surrogatepass")
    return xxh3_64_hexdigest(raw).encode() if item.startswith("data:") else raw


def block_hashes(prompt: bytes, root: bytes = b"") -> list[int]:
    """Chained xxh3-64 over whole blocks of the prompt; a partial last block has no hash."""
    view = memoryview(prompt)
    chain = xxh3_64_intdigest(root)
    hashes = []
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chain = xxh3_64_intdigest(view[start : start + BLOCK_BYTES], seed=chain)
        hashes.append(chain)
    return hashes


def is_offloadable(endpoint: str, body: Mapping[str, Any]) -> bool:
    """Whether two legs give the same answer as one request, and there is something to decode."""
    if endpoint not in OFFLOAD_ENDPOINTS:
        return False
    prompt = body.get("prompt")
    several_prompts = isinstance(prompt, list) and not all(type(p) is int for p in prompt)
    one_answer = all(body.get(key) in (None, 1) for key in ("n", "best_of"))
    limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
    forbidden = ("use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
    return (
        one_answer
        and not several_prompts
        and not any(limit in (0, 1) for limit in limits)
        and not any(body.get(key) not in (None, False) for key in forbidden)
    )


class TokenEstimator:
    """Bytes of prompt per token, one moving average per model name."""

    def __init__(self) -> None:
        self._ratio: OrderedDict[str, float] = OrderedDict()

    def bytes_per_token(self, model: str) -> float:
        """The learned ratio, or the prior for a model that has not answered yet."""
        return self._ratio.get(model, BYTES_PER_TOKEN_PRIOR)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take in one answer's `usage.prompt_tokens`; a short prompt is mostly template, skip."""
        if prompt_tokens < 64 or prompt_bytes < BLOCK_BYTES:
            return
        seen = min(64.0, max(0.25, prompt_bytes / prompt_tokens))
        old = self._ratio.pop(model, None)
        self._ratio[model] = seen if old is None else 0.9 * old + 0.1 * seen
        if len(self._ratio) > _MODELS_MAX:
            self._ratio.popitem(last=False)

    def facts(
        self, endpoint: str, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[RequestFacts, int]:
        """The facts of a request, and its prompt's size in bytes (for `learn`)."""
        model = str(body.get("model") or "")
        prompt = prompt_bytes(body)
        tokens = max(1, round(len(prompt) / self.bytes_per_token(model)))
        root = f"{model}\0{body.get('cache_salt') or ''}".encode("utf-8", "surrogatepass")
        facts = RequestFacts(
            model=model,
            session_id=session_identity(headers, body),
            prompt_tokens=tokens,
            block_hashes=block_hashes(prompt, root),
            block_tokens=tokens * BLOCK_BYTES / max(1, len(prompt)),
            offloadable=is_offloadable(endpoint, body),
        )
        return facts, len(prompt)
