"""RequestFacts of a parsed body: session, prompt blocks, token estimate.

The prompt is the bytes of its texts, in the order in which a chat template renders them (tools
before messages). Blocks of `BLOCK_BYTES` are hashed in a chain, so one hash stands for the whole
prefix up to its block. There is no tokenizer: bytes per token are learned per model from the
engine's own `usage.prompt_tokens`.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from proxy.core.types import RequestFacts
from proxy.protocol.offloadable import COMPLETIONS, is_offloadable, whole_number

BLOCK_BYTES = 1024
BYTES_PER_TOKEN_PRIOR = 4.0
"""Typical of English and code in 100k-entry vocabularies; replaced by each model's own ratio."""
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
_READ_KEYS = {"/v1/chat/completions": ("tools", "messages", "documents"), COMPLETIONS: ("prompt",)}
"""The prompt fields that vLLM reads, where it ignores the others of PROMPT_KEYS."""
_INLINED = re.compile(r"data:[^,\s]{0,128};base64,")
_SESSION_ID_MAX = 128
_MODELS_MAX = 64
_ITEMS_MAX = 1 << 20
"""Most values of a prompt that are hashed; a list of token ids is one value."""
_PROMPTS_MAX = 1024
"""Most prompts of one request that vLLM takes (VLLM_MAX_COMPLETION_PROMPTS)."""
_IDS = "I"
"""Array type of token ids: 4 bytes each, like a token of text by the prior."""


def session_identity(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session's name: the first header or body field present; None if the client gives none.

    Long names are hashed, so that the session table's memory is bounded by its count.
    """
    metadata = body.get("metadata")
    in_metadata = metadata.get("session_id") if isinstance(metadata, dict) else None
    for header in SESSION_HEADERS:
        if given := headers.get(header):
            return bounded(given)
    named = (
        body.get("session_id"),
        in_metadata,
        body.get("prompt_cache_key"),
        body.get("previous_response_id"),
    )
    return next((bounded(name) for value in named if (name := _name(value))), None)


def _name(value: Any) -> str:
    """A string, or a whole number as its digits; empty for any other value."""
    return str(value) if type(value) in (str, int) else ""


def bounded(session_id: str) -> str:
    """A session's key: its name, or a digest of one that is long or not text."""
    if len(session_id) <= _SESSION_ID_MAX and (session_id.isascii() or _is_text(session_id)):
        return session_id
    return xxh3_128_hexdigest(session_id.encode("utf-8", "surrogatepass"))


def of_tenant(session_id: str | None, tenant: str | None) -> str | None:
    """The key of a tenant's session. Tenant names have no slash, so keys cannot collide."""
    return session_id if session_id is None or tenant is None else f"{tenant}/{session_id}"


def _is_text(name: str) -> bool:
    """Whether the name can be encoded: a header's bytes that are not UTF-8 cannot."""
    return not any(0xD800 <= ord(char) <= 0xDFFF for char in name)


def prompt_bytes(body: Mapping[str, Any], keys: tuple[str, ...] = PROMPT_KEYS) -> bytes:
    """All prompt texts of these fields as UTF-8, in their order; token ids as 4 bytes each."""
    texts: list[bytes | memoryview] = []
    for key in keys:
        if key in body:
            _collect(body[key], texts)
    return b"\x1f".join(texts)


def _collect(value: Any, texts: list[bytes | memoryview]) -> None:
    """Collect the texts of a nested value, without recursion, since the client chooses the depth.

    An inlined image or sound is replaced by its digest.
    """
    stack, left = [value], _ITEMS_MAX
    while stack and left:
        left -= 1
        item = stack.pop()
        if isinstance(item, str):
            is_inlined = item[:5] == "data:" and _INLINED.match(item)
            raw = item.encode("utf-8", "surrogatepass")
            texts.append(xxh3_128_hexdigest(raw).encode() if is_inlined else raw)
        elif isinstance(item, dict):
            stack.extend(_inner(item))
        elif isinstance(item, list):
            if (ids := _token_ids(item)) is not None:
                texts.append(ids)
            else:
                stack.extend(reversed(item if len(item) <= left else item[:left]))
        elif item is not None:
            texts.append(repr(item).encode())


def _inner(item: dict[str, Any]) -> Iterable[Any]:
    """Keys and values, last first. A text part gives its text only, as if it were not in parts."""
    if item.get("type") == "text" and isinstance(item.get("text"), str):
        return (item["text"],)
    parts: list[Any] = []
    for pair in item.items():
        parts += pair
    parts.reverse()
    return parts


def _token_ids(item: list[Any]) -> memoryview | None:
    """The ids of a tokenised prompt; None for any other list."""
    if not item or not isinstance(item[0], int):
        return None
    try:
        return memoryview(array(_IDS, item))
    except (TypeError, OverflowError):  # not only ids; the engine will refuse the prompt
        return None


def _count_ids(prompt: Any) -> int:
    """Number of token ids of a prompt, or of a list of such prompts; 0 if it is neither.

    The engine checks each id, and takes 7.0 and "7" for one, but a list of strings for texts.
    """
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int | float):
        return len(prompt)
    first = prompt[:_PROMPTS_MAX]
    if isinstance(prompt[0], str):
        return 0 if all(isinstance(item, str) for item in first) else len(prompt)
    return sum(len(ids) for ids in first if isinstance(ids, list))


def _truncated(tokens: int, most: Any) -> int:
    """Tokens of a prompt of which the engine keeps `most`; -1 stands for what its context holds."""
    kept = whole_number(most)
    return tokens if kept is None or kept < 0 else max(1, min(tokens, kept))


def block_hashes(prompt: bytes, root: bytes = b"") -> list[int]:
    """Chained xxh3-64 over whole blocks of the prompt; a partial last block has no hash."""
    if len(prompt) < BLOCK_BYTES:
        return []
    chain = xxh3_64_intdigest(root)
    starts = range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES)
    return [chain := xxh3_64_intdigest(prompt[at : at + BLOCK_BYTES], chain) for at in starts]


class TokenEstimator:
    """Bytes of prompt per token, one moving average per model."""

    def __init__(self) -> None:
        self._ratio: OrderedDict[str, float] = OrderedDict()

    def bytes_per_token(self, model: str) -> float:
        """The learned ratio, or the prior for a model without answers."""
        return self._ratio.get(model, BYTES_PER_TOKEN_PRIOR)

    def ratios(self) -> dict[str, float]:
        """All learned ratios, by model."""
        return dict(self._ratio)

    def adopt(self, model: str, ratio: float) -> None:
        """Start with the ratio that another process has learned, unless there is one."""
        self._ratio.setdefault(model, ratio)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn from an answer's `usage.prompt_tokens`; skip a short prompt, mostly template."""
        if prompt_tokens < 64 or prompt_bytes < BLOCK_BYTES:
            return
        seen = min(64.0, max(0.25, prompt_bytes / prompt_tokens))
        old = self._ratio.pop(model, None)
        self._ratio[model] = seen if old is None else 0.9 * old + 0.1 * seen
        if len(self._ratio) > _MODELS_MAX:
            self._ratio.popitem(last=False)

    def facts(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        tenant: str | None = None,
    ) -> tuple[RequestFacts, int]:
        """The facts of a request, and the number of bytes of its prompt's text (for `learn`).

        The number is 0 where the engine counts other tokens than those of this text.

        Sessions of two tenants are different ones, even with the same name.
        """
        model = _name(body.get("model"))
        prompt = prompt_bytes(body, _READ_KEYS.get(endpoint, PROMPT_KEYS))
        ids = _count_ids(body.get("prompt")) if endpoint == COMPLETIONS else 0
        ratio = self.bytes_per_token(model)
        tokens = ids or max(1, round(len(prompt) / ratio))
        most = body.get("truncate_prompt_tokens")
        if most is not None:
            tokens = _truncated(tokens, most)
        root = f"{model}\0{_name(body.get('cache_salt'))}".encode("utf-8", "surrogatepass")
        facts = RequestFacts(
            model=model,
            session_id=of_tenant(session_identity(headers, body), tenant),
            tenant=tenant or "",
            prompt_tokens=tokens,
            # Of a truncated prompt the engine may keep the tail, which no hash is of.
            block_hashes=block_hashes(prompt, root) if most is None else [],
            block_tokens=BLOCK_BYTES * (ids / max(1, len(prompt)) if ids else 1 / ratio),
            offloadable=is_offloadable(endpoint, body),
        )
        return facts, 0 if ids or most is not None else len(prompt)
